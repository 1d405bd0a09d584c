"""Cases of `tests/sanitize.py`: tails, borders of programs, every operand."""

from __future__ import annotations

import torch
from sanitize_concretely import concretely

from brickwork.kernels import causal_conv1d_triton as launches
from brickwork.kernels.causal_conv1d import causal_conv1d

concretely()  # under a mask the order of tokens is data
launches._TOKENS = 5


def run(B, T, C, W, *, full=False, reverse=False, dtype=torch.float32):
    x = torch.randn(B, T, 2 * C, dtype=dtype)[..., C:].requires_grad_()
    leaves = [x, torch.randn(C, W, requires_grad=True)]
    options = {"reverse": reverse}
    if full:
        leaves += [torch.randn(C, requires_grad=True), torch.randn(B, C, W - 1, requires_grad=True)]
        options |= {"bias": leaves[2], "initial_state": leaves[3]}
        options |= {"mask": torch.rand(B, T) > 0.3, "seq_ids": (torch.rand(B, T) > 0.7).cumsum(1)}
    y = causal_conv1d(*leaves[:2], activation="silu", backend="triton", **options).y
    torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)


def case_plain():
    run(1, 7, 5, 4)
    run(2, 6, 130, 2, reverse=True, dtype=torch.bfloat16)
    run(1, 1, 3, 1)


def case_everything():
    run(2, 7, 3, 4, full=True)
    run(1, 6, 3, 3, full=True, reverse=True)


def case_tiles():
    """Those of 16-bit numbers, in float32: the sanitizer knows no 0 of the others."""
    tile = launches._backward_tile(3, 8, torch.bfloat16, 32)
    launches._backward_tile = lambda *_: tile
    run(1, 7, 70, 5)
    run(1, 6, 3, 8, full=True, reverse=True)
