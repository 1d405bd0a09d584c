"""BiMamba and LCPLM against the same computed as wrappers do it: two mixers and flipped copies.

The tokens a second of two programs on the same tokens stand in the inverse ratio of their times.
"""

from __future__ import annotations

import copy

import pytest
import torch
from compare import compare
from peers import TwoMambasWithFlips, TwoTransformersMambas

from brickwork.assemblies import LCPLM, LCPLMConfig
from brickwork.blocks import BiMamba
from brickwork.kernels.backend import prefer

FLIPS, THEIRS = "two Mamba1 with flips", "two transformers MambaMixer with flips"
WRAPPERS = {FLIPS: TwoMambasWithFlips, THEIRS: TwoTransformersMambas}


def in_float64(module):
    return copy.deepcopy(module).double()


def specified(run):
    """`run` with the references of every op."""

    def by_the_book():
        with prefer("torch"):
            return run()

    return by_the_book


def test_block_forward(benchmark):
    block = BiMamba(768).eval()
    x = torch.randn(1, 1024, 768)
    peers = {name: wrap(block).eval() for name, wrap in WRAPPERS.items()}
    with torch.no_grad():
        compare(
            benchmark,
            lambda: block(x),
            {name: (lambda peer=peer: peer(x)) for name, peer in peers.items()},
            reference=specified(lambda: in_float64(block)(x.double())),
            rounds=41,
        )


def test_block_forward_and_backward(benchmark):
    """A training step: the gradients of the input and of every parameter."""
    block = BiMamba(768)
    x = torch.randn(1, 1024, 768)

    def step(module, x):
        leaf = x.clone().requires_grad_()

        def run():
            leaf.grad = None
            module.zero_grad(set_to_none=True)
            y = module(leaf)
            y.sum().backward()
            return [y.detach(), leaf.grad]

        return run

    compare(
        benchmark,
        step(block, x),
        {name: step(wrap(block), x) for name, wrap in WRAPPERS.items()},
        reference=specified(step(in_float64(block), x.double())),
        rounds=41,
    )


# A training step of transformers' mixer takes time quadratic in the length: fewer tokens there.
CASES = [(FLIPS, 1024, False), (FLIPS, 1024, True), (THEIRS, 1024, False), (THEIRS, 256, True)]


@pytest.mark.parametrize(
    ("peer", "tokens", "training"),
    CASES,
    ids=[f"{tokens} tokens, {'training' if t else 'embedding'}" for _, tokens, t in CASES],
)
def test_lc_plm(benchmark, peer, tokens, training):
    """d_model 512, 8 layers; the peer has another mixer in every layer."""
    model = LCPLM(LCPLMConfig(d_model=512, n_layer=8))
    with torch.no_grad():
        model.embedding.weight.normal_()
    ids = torch.randint(4, 24, (1, tokens))
    other = copy.deepcopy(model)
    for layer in other.layers:
        layer.mixer = WRAPPERS[peer](layer.mixer)

    def runner(module):
        def train():
            module.zero_grad(set_to_none=True)
            out = module(ids, labels=ids)
            out.loss.backward()
            loss = out.loss.detach().double()  # float32 in every model
            return [loss, module.embedding.weight.grad]

        def embed():
            with torch.no_grad():
                return [module(ids).last_hidden_state]

        return train if training else embed

    compare(
        benchmark,
        runner(model),
        {peer: runner(other)},
        reference=specified(runner(in_float64(model))),
        rounds=7,
        tolerance=1e-3,  # of sixteen mixers, one after the other
    )
