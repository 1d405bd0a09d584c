"""Rows of every shape of tiles, with and without a border, at any stride."""

from __future__ import annotations

import torch

from brickwork.kernels.rms_norm import rms_norm


def run(x, width):
    weight = torch.ones(width, requires_grad=True)
    y = rms_norm(x.requires_grad_(), weight, backend="triton")
    torch.autograd.grad(y, [x, weight], torch.ones_like(y))


def case_several_rows_to_a_tile():
    for rows, columns in ((1, 64), (5, 33), (40, 128), (3, 500)):
        run(torch.randn(rows, columns), columns)


def case_a_row_to_a_tile():
    for rows, columns in ((3, 513), (2, 1024), (1, 3000)):
        run(torch.randn(rows, columns), columns)


def case_tiles_of_a_row():
    for rows, columns in ((5, 9000), (2, 33000)):
        run(torch.randn(rows, columns), columns)


def case_strides():
    run(torch.randn(4, 200)[:, 7:107], 100)
    run(torch.randn(4, 200)[::2, ::2], 100)
    run(torch.randn(1, 100).expand(4, 100).detach(), 100)
