"""`python -m brickwork.assemblies.lc_plm`: embeddings and variant scores of proteins."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from brickwork.assemblies.embed_fasta import embed_fasta
from brickwork.assemblies.fasta import BadRecord
from brickwork.assemblies.lc_plm import LCPLM
from brickwork.assemblies.lc_plm_options import DTYPES, parser
from brickwork.assemblies.tables import write_table
from brickwork.assemblies.variants_table import score_variants_table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. What the user got wrong ends the program with a message, without a trace."""
    args = parser().parse_args(arguments)
    try:
        if args.command == "embed":
            _embed(args)
        else:
            _variants(args)
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"error: out of memory: try a lower --max-tokens ({error})") from error
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        if args.command == "embed":
            print("Stopped. --resume goes on from here.", file=sys.stderr)
        raise SystemExit(130) from None


def _load(args: argparse.Namespace) -> LCPLM:
    try:
        device = torch.device(args.device)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"--device {args.device} cannot be used here: {first}") from error
    return LCPLM.from_pretrained(args.model, dtype=DTYPES.get(args.dtype), device=device)


def _embed(args: argparse.Namespace) -> None:
    bad = embed_fasta(
        _load(args),
        args.fasta,
        args.out,
        max_tokens=args.max_tokens,
        layers=args.layers,
        pool=args.pool,
        max_length=args.max_length,
        truncate=args.truncate,
        skip_bad=args.skip_bad,
        keep_duplicate_ids=args.keep_duplicate_ids,
        saved_dtype=DTYPES[args.save_dtype],
        resume=args.resume,
        overwrite=args.overwrite,
        progress=not args.quiet,
    )
    if args.skip_bad:
        report = args.out.with_name(args.out.name + ".skipped.tsv")
        write_table(report, list(BadRecord._fields), [record._asdict() for record in bad])
        if bad:
            print(f"{len(bad)} bad records were left out: see {report}", file=sys.stderr)


def _variants(args: argparse.Namespace) -> None:
    score_variants_table(
        _load(args),
        args.fasta,
        args.table,
        args.out,
        column=args.column,
        id_column=args.id_column,
        score_column=args.score_column,
        first_position=args.first_position,
        max_tokens=args.max_tokens,
        overwrite=args.overwrite,
        progress=not args.quiet,
    )
