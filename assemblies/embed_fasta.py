"""Embeddings of every protein of a FASTA file, in one safetensors file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from brickwork.assemblies.embed_records import digest_of, embed_records, layout_of
from brickwork.assemblies.fasta import BadRecord, bad_records_error, rereadable
from brickwork.assemblies.fasta_survey import survey
from brickwork.assemblies.lc_plm import LCPLM
from brickwork.assemblies.protein_embeddings import MAX_TOKENS, layer_numbers
from brickwork.assemblies.resumable_file import resumable_file
from brickwork.kernels.checks import check_integer, check_one_of

POOLS: tuple[str, ...] = ("mean", "residues", "both")
SAVED_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
)


def embed_fasta(
    model: LCPLM,
    fasta: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_tokens: int = MAX_TOKENS,
    layers: Sequence[int] = (-1,),
    pool: Literal["mean", "residues", "both"] = "mean",
    max_length: int | None = None,
    truncate: bool = False,
    skip_bad: bool = False,
    keep_duplicate_ids: bool = False,
    saved_dtype: torch.dtype = torch.float32,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> list[BadRecord]:
    """Embed every record of a FASTA file, as `embed_proteins` and `embed_residues` would.

    The file holds, of N records, in the order of `fasta`, R residues in all: `mean.{layer}` (N, C);
    or, or also, `residues.{layer}` (R, C), one record's after the other's; `lengths` (N,);
    `records` (N,), the place of each in `fasta` from 0; `ids`, in UTF-8, one a line.
    `ProteinEmbeddings` reads it. Sequences that come twice have two rows, also under one id.

    Arguments:
        fasta: plain or gzipped; `-` is standard input.
        out: the safetensors file. Until it is whole there are `out.partial` and `out.partial.done`
            instead.
        max_tokens: of a batch, padding and the two tokens around each protein included.
        layers: which hidden states, see `embed_proteins`.
        max_length: the most residues of a record; by default `max_tokens` - 2.
        truncate: embed the first `max_length` residues of longer records, which are bad otherwise.
        skip_bad: leave out bad records: without id, without residues, with one outside the
            alphabet, too long, or with an id that an earlier record has with another sequence.
        keep_duplicate_ids: do not count the last of these as bad.
        saved_dtype: of the embeddings in `out`.
        resume: go on where a run with the same model, records and settings has been stopped; what
            it finished up to a second before is not computed again.
        overwrite: replace `out`, or what is left of an unfinished run.
        progress: show progress and the time left on standard error.

    Returns:
        The bad records, which were left out.

    Raises:
        ImportError: safetensors or, with `progress`, tqdm is not installed.
        OSError: a file cannot be read or written, or the disk is full.
        ValueError: a bad argument; bad records, naming line, id and reason of each; no record; not
            FASTA; `out` or a part of it is there, or was made of something else; another program is
            writing it; an embedding that is not finite.
    """
    check_integer("max_tokens", max_tokens, least=3)
    max_length = max_tokens - 2 if max_length is None else max_length
    check_integer("max_length", max_length, least=1)
    if max_length > max_tokens - 2:
        raise ValueError(
            f"max_length must be at most max_tokens - 2 = {max_tokens - 2}, got {max_length}"
        )
    check_one_of("pool", pool, POOLS)
    check_one_of("saved_dtype", saved_dtype, SAVED_DTYPES)
    if resume and overwrite:
        raise ValueError("resume and overwrite must not both be True")
    if Path(out).is_dir():
        raise ValueError(f"out must be a file, {out} is a folder")
    if Path(out).exists() and Path(fasta).exists() and Path(out).samefile(fasta):
        raise ValueError(f"out must not be the FASTA file, got {out} for both")
    numbers = layer_numbers(model, layers)
    with rereadable(fasta) as file:
        found = survey(
            file, max_length=max_length, truncate=truncate, keep_duplicate_ids=keep_duplicate_ids
        )
        if found.bad and not skip_bad:
            raise bad_records_error(fasta, found.bad)
        if not len(found.lengths):
            raise ValueError(f"{fasta} holds no record to embed")
        settings = {
            "model_sha256": digest_of(model),
            "device": model.embedding.weight.device.type,
            "records_sha256": found.digest,
            "max_tokens": max_tokens,
            "layers": list(numbers),
            "pool": pool,
            "max_length": max_length,
            "truncate": truncate,
            "keep_duplicate_ids": keep_duplicate_ids,
            "saved_dtype": str(saved_dtype).removeprefix("torch."),
        }
        layout = layout_of(found, settings, saved_dtype, model.config.d_model)
        with resumable_file(out, layout, resume=resume, overwrite=overwrite) as target:
            if target is not None:
                embed_records(target, model, found, settings, progress=progress)
            elif progress:
                print(f"{out} is there already, of the same model and records", file=sys.stderr)
    return found.bad
