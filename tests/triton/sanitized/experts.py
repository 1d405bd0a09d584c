"""Cases of `tests/sanitize.py` for the experts: tails on every axis, idle experts, every stride."""

from __future__ import annotations

import torch
from sanitize_concretely import concretely

from brickwork.kernels.experts_triton import experts_triton

concretely()  # an expert's rows, and whether a tile has any, are data


def run(tokens, width, hidden, num_experts, top_k, *, dtype=torch.float32, transposed=False):
    indices = torch.randint(0, max(num_experts - 1, 1), (tokens, top_k))  # the last one is idle
    gate_up = torch.randn(num_experts, 2 * hidden, width, dtype=dtype)
    down = torch.randn(num_experts, width, hidden, dtype=dtype)
    if transposed:
        gate_up, down = gate_up.mT.contiguous().mT, down.mT.contiguous().mT
    x = torch.randn(tokens, width, dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, torch.rand(tokens, top_k))]
    experts_triton(*leaves[:3], indices, leaves[3]).sum().backward()


def case_tails():
    run(7, 67, 33, 4, 2)


def case_wide_rows():
    run(70, 72, 40, 3, 1, dtype=torch.bfloat16)


def case_transposed_experts():
    run(5, 9, 70, 2, 1, transposed=True)
