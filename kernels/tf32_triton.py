# mypy: ignore-errors
"""TF32 operands in Triton, for the kernels that multiply matrices."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import current_target


@triton.jit
def turned(x, PRECISION: tl.constexpr):
    """An operand of a TF32 product of which the terms of a sum do not lie side by side in memory.

    sm_90 and sm_100 want them side by side. Copies straight to where they are multiplied would turn
    such a tile around number by number; what is computed with in between is loaded as it lies, 128
    bits at a time. So it is multiplied by a 1 of which the compiler finds out only when it has laid
    out everything, and then drops it. Numbers of 16 bits are converted in between, which does.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x = _computed(x)
    return x


@triton.jit
def widened(x, PRECISION: tl.constexpr):
    """The left operand of a product, in float32.

    For a TF32 product sm_90 would copy one of 16 bits as it will be multiplied, four numbers at a
    time, which are 64 bits; what is computed with in between is copied as it lies, 128 bits at a
    time. Other chips do so anyway, and would only lose by it.
    """
    wide = x.to(tl.float32)
    if PRECISION == "tf32" and x.dtype != tl.float32 and _on_sm_90():
        wide = _computed(wide)
    return wide


@triton.jit
def _computed(x):
    return x * tl.where(tl.program_id(0) >= 0, 1.0, 0.0)


@triton.constexpr_function
def _on_sm_90():
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch == 90
