"""The options of `python -m brickwork.assemblies.lc_plm`."""

from __future__ import annotations

import argparse
from pathlib import Path

from brickwork.assemblies.embed_fasta import POOLS, SAVED_DTYPES
from brickwork.assemblies.protein_embeddings import MAX_TOKENS

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAVED_DTYPES}


def parser() -> argparse.ArgumentParser:
    """The parser of both commands."""
    parser = argparse.ArgumentParser(
        prog="python -m brickwork.assemblies.lc_plm",
        description="Embeddings of proteins, and scores of their variants, by an LC-PLM model.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    add = shared.add_argument
    add("--model", required=True, help="folder of the checkpoint: config.json and safetensors")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    add("--dtype", choices=DTYPES, help="of the model (default: as its tensors are saved)")
    add(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"tokens of a batch, padding and two a protein included (default: {MAX_TOKENS})",
    )
    add("--overwrite", action="store_true", help="replace what stands in the output's place")
    add("--quiet", action="store_true", help="show no progress")

    embed = commands.add_parser(
        "embed",
        parents=[shared],
        help="embed every protein of a FASTA file",
        description="Embed every protein of a FASTA file. The output holds one row a record, in the"
        " file's order: mean.LAYER and, if wanted, residues.LAYER; ids, one a line; lengths; and"
        " records, each one's place in the file. brickwork.assemblies.proteins.ProteinEmbeddings"
        " reads it.",
    )
    add = embed.add_argument
    add("fasta", help="FASTA file, plain or gzipped; - for standard input")
    add("out", type=Path, help="safetensors file to write")
    add("--resume", action="store_true", help="go on where a run was stopped, if one was")
    add(
        "--layers",
        type=int,
        nargs="+",
        default=[-1],
        metavar="LAYER",
        help="0: the tokens' embedding, ..., -1: the last, after the final norm (default: -1)",
    )
    add("--pool", choices=POOLS, default="mean", help="mean over residues, each residue, or both")
    add("--max-length", type=int, metavar="N", help="most residues (default: --max-tokens less 2)")
    add("--truncate", action="store_true", help="embed the first --max-length residues of longer")
    add(
        "--skip-bad",
        action="store_true",
        help="leave out bad records and list them in OUT.skipped.tsv, instead of stopping",
    )
    add(
        "--keep-duplicate-ids",
        action="store_true",
        help="an id that comes again with another sequence is not bad, but has its row too",
    )
    add("--save-dtype", choices=DTYPES, default="float32", help="of the output")

    variants = commands.add_parser(
        "variants",
        parents=[shared],
        help="score variants of proteins by masked marginals",
        description="Score variants such as A42G, or A42G:L43F, by the log-odds of the mutant"
        " against the wild type where the residue is masked (Meier et al., 2021); above 0 the"
        " model holds the variant for likelier. The output is the table with a column more.",
    )
    add = variants.add_argument
    add("fasta", help="FASTA file with the wild types; - for standard input")
    add("table", type=Path, help="variants: .csv, or .tsv with tabs, with a header line")
    add("out", type=Path, help="table to write, .csv or .tsv")
    add("--column", default="mutant", help="the column with the variants (default: mutant)")
    add(
        "--id-column",
        default="id",
        help="the column with the record that a variant is of; not needed if the FASTA file holds"
        " one (default: id)",
    )
    add("--score-column", default="score", help="the column to add (default: score)")
    add(
        "--first-position",
        type=int,
        default=1,
        metavar="N",
        help="the number that the first residue bears in the variants (default: 1)",
    )
    return parser
