"""A first look at a FASTA file: which records can be used, how long they are, what is wrong."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from brickwork.assemblies.fasta import BadRecord, FastaRecord, problem_of, read_fasta


@dataclass(frozen=True)
class Survey:
    """Of the N usable records their `lengths` (N,) and `numbers` (N,) in the file, from 0, and the
    bytes of their ids together; the `bad` records; the `digest` of all."""

    file: Path
    lengths: Tensor
    numbers: Tensor
    id_bytes: int
    bad: list[BadRecord]
    digest: str

    def windows(self, tokens: int) -> Iterator[tuple[int, list[FastaRecord]]]:
        """The usable records again, in order, by lists of at least `tokens` tokens, each with the
        place of its first.

        Raises:
            ValueError: the file has changed.
        """
        hashed, row, size = hashlib.sha256(), 0, 0
        window: list[FastaRecord] = []
        changed = ValueError(f"{self.file} has changed since it was first read: begin anew")
        upcoming = self._number(0)
        for number, record in enumerate(read_fasta(self.file)):
            hashed.update(_text(record))
            if number != upcoming:
                continue
            if len(record.sequence) < self.lengths[row + len(window)]:
                raise changed
            window.append(record)
            size += len(record.sequence) + 2
            upcoming = self._number(row + len(window))
            if size >= tokens:
                yield row, window
                row, size, window = row + len(window), 0, []
        if window:
            yield row, window
        if hashed.hexdigest() != self.digest:
            raise changed

    def _number(self, row: int) -> int:
        return int(self.numbers[row]) if row < len(self.numbers) else -1


def survey(
    file: Path, *, max_length: int, truncate: bool = False, keep_duplicate_ids: bool = False
) -> Survey:
    """Read all of `file`; 32 bytes a record are held in memory, and the bad records.

    Arguments:
        max_length: the most residues of a record.
        truncate: longer ones count as that long, instead of being bad.
        keep_duplicate_ids: an id that comes again with another sequence is not bad.
    """
    hashed = hashlib.sha256()
    lengths, numbers, ids, sequences = (array("q") for _ in range(4))
    bad: list[BadRecord] = []
    total = 0
    for number, record in enumerate(read_fasta(file)):
        hashed.update(_text(record))
        if reason := problem_of(record, None if truncate else max_length):
            bad.append(BadRecord(record.line, record.id, reason))
            continue
        lengths.append(min(len(record.sequence), max_length))
        numbers.append(number)
        ids.append(_short_hash(record.id))
        sequences.append(_short_hash(record.sequence))
        total += len(record.id.encode())
    found = [_tensor(values) for values in (lengths, numbers, ids, sequences)]
    if not keep_duplicate_ids:
        clashes = _clashes(file, found[1], *_suspects(found[2], found[3]))
        bad = sorted([*bad, *clashes.values()])
        total -= sum(len(record.id.encode()) for record in clashes.values())
        keep = torch.ones(len(lengths), dtype=torch.bool)
        keep[list(clashes)] = False
        found = [values[keep] for values in found]
    return Survey(file, found[0], found[1], total, bad, hashed.hexdigest())


def _suspects(ids: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose id came before with another sequence, and the rows where it came first."""
    order = ids.argsort(stable=True)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = ids[order][1:] != ids[order][:-1]
    first = order[new][new.cumsum(0) - 1]
    differ = sequences[order] != sequences[first]
    return order[differ], first[differ]


def _clashes(file: Path, numbers: Tensor, rows: Tensor, first: Tensor) -> dict[int, BadRecord]:
    """The suspects that are not merely of the same hash, by row."""
    if not len(rows):
        return {}
    wanted = set(numbers[rows].tolist()) | set(numbers[first].tolist())
    seen = {n: (r.line, r.id) for n, r in enumerate(read_fasta(file)) if n in wanted}
    found = {}
    for row, number, before in zip(rows.tolist(), numbers[rows].tolist(), numbers[first].tolist()):
        (line, id_), (first_line, first_id) = seen[number], seen[before]
        if id_ == first_id:
            reason = f"the id of line {first_line} again, with another sequence"
            found[row] = BadRecord(line, id_, reason)
    return found


def _text(record: FastaRecord) -> bytes:
    return f"{record.id}\0{record.sequence}\n".encode(errors="surrogateescape")


def _short_hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _tensor(values: array[int]) -> Tensor:
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0).long()
