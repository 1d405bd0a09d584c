"""`rms_norm` in Triton: `add_norm` without a residual, whose sum is x itself.

With b bytes per element, M rows and N columns, the forward pass reads and writes M·N·b bytes each
and writes 4·M of statistics; the backward pass reads 2·M·N·b and the statistics and writes M·N·b.
Weights, and P·N·8 bytes for the shares of P programs, come to this.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from brickwork.kernels.add_norm_triton import ENDS, add_norm_triton, describe, distinct
from brickwork.kernels.triton_support import Configuration
from brickwork.kernels.triton_support import unavailable_here as unavailable_here
from brickwork.kernels.triton_support import why_not as why_not


def rms_norm_triton(x: Tensor, weight: Tensor, *, eps: float, cast: str) -> Tensor:
    """`rms_norm` for checked arguments."""
    return add_norm_triton(
        x, None, weight, None, kind="rms", eps=eps, cast=cast, residual_dtype=None
    )[0]


def configurations() -> Iterator[Configuration]:
    """As those of `add_norm`, which are compiled for every shape of tiles."""
    yield from distinct(
        describe("rms_norm", columns, torch.bfloat16, cast_first=True) for columns in ENDS
    )
    columns_of_fp32 = (512, 8192, 16384, 65536)
    yield from distinct(describe("rms_norm", columns, torch.float32) for columns in columns_of_fp32)
