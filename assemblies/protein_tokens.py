"""ESM-2's alphabet: proteins as token ids, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO"
ALPHABET = ("<cls>", "<pad>", "<eos>", "<unk>", *RESIDUES, ".", "-", "<null_1>", "<mask>")
CLS, PAD, EOS, UNK, MASK = 0, 1, 2, 3, 32
_ID = {token: i for i, token in enumerate(ALPHABET)}
_TOKEN = re.compile("|".join(re.escape(t) for t in sorted(ALPHABET, key=len, reverse=True)))


class ProteinBatch(NamedTuple):
    """`input_ids` (B, T) int64 and `attention_mask` (B, T) bool, padded on the right."""

    input_ids: Tensor
    attention_mask: Tensor


def tokenize(sequences: Sequence[str]) -> ProteinBatch:
    """Token ids of proteins, `<cls>` first and `<eos>` last, padded on the right with `<pad>`.

    A sequence is one-letter codes in upper case; `<mask>` and `<unk>` may stand for a residue.

    Raises:
        ValueError: a single string, no sequence, or a character outside the alphabet.

    >>> tokenize(["MK", "M<mask>KV"]).input_ids
    tensor([[ 0, 20, 15,  2,  1,  1],
            [ 0, 20, 32, 15,  7,  2]])
    """
    return pad_rows(token_rows(sequences))


def decode(input_ids: Tensor) -> list[str]:
    """The sequences of (B, T) token ids, without `<cls>`, `<eos>` and `<pad>`.

    >>> decode(tokenize(["MK", "M<mask>KV"]).input_ids)
    ['MK', 'M<mask>KV']
    """
    dropped = {CLS, PAD, EOS}
    return ["".join(ALPHABET[i] for i in row if i not in dropped) for row in input_ids.tolist()]


def token_rows(sequences: Sequence[str]) -> list[list[int]]:
    """The token ids of each protein, `<cls>` first and `<eos>` last; raises as `tokenize`."""
    if isinstance(sequences, str) or not sequences:
        raise ValueError(f"sequences must be a list of at least one protein, got {sequences!r}")
    return [[CLS, *_residue_ids(sequence, i), EOS] for i, sequence in enumerate(sequences)]


def pad_rows(rows: Sequence[Sequence[int]]) -> ProteinBatch:
    """Rows of token ids as one batch, padded on the right."""
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ProteinBatch(ids, mask)


def _residue_ids(sequence: str, index: int) -> list[int]:
    letters = list(map(_ID.get, sequence))
    ids = [i for i in letters if i is not None]
    if len(ids) == len(letters):
        return ids
    ids, at = [], 0
    while at < len(sequence):
        found = _TOKEN.match(sequence, at)
        if found is None or found.group() in ("<cls>", "<pad>", "<eos>"):
            raise ValueError(
                f"sequence {index} has {sequence[at]!r} at {at}, not one of {RESIDUES + '.-'!r}"
            )
        ids.append(_ID[found.group()])
        at = found.end()
    return ids
