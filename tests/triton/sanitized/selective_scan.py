"""Cases of `tests/sanitize.py`: tails of channels, chunks and segments, every operand."""

from __future__ import annotations

import torch
from sanitize_concretely import concretely

from brickwork.kernels import selective_scan_triton as launches
from brickwork.kernels.selective_scan import selective_scan

concretely()
launches._chunk = lambda state: 4
launches._Q_FORWARD, launches._Q_BACKWARD = 4, 2


def run(B, T, E, N, G, *, full=False, reverse=False, enough=4):
    launches._ENOUGH = enough
    wide = torch.randn(B, T, 2 * E)
    leaves = [wide[..., E:], wide[..., :E], -torch.rand(E, N), *torch.randn(2, B, T, G, N)]
    options = {"softplus": True, "reverse": reverse}
    if full:
        leaves += [torch.randn(E), torch.randn(B, T, E), torch.randn(E), torch.randn(B, E, N)]
        options |= {"mask": torch.rand(B, T) > 0.3, "seq_ids": (torch.rand(B, T) > 0.7).cumsum(1)}
    leaves = [t.detach().requires_grad_() for t in leaves]
    names = ("D", "z", "delta_bias", "initial_state")
    options |= dict(zip(names, leaves[5:]))
    outputs = selective_scan(*leaves[:5], backend="triton", **options)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])


def case_one_segment():
    run(1, 3, 35, 2, 1, enough=0)
    run(2, 5, 2, 3, 2, full=True, reverse=True, enough=0)


def case_segments():
    run(1, 9, 3, 1, 1, reverse=True)
    run(1, 6, 4, 2, 2, full=True)
