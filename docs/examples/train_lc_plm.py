"""Train a small LCPLM, a bidirectional Mamba protein model, on the proteins of a chloroplast."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from corpora import PROTEOME, Protein, protein_stream, read_proteins, unigram
from torch import Tensor
from training import Run, argument_parser, comparison, fit, parse, run_script

from brickwork.assemblies import LCPLM, LCPLMConfig
from brickwork.assemblies.proteins import ALPHABET, CLS, EOS, MASK, tokenize

FOLDS = 7


class Recovery(NamedTuple):
    """What a model says of each residue of one protein where it is masked: ids `truth` and `guess`
    (L,), and `log_probs` (L,) of the truth."""

    truth: Tensor
    guess: Tensor
    log_probs: Tensor


class Trained(NamedTuple):
    """The model, its run, the held-out proteins, what it recovers of each, and the bits (R,) that
    the model and the unigram baseline need for each of their residues."""

    model: LCPLM
    run: Run
    proteins: list[Protein]
    recovered: list[Recovery]
    bits: Tensor
    baseline: Tensor


def main(argv: Sequence[str] | None = None) -> Trained:
    args = parse(parser(), argv)
    proteins, held_out = read_proteins(args.data)
    train = protein_stream(proteins)
    torch.manual_seed(args.seed)
    model = build(args)

    def batch_loss(generator: torch.Generator) -> Tensor:
        ids, seq_ids = train.windows(args.batch, args.length, generator)
        draws = torch.rand(ids.shape, generator=generator)
        masked = (draws < args.mask_rate) & (ids != CLS) & (ids != EOS)
        # a row may hold pieces of several proteins: seq_ids keeps them apart
        loss = model(
            ids.masked_fill(masked, MASK),
            seq_ids=seq_ids,
            labels=ids.masked_fill(~masked, -100),
        ).loss
        assert loss is not None
        return loss

    def held_out_bits() -> float:
        return bits_of(recover(model, held_out)).mean().item()

    run = fit(model, args, batch_loss=batch_loss, evaluate=held_out_bits)
    recovered = recover(model, held_out)
    residues = train.ids[(train.ids != CLS) & (train.ids != EOS)]
    frequencies = unigram(residues, len(ALPHABET))
    truth = torch.cat([r.truth for r in recovered])
    baseline = -frequencies[truth] / math.log(2)
    trained = Trained(model, run, held_out, recovered, bits_of(recovered), baseline)
    guessed = torch.cat([r.guess for r in recovered]) == truth
    common = truth == frequencies.argmax()
    print(f"held-out bits per masked residue: {comparison(trained.bits, baseline)}")
    print(f"recovered: {guessed.float().mean():.1%} (the commonest: {common.float().mean():.1%})")
    return trained


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        __doc__, data=PROTEOME, out="runs/lc_plm", steps=500, batch=8, length=128, lr=3e-3,
        eval_every=50,
    )  # fmt: skip
    parser.add_argument("--dim", type=int, default=96, help="width of the model")
    parser.add_argument("--layers", type=int, default=3, help="number of blocks")
    parser.add_argument("--mixer", choices=["Mamba1", "Mamba2"], default="Mamba1", help="the scan")
    parser.add_argument("--state", type=int, default=16, help="numbers of state of a channel")
    parser.add_argument("--mask-rate", type=float, default=0.6, help="share of residues masked")
    return parser


def build(args: argparse.Namespace) -> LCPLM:
    mixer = {"layer": args.mixer, "d_state": args.state}
    if args.mixer == "Mamba2":
        mixer["headdim"] = 32
    return LCPLM(LCPLMConfig(d_model=args.dim, n_layer=args.layers, ssm_cfg=mixer))


@torch.no_grad()
def recover(model: LCPLM, proteins: Sequence[Protein], *, batch: int = 16) -> list[Recovery]:
    """Mask every residue once, a random seventh of them at a time, and predict what was there.

    The masks are the same at every call. Proteins of like length share a batch, padded; the
    attention mask makes sure that this changes nothing.
    """
    generator = torch.Generator().manual_seed(0)
    order = sorted(range(len(proteins)), key=lambda i: len(proteins[i].sequence))
    found: dict[int, Recovery] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        ids, real = tokenize([proteins[i].sequence for i in chosen])
        residues = real & (ids != CLS) & (ids != EOS)
        fold = torch.randint(FOLDS, ids.shape, generator=generator)
        log_probs = torch.zeros(*ids.shape, len(ALPHABET))
        for k in range(FOLDS):
            masked = residues & (fold == k)
            logits = model(ids.masked_fill(masked, MASK), attention_mask=real).logits
            log_probs[masked] = logits[masked].log_softmax(-1)
        for row, i in enumerate(chosen):
            truth, each = ids[row, residues[row]], log_probs[row, residues[row]]
            found[i] = Recovery(truth, each.argmax(-1), each.gather(1, truth[:, None])[:, 0])
    return [found[i] for i in range(len(proteins))]


def bits_of(recovered: Sequence[Recovery]) -> Tensor:
    """-log2 p of every residue of every protein: (R,)."""
    return -torch.cat([r.log_probs for r in recovered]) / math.log(2)


if __name__ == "__main__":
    run_script(main)
