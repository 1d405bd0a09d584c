"""Cases of `tests/sanitize.py`: tails of tokens, heads, channels and states, every operand."""

from __future__ import annotations

import torch
from sanitize_concretely import concretely

from brickwork.kernels import ssd_scan_triton_launch as launches
from brickwork.kernels.ssd_scan import ssd_scan

concretely()


def run(B, T, H, P, N, G, *, chunk, full=False, reverse=False, carry=True, splits=1):
    launches._carries = lambda *_: carry
    launches._splits = lambda *_: splits
    wide = torch.randn(B, T, H, 2 * P)
    leaves = [wide[..., P:], torch.rand(B, T, H), -torch.rand(H), *torch.randn(2, B, T, G, N)]
    options = {"softplus": True, "reverse": reverse, "chunk_size": chunk}
    if full:
        leaves += [torch.randn(H, P), wide[..., :P], torch.randn(H), torch.randn(B, H, P, N)]
        options |= {"mask": torch.rand(B, T) > 0.3, "seq_ids": (torch.rand(B, T) > 0.7).cumsum(1)}
    leaves = [t.detach().requires_grad_() for t in leaves]
    options |= dict(zip(("D", "z", "delta_bias", "initial_state"), leaves[5:]))
    outputs = ssd_scan(*leaves[:5], backend="triton", **options)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])


def case_states_walked():
    run(2, 5, 3, 3, 2, 1, chunk=4, full=True, splits=2)


def case_states_apart():
    run(1, 5, 2, 2, 3, 2, chunk=4, full=True, reverse=True, carry=False)


def case_tiles():
    run(1, 35, 1, 33, 34, 1, chunk=35)
