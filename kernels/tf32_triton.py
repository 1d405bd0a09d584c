# mypy: ignore-errors
"""TF32 operands in Triton, for the kernels that multiply matrices."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(x, PRECISION: tl.constexpr):
    """An operand of a TF32 product of which the terms of a sum do not lie side by side in memory.

    sm_90 and sm_100 want them side by side. Copies straight to where they are multiplied would turn
    such a tile around number by number; what is computed with in between is loaded as it lies, 128
    bits at a time. So it is multiplied by a 1 of which the compiler finds out only when it has laid
    out everything, and then drops it. Numbers of 16 bits are converted in between, which does.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        x *= tl.where(tl.program_id(0) >= 0, 1.0, 0.0)
    return x
