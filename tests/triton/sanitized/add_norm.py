"""Rows of every shape of tiles, with every operand."""

from __future__ import annotations

import torch

from brickwork.kernels.add_norm import add_norm


def run(rows, columns, residual=torch.float32, *, kind="layer", dtype=torch.bfloat16):
    leaves = [
        torch.randn(rows, 2 * columns).to(dtype)[:, columns:].requires_grad_(),
        torch.randn(rows, columns).to(residual).requires_grad_(),
        torch.randn(columns).requires_grad_(),
        torch.randn(columns).requires_grad_(),
    ]
    outputs = add_norm(*leaves, kind=kind, residual_dtype=residual, backend="triton")
    torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])


def case_several_rows_to_a_tile():
    for rows, columns in ((1, 64), (5, 33), (40, 128)):
        run(rows, columns)


def case_a_row_to_a_tile():
    run(3, 513)
    run(2, 1024, torch.bfloat16)


def case_tiles_of_a_row():
    run(5, 9000)
    run(3, 33000, torch.bfloat16, kind="rms")
