"""Train a small Rish, a causal mixture-of-experts language model, on the bytes of a dictionary."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from corpora import DICTIONARY, END, TEXT_VOCABULARY, read_text, text_stream, to_text, unigram
from torch import Tensor
from torch.nn import functional as F
from training import Run, argument_parser, comparison, fit, parse, run_script

from brickwork.assemblies import Rish, RishConfig


class Trained(NamedTuple):
    """The model, its run, the held-out rows (R, T), and the bits per byte (R,) that the model and
    the unigram baseline need for each."""

    model: Rish
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
        loss = model(ids, labels=ids).loss
        assert loss is not None
        return loss

    def held_out_bits() -> float:
        return bits_per_byte(model, rows).mean().item()

    run = fit(model, args, batch_loss=batch_loss, evaluate=held_out_bits)
    # the first byte of a row is given to both
    baseline = -unigram(train.ids, TEXT_VOCABULARY)[rows[:, 1:]].mean(1) / math.log(2)
    trained = Trained(model, run, rows, bits_per_byte(model, rows), baseline)
    print(f"held-out bits per byte: {comparison(trained.bits, baseline)}")
    print(continue_text(model, "TRUTH, n.  ", length=120))
    return trained


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        __doc__, data=DICTIONARY, out="runs/rish", steps=500, batch=16, length=128, lr=3e-3,
        eval_every=50,
    )  # fmt: skip
    parser.add_argument("--dim", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=3, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="heads of the queries")
    parser.add_argument("--kv-heads", type=int, default=2, help="heads of the keys and values")
    parser.add_argument("--expert-dim", type=int, default=128, help="hidden width of an expert")
    parser.add_argument("--experts", type=int, default=8, help="experts of a block")
    parser.add_argument("--top-k", type=int, default=2, help="experts that a token is sent to")
    return parser


def build(args: argparse.Namespace) -> Rish:
    config = RishConfig(
        vocab_size=TEXT_VOCABULARY,
        hidden_size=args.dim,
        intermediate_size=args.expert_dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        pad_token_id=None,
        eos_token_id=END,
    )
    return Rish(config)


@torch.no_grad()
def bits_per_byte(model: Rish, rows: Tensor) -> Tensor:
    """For each of `rows` (R, T) the mean -log2 p of every token but the first, given those before
    it: (R,)."""
    found = []
    for ids in rows.split(32):
        logits = model(ids).logits[:, :-1].transpose(1, 2)
        found.append(F.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1))
    return torch.cat(found) / math.log(2)


def continue_text(model: Rish, prompt: str, *, length: int, **sampling: Any) -> str:
    """`prompt` and at most `length` bytes more, up to the end of the entry.

    `sampling`: `temperature`, `top_k`, `top_p`; without them the likeliest byte is taken.
    """
    ids = torch.tensor([[*prompt.encode()]])
    generator = torch.Generator().manual_seed(0)
    ids = model.generate(ids, max_new_tokens=length, generator=generator, **sampling)
    return to_text(ids[0])


if __name__ == "__main__":
    run_script(main)
