"""Heads, widths and rotated parts around the borders of tiles."""

from __future__ import annotations

import torch
from sanitize_concretely import concretely

from brickwork.kernels.rope import rope
from brickwork.kernels.rope_qk import rope_qk

concretely()  # a loop takes the pieces of a tail one after the other


def run(H, G, D, R, layout, normed):
    leaves = [torch.randn(2, 3, H, D), torch.randn(2, G, 3, D).transpose(1, 2)]
    leaves += [torch.ones(D), torch.ones(D)] if normed else []
    leaves = [t.requires_grad_() for t in leaves]
    options = {"inv_freq": torch.rand(R // 2), "layout": layout, "rotary_dim": R}
    named = dict(zip(("q_weight", "k_weight"), leaves[2:]))
    positions = torch.arange(6).view(2, 3)
    outputs = rope_qk(*leaves[:2], positions, **named, **options, backend="triton")
    torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])
    y = rope(leaves[0], positions[:1], **options, backend="triton")
    torch.autograd.grad(y, leaves[0], torch.ones_like(y))


def case_without_norm():
    for layout in ("half", "interleaved"):
        run(3, 1, 12, 8, layout, False)
        run(9, 9, 64, 64, layout, False)
        run(2, 1, 40, 8, layout, False)


def case_with_norm():
    for layout in ("half", "interleaved"):
        run(3, 1, 12, 8, layout, True)
        run(5, 2, 96, 96, layout, True)
