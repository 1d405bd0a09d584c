"""Tables in text files: cells stand between tabs in `.tsv` and `.tab`, between commas otherwise."""

from __future__ import annotations

import csv
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Table(NamedTuple):
    """`columns`, `rows` by column, and in `lines` the number of each row's line in the file."""

    columns: list[str]
    rows: list[dict[str, str]]
    lines: list[int]


def read_table(path: str | os.PathLike[str], column: str) -> Table:
    """A table with a header line, which names `column`.

    Raises:
        OSError: it cannot be read.
        ValueError: no such column, a name that comes twice, or a row with more or fewer cells.
    """
    path = Path(path)
    rows: list[dict[str, str]] = []
    lines: list[int] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter=_delimiter(path), strict=True)
        columns = list(reader.fieldnames or [])
        if column not in columns or len(set(columns)) < len(columns):
            raise ValueError(f"{path} must have one column {column!r}, its columns are {columns}")
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        f"{path}, line {reader.line_num}, must have {len(columns)} cells"
                    )
                rows.append(row)
                lines.append(reader.line_num)
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.reader.line_num}: {error}") from error
    return Table(columns, rows, lines)


def write_table(
    path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, object]]
) -> None:
    """Write a header line and the rows: the file is whole, or what it was before."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with part.open("x", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, delimiter=_delimiter(path), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() in (".tsv", ".tab") else ","
