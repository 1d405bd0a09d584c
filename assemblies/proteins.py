"""Proteins for LCPLM: ESM-2's alphabet, embeddings, and scores of masked residues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brickwork.assemblies.lc_plm import LCPLM
from brickwork.kernels.checks import check_integer

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
    return _pad(_rows(sequences))


def decode(input_ids: Tensor) -> list[str]:
    """The sequences of (B, T) token ids, without `<cls>`, `<eos>` and `<pad>`.

    >>> decode(tokenize(["MK", "M<mask>KV"]).input_ids)
    ['MK', 'M<mask>KV']
    """
    dropped = {CLS, PAD, EOS}
    return ["".join(ALPHABET[i] for i in row if i not in dropped) for row in input_ids.tolist()]


@torch.no_grad()
def embed_proteins(model: LCPLM, sequences: Sequence[str], *, batch_size: int = 8) -> Tensor:
    """The mean of the last hidden state over each protein's residues, without `<cls>` and `<eos>`.

    Proteins of like length share a batch; what one gets does not depend on the others.

    Returns:
        (len(sequences), C), in the order given.

    Raises:
        ValueError: as `tokenize`, an empty protein, or `batch_size` below 1.
    """
    check_integer("batch_size", batch_size, least=1)
    rows = _rows(sequences)
    lengths = torch.tensor([len(row) for row in rows])
    if (lengths == 2).any():
        raise ValueError(
            f"sequence {int((lengths == 2).int().argmax())} is empty: nothing to average"
        )
    device = model.embedding.weight.device
    found: list[Tensor | None] = [None] * len(rows)
    for chunk in lengths.argsort(stable=True).split(batch_size):
        chunk_ids, chunk_mask = (t.to(device) for t in _pad([rows[i] for i in chunk.tolist()]))
        hidden = model(chunk_ids, attention_mask=chunk_mask).last_hidden_state
        residues = chunk_mask & (chunk_ids != CLS) & (chunk_ids != EOS)
        weights = residues / residues.sum(1, keepdim=True)
        means = torch.einsum("btc,bt->bc", hidden.float(), weights)
        for i, mean in zip(chunk.tolist(), means):
            found[i] = mean
    return torch.stack([mean for mean in found if mean is not None])


@torch.no_grad()
def masked_log_probs(
    model: LCPLM, sequence: str, *, positions: Sequence[int] | None = None, batch_size: int = 16
) -> Tensor:
    """Log-probabilities of every token at each residue, that residue alone masked.

    Arguments:
        sequence: one protein of L residues.
        positions: which residues, counted from 0 (default: all).
        batch_size: how many masked copies are run at a time.

    Returns:
        (len(positions), vocab_size), float32.

    Raises:
        ValueError: as `tokenize`, or a position outside [0, L).
    """
    check_integer("batch_size", batch_size, least=1)
    ids = tokenize([sequence]).input_ids[0]
    length = len(ids) - 2
    wanted = range(length) if positions is None else positions
    for position in wanted:
        if not 0 <= position < length:
            raise ValueError(f"positions must be in [0, {length}), got {position}")
    device = model.embedding.weight.device
    rows = [torch.empty(0, model.config.vocab_size)]
    for chunk in torch.tensor([p + 1 for p in wanted], dtype=torch.int64).split(batch_size):
        copies = ids.repeat(len(chunk), 1)
        copies[torch.arange(len(chunk)), chunk] = MASK
        logits = model(copies.to(device)).logits[torch.arange(len(chunk)), chunk]
        rows.append(logits.log_softmax(-1).cpu())
    return torch.cat(rows)


def _rows(sequences: Sequence[str]) -> list[list[int]]:
    if isinstance(sequences, str) or not sequences:
        raise ValueError(f"sequences must be a list of at least one protein, got {sequences!r}")
    return [[CLS, *_residue_ids(sequence, i), EOS] for i, sequence in enumerate(sequences)]


def _pad(rows: Sequence[Sequence[int]]) -> ProteinBatch:
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ProteinBatch(ids, mask)


def _residue_ids(sequence: str, index: int) -> list[int]:
    ids: list[int] = []
    at = 0
    while at < len(sequence):
        found = _TOKEN.match(sequence, at)
        if found is None or found.group() in ("<cls>", "<pad>", "<eos>"):
            raise ValueError(
                f"sequence {index} has {sequence[at]!r} at {at}, not one of {RESIDUES!r}"
            )
        ids.append(_ID[found.group()])
        at = found.end()
    return ids
