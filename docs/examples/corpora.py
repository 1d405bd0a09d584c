"""The examples' data: text as bytes, and proteins, split into documents to train on and held out.

A document is an entry of the dictionary, or a protein. Some documents are held out: no model sees
any of them in training, and every number reported is measured on them alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brickwork.assemblies.proteins import tokenize

DATA = Path(__file__).parent / "data"
DICTIONARY = DATA / "devils_dictionary.txt"
PROTEOME = DATA / "arabidopsis_chloroplast_proteome.fasta"

# Text is bytes, 0 to 255, and two tokens more.
END, MASK = 256, 257
TEXT_VOCABULARY = 258


class Protein(NamedTuple):
    """A record of a FASTA file: what its header says, and its residues."""

    name: str
    sequence: str


class Stream(NamedTuple):
    """Documents laid end to end: `ids` (N,), and in `seq_ids` (N,) the document each belongs to."""

    ids: Tensor
    seq_ids: Tensor

    def windows(self, count: int, length: int, generator: torch.Generator) -> Stream:
        """`count` pieces at random places, each field (count, length)."""
        self._check(length)
        starts = torch.randint(len(self.ids) - length + 1, (count,), generator=generator)
        places = starts[:, None] + torch.arange(length)
        return Stream(self.ids[places], self.seq_ids[places])

    def rows(self, length: int) -> Tensor:
        """The ids in order, cut into rows of `length`, less an incomplete last one: (R, length)."""
        self._check(length)
        whole = len(self.ids) // length * length
        return self.ids[:whole].view(-1, length)

    def _check(self, length: int) -> None:
        if length > len(self.ids):
            raise ValueError(f"length must be at most the {len(self.ids)} tokens, got {length}")


def read_text(path: Path = DICTIONARY) -> tuple[list[str], list[str]]:
    """The documents of a text file to train on, and those held out: every tenth family.

    A document begins at a line that follows an empty one and is not indented, so an entry of the
    dictionary stays whole, with the verses in it. Copies are taken once, and documents that share a
    run of forty characters (a verse quoted twice) are one family and stay together.
    """
    text = path.read_text(encoding="utf-8").strip()
    documents = list(dict.fromkeys(re.split(r"\n\s*\n(?=\S)", text)))
    families = _families([" ".join(document.split()) for document in documents], run=40)
    return _split(documents, families, every=10, path=path)


def read_proteins(path: Path = PROTEOME) -> tuple[list[Protein], list[Protein]]:
    """The proteins of a FASTA file to train on, and those held out: every seventh family.

    Copies are taken once, and proteins that share a run of eight residues are one family and stay
    together: none held out has a close relative in training (a distant one it may have).
    """
    proteins: dict[str, Protein] = {}
    for record in re.split(r"^>", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        header, _, body = record.partition("\n")
        sequence = "".join(body.split())
        name = header.split("|")[-1].split("[")[0].strip()
        proteins.setdefault(sequence, Protein(name, sequence))
    return _split(list(proteins.values()), _families(list(proteins), run=8), every=7, path=path)


def text_stream(documents: Sequence[str]) -> Stream:
    """The bytes of texts, an `END` behind each."""
    return _stream([torch.tensor([*text.encode(), END]) for text in documents])


def protein_stream(proteins: Sequence[Protein]) -> Stream:
    """The tokens of proteins, each from `<cls>` to `<eos>`."""
    return _stream([tokenize([p.sequence]).input_ids[0] for p in proteins])


def to_text(ids: Tensor, *, mask: str = "_", end: str = "¶") -> str:
    """Ids (T,) as text, one character for each token; `?` in a circle for what is not ASCII."""
    special = {MASK: mask, END: end, 10: "\n"}
    return "".join(special.get(i) or (chr(i) if 32 <= i < 127 else "\ufffd") for i in ids.tolist())


def unigram(ids: Tensor, vocab_size: int) -> Tensor:
    """The baseline: log-probabilities (V,) of tokens by how often they occur in `ids`, plus one."""
    return ((torch.bincount(ids, minlength=vocab_size) + 1.0) / (len(ids) + vocab_size)).log()


def _stream(documents: list[Tensor]) -> Stream:
    lengths = torch.tensor([len(ids) for ids in documents])
    numbers = torch.arange(len(documents)).repeat_interleave(lengths)
    return Stream(torch.cat(documents), numbers)


def _split(
    documents: list[Any], families: list[int], *, every: int, path: Path
) -> tuple[list[Any], list[Any]]:
    """Hold out every `every`-th family, in the order of the file."""
    order = {family: i for i, family in enumerate(sorted(set(families)))}
    parts: tuple[list[Any], list[Any]] = ([], [])
    for document, family in zip(documents, families, strict=True):
        parts[order[family] % every == every // 2].append(document)
    if not all(parts):
        raise ValueError(f"{path} must hold more than {every // 2} unrelated documents")
    return parts


def _families(documents: list[str], *, run: int) -> list[int]:
    """For each document the number of its family: those that share runs of characters connect."""
    family = list(range(len(documents)))
    first_with: dict[str, int] = {}
    for i, document in enumerate(documents):
        for start in range(len(document) - run + 1):
            j = first_with.setdefault(document[start : start + run], i)
            if family[i] != family[j]:
                family = [family[j] if f == family[i] else f for f in family]
    return family
