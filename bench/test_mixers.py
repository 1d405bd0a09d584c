"""Mamba1 and Mamba2, one direction, against transformers' mixers and mambapy's block."""

from __future__ import annotations

import copy

import pytest
import torch
from compare import compare
from peers import mambapy_block, transformers_mamba2_mixer, transformers_mamba_mixer

from brickwork.blocks import Mamba1, Mamba2
from brickwork.kernels.backend import prefer

# Training steps of transformers' Mamba-1 take time quadratic in the length.
CASES = {
    "Mamba1": (Mamba1, 512, {"transformers": transformers_mamba_mixer, "mambapy": mambapy_block}),
    "Mamba2": (Mamba2, 512, {"transformers": transformers_mamba2_mixer}),
}


@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("case", CASES)
def test_mixer(benchmark, case, training):
    mixer, tokens, peers = CASES[case]
    block = mixer(512)
    x = torch.randn(1, tokens, 512)

    def runner(module, x):
        leaf = x.clone().requires_grad_()

        def train():
            module.zero_grad(set_to_none=True)
            y = module(leaf)
            grads = torch.autograd.grad(y.sum(), [leaf, *module.parameters()])
            return [y.detach(), grads[0]]

        def infer():
            with torch.no_grad():
                return module(leaf)

        return train if training else infer

    def reference():
        with prefer("torch"):
            return runner(copy.deepcopy(block).double(), x.double())()

    compare(
        benchmark,
        runner(block, x),
        {name: runner(wrap(block), x) for name, wrap in peers.items()},
        reference=reference,
    )
