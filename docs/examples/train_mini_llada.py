"""Train a small MiniLLaDA, a masked-diffusion language model, on the bytes of a dictionary."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from corpora import (
    DICTIONARY,
    END,
    MASK,
    TEXT_VOCABULARY,
    read_text,
    text_stream,
    to_text,
    unigram,
)
from torch import Tensor
from training import Run, argument_parser, comparison, fit, parse, run_script

from brickwork.assemblies import MiniLLaDA, MiniLLaDAConfig

EXAMPLE = "TALK, v.t.  To com__t an in__scretion wi__out temp__tion, from an im__lse"


class Trained(NamedTuple):
    """The model, its run, the held-out rows (R, T), and the bits per byte (R,) that the model (an
    upper bound) and the unigram baseline need for each."""

    model: MiniLLaDA
    run: Run
    rows: Tensor
    bits: Tensor
    baseline: Tensor


def main(argv: Sequence[str] | None = None) -> Trained:
    args = parse(parser(), argv)
    documents, held_out = read_text(args.data)
    train, rows = text_stream(documents), text_stream(held_out).rows(args.length)
    torch.manual_seed(args.seed)
    model = build(args)

    def batch_loss(generator: torch.Generator) -> Tensor:
        ids = train.windows(args.batch, args.length, generator).ids
        loss = model(ids, labels=ids, generator=generator).loss
        assert loss is not None
        return loss

    def held_out_bits() -> float:
        return bits_per_byte(model, rows, samples=1).mean().item()

    run = fit(model, args, batch_loss=batch_loss, evaluate=held_out_bits)
    baseline = -unigram(train.ids, TEXT_VOCABULARY)[rows].mean(1) / math.log(2)
    trained = Trained(model, run, rows, bits_per_byte(model, rows, samples=4), baseline)
    print(f"held-out bits per byte, upper bound: {comparison(trained.bits, baseline)}")
    for ids in infill(model, EXAMPLE, steps=8):
        print(to_text(ids))
    return trained


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        __doc__, data=DICTIONARY, out="runs/mini_llada", steps=700, batch=16, length=128, lr=2e-3,
        eval_every=50,
    )  # fmt: skip
    parser.add_argument("--dim", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=3, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--mlp-dim", type=int, default=384, help="hidden width of the MLP")
    return parser


def build(args: argparse.Namespace) -> MiniLLaDA:
    config = MiniLLaDAConfig(
        vocab_size=TEXT_VOCABULARY,
        mask_token_id=MASK,
        dim=args.dim,
        depth=args.layers,
        head=args.heads,
        intermediate_size=args.mlp_dim,
    )
    return MiniLLaDA(config)


def bits_per_byte(model: MiniLLaDA, rows: Tensor, *, samples: int) -> Tensor:
    """For each of `rows` (R, T) an estimate, from `samples` masked copies, of the diffusion's bound
    on -log2 p(row) / T: (R,).

    The bound can only be too high, so the model is no worse than it says; unigram's number is
    exact. The masks are the same at every call.
    """
    generator = torch.Generator().manual_seed(0)
    nats = model.diffusion.log_likelihood(model, rows, num_samples=samples, generator=generator)
    return -nats / rows.shape[1] / math.log(2)


def infill(model: MiniLLaDA, text: str, *, steps: int | None = None) -> list[Tensor]:
    """Fill the places marked `_` in `text`: the ids (T,) before the first step and after each.

    Each of the `steps` (default: one a place) commits the predictions that are most certain.
    """
    ids = torch.tensor([[MASK if character == "_" else ord(character) for character in text]])
    masks = text.count("_")
    states = [ids[0]]
    model.diffusion.sample(
        model,
        ids,
        gen_length=0,
        block_length=masks,
        steps=steps or masks,
        suppress_ids=[END],
        callback=lambda _, state: states.append(state[0]),
    )
    return states


if __name__ == "__main__":
    run_script(main)
