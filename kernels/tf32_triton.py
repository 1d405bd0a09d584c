# mypy: ignore-errors
"""TF32 operands in Triton, for the kernels that multiply matrices."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def turned(x, PRECISION: tl.constexpr):
    """An operand of a TF32 product of which the terms of a sum do not lie side by side in memory.

    sm_90 and sm_100 want them side by side. Copies straight to where they are multiplied would turn
    such a tile around number by number; what is computed with in between is loaded as it lies, 128
    bits at a time. What is computed makes up for the bits that the hardware cuts off: numbers with
    TF32's 10 bits stay what they are, others are off by 2/3 of the last bit at most, not by a whole
    one, and no longer always towards 0. Infinities and NaNs stay, too; beyond 0.9996 of float32's
    largest number is infinite. Numbers of 16 bits are converted in between and need nothing else.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x *= 1.0 + 1.0 / 3072.0
        if INTERPRETED:  # it would multiply by all bits
            x = (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return x
