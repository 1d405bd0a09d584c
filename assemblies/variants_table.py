"""Scores for a table of variants, in a table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from brickwork.assemblies.embed_records import progress_bar
from brickwork.assemblies.fasta import problem_of, read_fasta, rereadable
from brickwork.assemblies.lc_plm import LCPLM
from brickwork.assemblies.protein_embeddings import MAX_TOKENS
from brickwork.assemblies.protein_variants import parse_variant, variant_scores
from brickwork.assemblies.tables import read_table, write_table

_SHOWN = 20


def score_variants_table(
    model: LCPLM,
    fasta: str | os.PathLike[str],
    table: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    column: str = "mutant",
    id_column: str = "id",
    score_column: str = "score",
    first_position: int = 1,
    max_tokens: int = MAX_TOKENS,
    overwrite: bool = False,
    progress: bool = False,
) -> None:
    """Write `table` to `out` with the `variant_scores` of its rows in a column more.

    Arguments:
        fasta: the wild types, plain or gzipped; `-` is standard input.
        table: a header line and a row a variant; `.tsv` has tabs, everything else commas. So has
            `out`, which is written whole or not at all.
        column: of the variants.
        id_column: of the record in `fasta` that a variant is of; may be missing if there is one.
        score_column: the one to add.
        first_position, max_tokens: see `variant_scores`.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a bad argument; a column is missing; rows whose variant is misspelt or does not
            fit its sequence, with line and reason of each; a record that is missing or bad; `out`
            is there and not to be overwritten.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file, {out} is a folder")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists: overwrite it, or name another file")
    read = read_table(table, column)
    if score_column in read.columns:
        raise ValueError(f"score_column must be new, {table} has a column {score_column!r}")
    ids = [row[id_column] for row in read.rows] if id_column in read.columns else None
    wild_types = _wild_types(fasta, ids, id_column)
    of_protein: dict[str, list[int]] = {}
    for i in range(len(read.rows)):
        of_protein.setdefault(ids[i] if ids is not None else next(iter(wild_types)), []).append(i)
    variants = [row[column].strip() for row in read.rows]
    masked, wrong = 0, []
    for name, rows in of_protein.items():
        positions = set()
        for i in rows:
            try:
                found = parse_variant(variants[i], wild_types[name], first_position=first_position)
                positions |= {mutation.at for mutation in found}
            except ValueError as error:
                wrong.append((read.lines[i], str(error)))
        masked += len(positions)
    if wrong:
        raise _wrong_rows(table, sorted(wrong))
    bar = progress_bar(masked, "positions") if progress else contextlib.nullcontext()
    with bar as shown:
        for name, rows in of_protein.items():
            scores = variant_scores(
                model,
                wild_types[name],
                [variants[i] for i in rows],
                first_position=first_position,
                max_tokens=max_tokens,
                on_progress=None if shown is None else shown.update,
            )
            for i, score in zip(rows, scores.tolist()):
                read.rows[i][score_column] = f"{score:.9g}"
    write_table(out, [*read.columns, score_column], read.rows)


def _wild_types(
    fasta: str | os.PathLike[str], ids: Sequence[str] | None, id_column: str
) -> dict[str, str]:
    """The sequences of the records in `ids`, or of the only one that there is."""
    wanted = None if ids is None else set(ids)
    found: dict[str, str] = {}
    with rereadable(fasta) as path:
        for record in read_fasta(path):
            if wanted is not None and record.id not in wanted:
                continue
            if reason := problem_of(record):
                raise ValueError(f"{fasta}, line {record.line}, {record.id!r}: {reason}")
            if found.setdefault(record.id, record.sequence) != record.sequence:
                raise ValueError(f"{fasta} has two records {record.id!r} that differ")
            if wanted is None and len(found) > 1:
                raise ValueError(
                    f"{fasta} has several records: the table needs a column {id_column!r} that "
                    f"says which one a variant is of"
                )
    if missing := sorted((wanted or set()) - found.keys()):
        raise ValueError(
            f"{fasta} has no record {missing[:_SHOWN]}, which the table's column {id_column!r} "
            f"names (id_column chooses another column)"
        )
    if not found and wanted is None:
        raise ValueError(f"{fasta} holds no record")
    return found


def _wrong_rows(table: object, wrong: list[tuple[int, str]]) -> ValueError:
    shown = [f"  line {line}: {reason}" for line, reason in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        shown.append(f"  and {len(wrong) - _SHOWN} more")
    return ValueError("\n".join([f"{table} has {len(wrong)} bad rows:", *shown]))
