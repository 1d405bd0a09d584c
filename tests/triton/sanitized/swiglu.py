"""Tiles with and without a border, at any stride."""

from __future__ import annotations

import torch

from brickwork.kernels.swiglu import swiglu


def run(gate, up):
    y = swiglu(gate.requires_grad_(), up.requires_grad_(), backend="triton")
    torch.autograd.grad(y, [gate, up], torch.ones_like(y))


def case_sizes():
    for rows, columns in ((1, 1), (5, 33), (129, 16), (3, 1024), (2, 2500)):
        run(torch.randn(rows, columns), torch.randn(rows, columns))


def case_halves_of_one_product():
    run(*(t.detach() for t in torch.randn(3, 5, 200).chunk(2, -1)))
