"""The work of `embed_fasta`: layout of its file, batches of its records, rows put in place."""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from brickwork.assemblies.fasta import FastaRecord
from brickwork.assemblies.fasta_survey import Survey
from brickwork.assemblies.lc_plm import LCPLM
from brickwork.assemblies.protein_embeddings import batches_by_length, mean_of, residue_states
from brickwork.assemblies.protein_tokens import token_rows
from brickwork.assemblies.resumable_file import ResumableFile
from brickwork.assemblies.safetensors_layout import Layout

_WINDOW = 32  # batches' worth of records that are held, to be sorted by length


def layout_of(survey: Survey, settings: Mapping[str, Any], dtype: torch.dtype, dim: int) -> Layout:
    """What the file of embeddings holds; `dim` is the width C of the model."""
    count, residues = len(survey.lengths), int(survey.lengths.sum())
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "lengths": (torch.int64, (count,)),
        "records": (torch.int64, (count,)),
        "ids": (torch.uint8, (survey.id_bytes + count - 1,)),
    }
    for kind, rows in (("mean", count), ("residues", residues)):
        if settings["pool"] in (kind, "both"):
            tensors |= {f"{kind}.{k}": (dtype, (rows, dim)) for k in settings["layers"]}
    return Layout(tensors, settings)


def embed_records(
    target: ResumableFile,
    model: LCPLM,
    survey: Survey,
    settings: Mapping[str, Any],
    *,
    progress: bool,
) -> None:
    """Write the embeddings of all records into `target`, but for the steps that are done.

    A step is a batch. Which records are in it follows from the records and settings alone, so that
    a resumed run computes what one that was not stopped would have.
    """
    target.write("lengths", 0, survey.lengths)
    target.write("records", 0, survey.numbers)
    step = id_at = residue_at = 0
    bar = progress_bar(int(survey.lengths.sum()), "residues") if progress else None
    try:
        for first, records in survey.windows(_WINDOW * settings["max_tokens"]):
            text = ("\n" if first else "") + "\n".join(record.id for record in records)
            ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            target.write("ids", id_at, ids)
            id_at += len(ids)
            lengths = survey.lengths[first : first + len(records)]
            starts = lengths.cumsum(0) - lengths + residue_at
            residue_at += int(lengths.sum())
            sizes = [n + 2 for n in lengths.tolist()]
            for batch in batches_by_length(sizes, settings["max_tokens"]):
                if step not in target.done:
                    _embed_batch(target, model, records, sizes, first, starts, batch, settings)
                    target.finish_step(step)
                elif bar is not None:
                    bar.initial += sum(sizes[i] - 2 for i in batch)  # not to be timed
                if bar is not None:
                    bar.update(sum(sizes[i] - 2 for i in batch))
                step += 1
    finally:
        if bar is not None:
            bar.close()


def _embed_batch(
    target: ResumableFile,
    model: LCPLM,
    records: Sequence[FastaRecord],
    sizes: Sequence[int],
    first: int,
    starts: Tensor,
    batch: Sequence[int],
    settings: Mapping[str, Any],
) -> None:
    rows = token_rows([records[i].sequence[: sizes[i] - 2] for i in batch])
    dtype = getattr(torch, settings["saved_dtype"])
    found = residue_states(model, rows, tuple(settings["layers"]))
    for layer, states in zip(settings["layers"], zip(*found)):
        means = torch.stack([mean_of(state) for state in states]).to("cpu", dtype)
        every = torch.cat(states).to("cpu", dtype) if settings["pool"] != "mean" else means
        if not (means.isfinite().all() and every.isfinite().all()):
            lines = ", ".join(f"{records[i].line} ({records[i].id})" for i in batch)
            raise ValueError(
                f"an embedding in layer {layer} is not finite in {dtype}, of the records in lines "
                f"{lines}: take a wider dtype for the model or for what is saved"
            )
        if settings["pool"] != "residues":
            for i, mean in zip(batch, means):
                target.write(f"mean.{layer}", first + i, mean[None])
        if settings["pool"] != "mean":
            for i, state in zip(batch, every.split([sizes[i] - 2 for i in batch])):
                target.write(f"residues.{layer}", int(starts[i]), state)


def digest_of(model: LCPLM) -> str:
    """A hash of the config and the parameters, dtypes included."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach().to("cpu").contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update((ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr()))
    return digest.hexdigest()


def progress_bar(total: int, unit: str) -> Any:
    """A bar on standard error with the time left; in a log file a line every half minute.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("showing progress needs tqdm: pip install 'brickwork[train]'") from error
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=total, unit=f" {unit}", unit_scale=True, mininterval=interval, dynamic_ncols=True
    )
