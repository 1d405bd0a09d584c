# mypy: ignore-errors
"""Tiles in Triton, taken apart and put together, for kernels that load and store several rows at
once, so that a thread has 128 bits side by side, and compute with one row after the other.

Where a program is one warp this takes no barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _halvings(count):
    """How often `count`, a power of two, is halved to be 1."""
    return count.bit_length() - 1


@triton.jit
def columns_of(tile, K: tl.constexpr, Q: tl.constexpr):
    """The columns of a tile (K, Q), Q a power of two."""
    parts = (tile,)
    for i in tl.static_range(_halvings(Q)):
        evens, odds = (), ()
        for k in tl.static_range(len(parts)):
            even, odd = tl.split(tl.reshape(parts[k], (K, Q >> i + 1, 2)))
            evens, odds = evens + (even,), odds + (odd,)
        parts = evens + odds
    columns = ()
    for k in tl.static_range(len(parts)):
        columns = columns + (tl.reshape(parts[k], (K,)),)
    return columns


@triton.jit
def tile_of(rows, BLOCK: tl.constexpr):
    """The tile (Q, BLOCK) of Q rows, Q a power of two."""
    parts = ()
    for k in tl.static_range(len(rows)):
        parts = parts + (tl.reshape(rows[k], (BLOCK, 1)),)
    for i in tl.static_range(_halvings(len(rows))):
        wider = ()
        for k in tl.static_range(len(parts) // 2):
            pairs = tl.join(parts[k], parts[k + len(parts) // 2])
            wider = wider + (tl.reshape(pairs, (BLOCK, 2 << i)),)
        parts = wider
    return tl.permute(parts[0], (1, 0))
