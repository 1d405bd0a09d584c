"""BiMamba and LCPLM against the same computed as wrappers do it: two mixers and flipped copies."""

from __future__ import annotations

import copy

import pytest
import torch
from compare import compare
from peers import TwoMambasWithFlips, TwoTransformersMambas

from brickwork.assemblies import LCPLM, LCPLMConfig
from brickwork.blocks import BiMamba

WRAPPERS = {
    "two Mamba1 with flips": TwoMambasWithFlips,
    "two transformers MambaMixer with flips": TwoTransformersMambas,
}


def test_block_forward(benchmark):
    block = BiMamba(768).eval()
    x = torch.randn(1, 1024, 768)
    peers = {name: wrap(block).eval() for name, wrap in WRAPPERS.items()}
    with torch.no_grad():
        runs = {name: (lambda peer=peer: peer(x)) for name, peer in peers.items()}
        compare(benchmark, lambda: block(x), runs)


def test_block_forward_and_backward(benchmark):
    """A training step: the gradients of the input and of every parameter."""
    block = BiMamba(768)
    x = torch.randn(1, 1024, 768, requires_grad=True)

    def step(module):
        def run():
            x.grad = None
            module.zero_grad(set_to_none=True)
            y = module(x)
            y.sum().backward()
            return [y.detach(), x.grad]

        return run

    peers = {name: step(wrap(block)) for name, wrap in WRAPPERS.items()}
    compare(benchmark, step(block), peers, rounds=7)


@pytest.mark.parametrize("training", [False, True], ids=["embedding", "training"])
def test_lc_plm(benchmark, training):
    model = LCPLM(LCPLMConfig(d_model=512, n_layer=8))
    ids = torch.randint(4, 24, (1, 1024))
    peers = {}
    for name, wrap in WRAPPERS.items():
        peer = copy.deepcopy(model)
        for layer in peer.layers:
            layer.mixer = wrap(layer.mixer)
        peers[name] = peer

    def runner(module):
        def train():
            module.zero_grad(set_to_none=True)
            out = module(ids, labels=ids)
            out.loss.backward()
            return [out.loss.detach(), module.embedding.weight.grad]

        def embed():
            with torch.no_grad():
                return [module(ids).last_hidden_state]

        return train if training else embed

    ratios = compare(
        benchmark,
        runner(model),
        {name: runner(peer) for name, peer in peers.items()},
        rounds=3,
        tolerance=1e-3,
    )
    benchmark.extra_info["tokens per step"] = ids.numel()
    assert ratios
