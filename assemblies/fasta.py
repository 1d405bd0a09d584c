"""Proteins of a FASTA file, read one after the other, and what is wrong with a record."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from brickwork.assemblies.protein_tokens import RESIDUES

_ILLEGAL = re.compile(f"[^{RESIDUES}.-]")
_SHOWN = 20


class FastaRecord(NamedTuple):
    """`id`, the first word of its header; `sequence`; `line`, the header's number from 1."""

    id: str
    sequence: str
    line: int


class BadRecord(NamedTuple):
    """A record that cannot be used: its header's `line`, its `id`, and the `reason`."""

    line: int
    id: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.id!r}: {self.reason}"


def read_fasta(file: str | os.PathLike[str]) -> Iterator[FastaRecord]:
    """The records of a FASTA file, plain or gzipped, in their order; one at a time is in memory.

    A sequence may go over several lines; white space in it is dropped. Records are not checked.

    Raises:
        OSError: the file cannot be opened.
        ValueError: text before the first header, or a damaged gzip file.

    >>> _ = Path("two.fasta").write_text(">a first\\nMK\\nV\\n>b\\nML\\n")
    >>> for record in read_fasta("two.fasta"):
    ...     print(record)
    FastaRecord(id='a', sequence='MKV', line=1)
    FastaRecord(id='b', sequence='ML', line=4)
    """
    with _open(file) as lines:
        header, start = None, 0
        parts: list[str] = []
        numbered = enumerate(lines, start=1)
        while True:
            try:
                number, line = next(numbered, (0, ">"))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{file} is a damaged gzip file: {error}") from error
            if not line.startswith(">"):
                if header is None and line.strip():
                    raise ValueError(
                        f"{file} is not FASTA: line {number} stands before the first header "
                        f"(a line that starts with '>'): {line.strip()[:40]!r}"
                    )
                parts += line.split()
                continue
            if header is not None:
                yield FastaRecord((header.split(maxsplit=1) or [""])[0], "".join(parts), start)
            if number == 0:
                return
            header, start, parts = line[1:], number, []


def problem_of(record: FastaRecord, max_length: int | None = None) -> str | None:
    """Why the record is of no use, or None: no id, no residues, more of them than `max_length`, or
    one outside the alphabet.

    >>> problem_of(FastaRecord("a", "MKJ", 1))
    "residue 3 is 'J', not one of 'LAGVSERTIDPKQNFYMHWCXBUZO.-'"
    """
    if not record.id:
        return "the header names no id"
    if not record.id.isprintable():
        return "the id is not printable UTF-8"
    if not record.sequence:
        return "the sequence is empty"
    if found := _ILLEGAL.search(record.sequence):
        return f"residue {found.start() + 1} is {found.group()!r}, not one of '{RESIDUES}.-'"
    if max_length is not None and len(record.sequence) > max_length:
        return (
            f"{len(record.sequence)} residues are longer than the {max_length} allowed "
            f"(max_length; by default max_tokens - 2)"
        )
    return None


def bad_records_error(file: object, bad: list[BadRecord]) -> ValueError:
    """An error that names the first bad records of `file` and counts the rest."""
    lines = [f"{file} has {len(bad)} bad record{'s' if len(bad) > 1 else ''}:"]
    lines += [f"  {record}" for record in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  and {len(bad) - _SHOWN} more")
    return ValueError("\n".join(lines))


@contextlib.contextmanager
def rereadable(file: str | os.PathLike[str]) -> Iterator[Path]:
    """A path whose contents can be read several times: `file`, or a copy of a pipe or, for `-`, of
    standard input."""
    path = Path(file)
    if str(file) != "-" and (path.is_file() or not path.exists() or path.is_dir()):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "input.fasta"
        with contextlib.ExitStack() as stack, copy.open("wb") as target:
            source = sys.stdin.buffer if str(file) == "-" else stack.enter_context(path.open("rb"))
            shutil.copyfileobj(source, target)
        yield copy


def _open(file: str | os.PathLike[str]) -> TextIO:
    with open(file, "rb") as start:
        gzipped = start.read(2) == b"\x1f\x8b"
    opener = gzip.open if gzipped else open
    # what is not UTF-8 is found by `problem_of`, which can name the record
    return opener(file, "rt", encoding="utf-8-sig", errors="surrogateescape")
