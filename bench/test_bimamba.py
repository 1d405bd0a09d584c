"""BiMamba and LCPLM against the same computed as wrappers do it: two mixers and flipped copies.

The tokens a second of two programs on the same tokens stand in the inverse ratio of their times.
Every side has a process of its own, as a program has that uses it.
"""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from compare import assert_same_results, compare_processes
from peers import TwoMambasWithFlips, TwoTransformersMambas

from brickwork.assemblies import LCPLM, LCPLMConfig
from brickwork.blocks import BiMamba
from brickwork.kernels.backend import prefer

FLIPS, THEIRS = "two Mamba1 with flips", "two transformers MambaMixer with flips"
WRAPPERS = {
    "brickwork": lambda block: block,
    FLIPS: TwoMambasWithFlips,
    THEIRS: TwoTransformersMambas,
}


def by_the_book(build):
    """What a runner in float64 gives with the references of every op."""

    def run():
        with prefer("torch"):
            return build("brickwork", dtype=torch.float64)()

    return run


def block(name, *, training, dtype=torch.float32):
    """A forward pass, or a training step: the gradients of the input and of every parameter."""
    torch.manual_seed(0)
    module, x = BiMamba(768).to(dtype), torch.randn(1, 1024, 768).to(dtype)
    module = WRAPPERS[name](module).train(training)
    leaf = x.requires_grad_(training)

    def run():
        leaf.grad = None
        module.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if training else torch.no_grad():
            y = module(leaf)
        if not training:
            return y
        y.sum().backward()
        return [y.detach(), leaf.grad]

    return run


@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward+backward"])
def test_block(benchmark, training):
    build = partial(block, training=training)
    assert_same_results({name: build(name) for name in WRAPPERS}, reference=by_the_book(build))
    compare_processes(benchmark, build, [FLIPS, THEIRS], rounds=15)


def lc_plm(name, *, tokens, training, dtype=torch.float32):
    """d_model 512, 8 layers; a peer has another mixer in every layer."""
    torch.manual_seed(0)
    model = LCPLM(LCPLMConfig(d_model=512, n_layer=8))
    with torch.no_grad():
        model.embedding.weight.normal_()
    model.to(dtype)
    ids = torch.randint(4, 24, (1, tokens))
    for layer in model.layers:
        layer.mixer = WRAPPERS[name](layer.mixer)

    def train():
        model.zero_grad(set_to_none=True)
        out = model(ids, labels=ids)
        out.loss.backward()
        loss = out.loss.detach().double()  # float32 in every model
        return [loss, model.embedding.weight.grad]

    def embed():
        with torch.no_grad():
            return [model(ids).last_hidden_state]

    return train if training else embed


# A training step of transformers' mixer takes time quadratic in the length: fewer tokens there.
CASES = [(FLIPS, 1024, False), (FLIPS, 1024, True), (THEIRS, 1024, False), (THEIRS, 256, True)]


@pytest.mark.parametrize(
    ("peer", "tokens", "training"),
    CASES,
    ids=[f"{tokens} tokens, {'training' if t else 'embedding'}" for _, tokens, t in CASES],
)
def test_lc_plm(benchmark, peer, tokens, training):
    build = partial(lc_plm, tokens=tokens, training=training)
    assert_same_results(
        {name: build(name) for name in ("brickwork", peer)},
        reference=by_the_book(build),
        tolerance=1e-3,  # of sixteen mixers, one after the other
    )
    compare_processes(benchmark, build, [peer], rounds=15)
