"""Cases of `tests/sanitize.py`: tails of channels, chunks and segments, every operand."""

from __future__ import annotations

import torch
from sanitize_concretely import concretely

from brickwork.kernels import selective_scan_triton_launch as launches
from brickwork.kernels.bidirectional_scan import bidirectional_scan
from brickwork.kernels.selective_scan import selective_scan

concretely()
launches.chunk_of = lambda state: 4
launches.Q_FORWARD, launches.Q_BACKWARD = 4, 2


def run(B, T, E, N, G, *, full=False, reverse=False, enough=4):
    launches.ENOUGH = enough
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


def case_both_directions():
    launches.ENOUGH = 4
    sides = []
    for _ in range(2):
        wide = torch.randn(1, 5, 6)
        side = [wide[..., 3:], wide[..., :3], -torch.rand(3, 2), *torch.randn(2, 1, 5, 1, 2)]
        sides.append([t.detach().requires_grad_() for t in [*side, *torch.randn(2, 3)]])
    z = torch.randn(1, 5, 3, requires_grad=True)
    y = bidirectional_scan(*sides, z=z, mask=torch.rand(1, 5) > 0.3, backend="triton")
    torch.autograd.grad(y, [*sides[0], *sides[1], z], torch.ones_like(y))
