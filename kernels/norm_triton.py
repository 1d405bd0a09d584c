"""The Triton kernels of `add_norm` and `rms_norm`, and the shapes of their tiles.

M rows, N columns. In the forward pass a program holds whole rows in registers: one of up to 16,384
columns (32,768 of narrow elements), or several of up to 512; wider rows are read twice in tiles,
the second time from the cache. In the backward pass each program takes rows at regular distances
and keeps its share of the weights' gradients in float32: in registers up to 8,192 columns, beyond
in memory that stays in the cache, and there rows are read twice too. The shares are summed in a
fixed order. N is a constant of the compiled kernels, M is not.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from brickwork.kernels.triton_support import next_power_of_2

_UNSPECIALISED = ("M", "x_stride", "r_stride", "dy_stride", "ds_stride", "s_stride")


@triton.jit(do_not_specialize=_UNSPECIALISED[:3])
def norm_forward(
    X, R, W, B, Y, S, RSTD, MEAN, x_stride, r_stride, M, eps,
    N: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CENTRED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows; strides are in units of UNIT elements, so that it divides them."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    mask = (rows < M)[:, None] & inside[None, :]
    w = tl.load(W + columns, inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    x_at = X + (rows * x_stride * UNIT)[:, None] + columns[None, :]
    s = tl.load(x_at, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if R is not None:
        r_at = R + (rows * r_stride * UNIT)[:, None] + columns[None, :]
        s += tl.load(r_at, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if S is not None:
        rounded = s.to(S.dtype.element_ty)
        tl.store(S + (rows * N)[:, None] + columns[None, :], rounded, mask)
        s = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(s, 1) / N
        tl.store(MEAN + rows, mean, rows < M)
        s = tl.where(mask, s - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(s * s, 1) / N + eps)
    tl.store(RSTD + rows, rstd, rows < M)
    y = s * rstd[:, None]
    if CAST_FIRST:
        y = y.to(Y.dtype.element_ty).to(tl.float32)
    y *= w[None, :]
    if B is not None:
        b = tl.load(B + columns, inside, other=0.0, eviction_policy="evict_last")
        y += b.to(tl.float32)[None, :]
    y_at = Y + (rows * N)[:, None] + columns[None, :]
    tl.store(y_at, y.to(Y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=_UNSPECIALISED[1:3])
def norm_forward_tiled(
    X, R, W, B, Y, S, RSTD, MEAN, x_stride, r_stride, eps,
    N: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    CENTRED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """One row in tiles of columns: its statistics, merged tile by tile, then its results."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    x_row = X + row * x_stride * UNIT
    mean = 0.0
    squares = 0.0
    for start in range(0, N, BLOCK):
        mask = start + tile < N
        s = tl.load(x_row + start + tile, mask, other=0.0).to(tl.float32)
        if R is not None:
            s += tl.load(R + row * r_stride * UNIT + start + tile, mask, other=0.0).to(tl.float32)
        if S is not None:
            s = s.to(S.dtype.element_ty).to(tl.float32)
        if CENTRED:
            here = tl.minimum(N - start, BLOCK).to(tl.float32)
            share = here / (start + here)
            s_mean = tl.sum(s, 0) / here
            s = tl.where(mask, s - s_mean, 0.0)
            step = s_mean - mean
            squares += step * step * share * start
            mean += step * share
        squares += tl.sum(s * s, 0)
    rstd = tl.rsqrt(squares / N + eps)
    tl.store(RSTD + row, rstd)
    if CENTRED:
        tl.store(MEAN + row, mean)
    for start in range(0, N, BLOCK):
        columns = start + tile
        mask = columns < N
        s = tl.load(x_row + columns, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if R is not None:
            r_at = R + row * r_stride * UNIT + columns
            s += tl.load(r_at, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if S is not None:
            rounded = s.to(S.dtype.element_ty)
            tl.store(S + row * N + columns, rounded, mask)
            s = rounded.to(tl.float32)
        if CENTRED:
            s -= mean
        y = s * rstd
        if CAST_FIRST:
            y = y.to(Y.dtype.element_ty).to(tl.float32)
        w = tl.load(W + columns, mask, other=0.0, eviction_policy="evict_last")
        y *= w.to(tl.float32)
        if B is not None:
            b = tl.load(B + columns, mask, other=0.0, eviction_policy="evict_last")
            y += b.to(tl.float32)
        tl.store(Y + row * N + columns, y.to(Y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=(_UNSPECIALISED[0], *_UNSPECIALISED[3:]))
def norm_backward(
    DY, DS, S, W, RSTD, MEAN, DX, DR, DW, DB, dy_stride, ds_stride, s_stride, M,
    N: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CENTRED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Tiles of whole rows, one after another; the weights' gradients stay in registers."""
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    w = tl.load(W + columns, inside, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = tl.arange(0, ROWS) + group * tl.full((ROWS,), ROWS, tl.int64)
        mask = (rows < M)[:, None] & inside[None, :]
        rstd = tl.load(RSTD + rows, rows < M, other=0.0)[:, None]
        dy_at = DY + (rows * dy_stride * UNIT)[:, None] + columns[None, :]
        dy = tl.load(dy_at, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        s_at = S + (rows * s_stride * UNIT)[:, None] + columns[None, :]
        s = tl.load(s_at, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if CENTRED:
            s -= tl.load(MEAN + rows, rows < M, other=0.0)[:, None]
        normal = s * rstd
        if CAST_FIRST:
            dw += dy * normal.to(DY.dtype.element_ty).to(tl.float32)
        else:
            dw += dy * normal
        if DB is not None:
            db += dy
        dy *= w[None, :]
        dx = dy - normal * (tl.sum(dy * normal, 1) / N)[:, None]
        if CENTRED:
            dx -= (tl.sum(dy, 1) / N)[:, None]
        dx *= rstd
        if DS is not None:
            ds_at = DS + (rows * ds_stride * UNIT)[:, None] + columns[None, :]
            dx += tl.load(ds_at, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        at = (rows * N)[:, None] + columns[None, :]
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask)
        if DR is not None:
            tl.store(DR + at, dx.to(DR.dtype.element_ty), mask)
    share = tl.program_id(0).to(tl.int64) * N + columns
    tl.store(DW + share, tl.sum(dw, 0), inside)
    if DB is not None:
        tl.store(DB + share, tl.sum(db, 0), inside)


@triton.jit(do_not_specialize=(_UNSPECIALISED[0], *_UNSPECIALISED[3:]))
def norm_backward_tiled(
    DY, DS, S, W, RSTD, MEAN, DX, DR, DW, DB, dy_stride, ds_stride, s_stride, M,
    N: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CENTRED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """The same in tiles of columns; the weights' gradients grow in memory, ROWS rows at a time."""
    tile = tl.arange(0, BLOCK)
    share = tl.program_id(0).to(tl.int64) * N
    for group in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = tl.arange(0, ROWS) + group * tl.full((ROWS,), ROWS, tl.int64)
        real = (rows < M)[:, None]
        rstd = tl.load(RSTD + rows, rows < M, other=0.0)[:, None]
        dy_rows = DY + (rows * dy_stride * UNIT)[:, None]
        s_rows = S + (rows * s_stride * UNIT)[:, None]
        mean = tl.zeros((ROWS, 1), tl.float32)
        if CENTRED:
            mean = tl.load(MEAN + rows, rows < M, other=0.0)[:, None]
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for left in range(0, N, BLOCK):
            columns = (left + tile)[None, :]
            mask = real & (columns < N)
            w = tl.load(W + columns, columns < N, other=0.0).to(tl.float32)
            dy = tl.load(dy_rows + columns, mask, other=0.0).to(tl.float32) * w
            s = tl.load(s_rows + columns, mask, other=0.0).to(tl.float32)
            products += dy * ((s - mean) * rstd)
            if CENTRED:
                sums += dy
        along = (tl.sum(products, 1) / N)[:, None]
        common = (tl.sum(sums, 1) / N)[:, None]
        for left in range(0, N, BLOCK):
            columns = (left + tile)[None, :]
            mask = real & (columns < N)
            w = tl.load(W + columns, columns < N, other=0.0).to(tl.float32)
            dy = tl.load(dy_rows + columns, mask, other=0.0, eviction_policy="evict_first")
            dy = dy.to(tl.float32)
            s = tl.load(s_rows + columns, mask, other=0.0, eviction_policy="evict_first")
            normal = (s.to(tl.float32) - mean) * rstd
            dx = (dy * w - normal * along - common) * rstd
            if DS is not None:
                ds_at = DS + (rows * ds_stride * UNIT)[:, None] + columns
                dx += tl.load(ds_at, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            at = (rows * N)[:, None] + columns
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask)
            if DR is not None:
                tl.store(DR + at, dx.to(DR.dtype.element_ty), mask)
            if CAST_FIRST:
                normal = normal.to(DY.dtype.element_ty).to(tl.float32)
            at = share + left + tile
            again = (left + tile < N) & (group > tl.program_id(0))
            dw = tl.load(DW + at, again, other=0.0) + tl.sum(dy * normal, 0)
            tl.store(DW + at, dw, left + tile < N)
            if DB is not None:
                db = tl.load(DB + at, again, other=0.0) + tl.sum(dy, 0)
                tl.store(DB + at, db, left + tile < N)
        tl.debug_barrier()  # the next rows read the shares that these have written


class Shape(NamedTuple):
    """Of the tiles of a kernel; `whole`: BLOCK covers a row."""

    whole: bool
    rows: int
    block: int
    warps: int
    registers: int | None


def forward_shape(columns: int, *, narrow: bool) -> Shape:
    """16 elements a thread; 32 at 32,768 columns, where no more threads can be had and registers
    hold them if they are `narrow`: 16 bits, and not centred."""
    block = max(next_power_of_2(columns), 16)
    if block <= 512:
        return Shape(True, 2048 // block, block, 4, 64)
    if block <= (32768 if narrow else 16384):
        return Shape(True, 1, block, min(block // 512, 32), 64)
    return Shape(False, 1, 4096, 8, 64)


def backward_shape(columns: int, itemsize: int) -> Shape:
    """As forward while registers hold a row twice, the weight and its gradient: half as many rows,
    and a row of up to 8,192. Two rows to a tile while what all programs read twice fits a cache of
    40 MB. 16 warps of a multiprocessor have 128 registers a thread."""
    block = max(next_power_of_2(columns), 16)
    if block <= 512:
        return Shape(True, 1024 // block, block, 4, 128)
    if block <= 8192:
        return Shape(True, 1, block, block // 512, 128)
    return Shape(False, 2 if columns * itemsize <= 32768 else 1, 2048, 8, None)
