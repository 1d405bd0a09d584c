"""The examples' data: text as bytes, and proteins, split into documents to train on and held out.

A document is an entry of the dictionary, or a protein. Some documents are held out: no model sees
any of them in training, and every number reported is measured on them alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
        starts = torch.randint(len(self.ids) - length + 1, (count,), generator=generator)
        places = starts[:, None] + torch.arange(length)
        return Stream(self.ids[places], self.seq_ids[places])

    def rows(self, length: int) -> Tensor:
        """The ids in order, cut into rows of `length`, less an incomplete last one: (R, length)."""
        whole = len(self.ids) // length * length
        return self.ids[:whole].view(-1, length)


def read_text(path: Path = DICTIONARY) -> tuple[list[str], list[str]]:
    """The documents of a text file to train on, and those held out: every tenth.

    A document begins at a line that follows an empty one and is not indented, so an entry of the
    dictionary stays whole, with the verses in it.
    """
    documents = re.split(r"\n\s*\n(?=\S)", path.read_text(encoding="utf-8").strip())
    kept, held_out = _split(documents, list(range(len(documents))), every=10)
    if not held_out:
        raise ValueError(f"{path} has {len(documents)} documents; it takes 6 to hold one out")
    return kept, held_out


def read_proteins(path: Path = PROTEOME) -> tuple[list[Protein], list[Protein]]:
    """The proteins of a FASTA file to train on, and those held out: every seventh family.

    Copies of one protein are taken once. Proteins that share a run of eight residues are one
    family and stay together, so none held out has a close relative in training (a distant one it
    may have).
    """
    proteins: dict[str, Protein] = {}
    for record in re.split(r"^>", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        header, _, body = record.partition("\n")
        sequence = "".join(body.split())
        name = header.split("|")[-1].split("[")[0].strip()
        proteins.setdefault(sequence, Protein(name, sequence))
    found = list(proteins.values())
    kept, held_out = _split(found, _families([p.sequence for p in found]), every=7)
    if not held_out:
        raise ValueError(f"{path} has {len(found)} proteins; it takes 4 families to hold one out")
    return kept, held_out


def text_stream(documents: Sequence[str]) -> Stream:
    """The bytes of texts, an `END` behind each."""
    return _stream([torch.tensor([*text.encode(), END]) for text in documents])


def protein_stream(proteins: Sequence[Protein]) -> Stream:
    """The tokens of proteins, each from `<cls>` to `<eos>`."""
    return _stream([tokenize([p.sequence]).input_ids[0] for p in proteins])


def to_text(ids: Tensor, *, mask: str = "_", end: str = "¶") -> str:
    """Ids (T,) as text, one character for each token."""
    special = {MASK: mask, END: end}
    return "".join(special.get(i) or chr(i) for i in ids.tolist())


def unigram(ids: Tensor, vocab_size: int) -> Tensor:
    """The baseline: log-probabilities (V,) of tokens by how often they occur in `ids`, plus one."""
    return ((torch.bincount(ids, minlength=vocab_size) + 1.0) / (len(ids) + vocab_size)).log()


def _stream(documents: list[Tensor]) -> Stream:
    lengths = torch.tensor([len(ids) for ids in documents])
    numbers = torch.arange(len(documents)).repeat_interleave(lengths)
    return Stream(torch.cat(documents), numbers)


def _split(documents: list, families: list[int], *, every: int) -> tuple[list, list]:
    """Hold out every `every`-th family."""
    order = {family: i for i, family in enumerate(sorted(set(families)))}
    kept: list = []
    held_out: list = []
    for document, family in zip(documents, families, strict=True):
        (held_out if order[family] % every == every // 2 else kept).append(document)
    return kept, held_out


def _families(sequences: list[str], *, run: int = 8) -> list[int]:
    """For each sequence the number of its family: those that shared runs of residues connect."""
    family = list(range(len(sequences)))
    first_with: dict[str, int] = {}
    for i, sequence in enumerate(sequences):
        for start in range(len(sequence) - run + 1):
            j = first_with.setdefault(sequence[start : start + run], i)
            if family[i] != family[j]:
                family = [family[i] if f == family[j] else f for f in family]
    return family
