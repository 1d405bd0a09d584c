# mypy: ignore-errors
"""The kernels of `experts_triton`: products over rows of one expert, and sums of rows.

C width, F hidden width, E experts, K chosen. A row tile is BM sorted rows of one expert. Widths and
the experts' strides are constants, so that alignment and loop counts are known; what depends on
the batch is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from brickwork.kernels.tf32_triton import turned


@triton.jit
def _dot(a, b, sums, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter cannot multiply bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, columns, E: tl.constexpr, BM: tl.constexpr):
    """This program's expert (E: none), its first row and how many there are, and its column tile.

    Eight row tiles go through all column tiles together, so that both operands are read again while
    they are in the cache.
    """
    program = tl.program_id(0)
    first = program // (8 * columns) * 8
    height = tl.minimum(tiles - first, 8)
    tile = first + program % (8 * columns) % height
    column = program % (8 * columns) // height
    e = tl.load(EXPERT_OF_TILE + tile)
    there = e < E
    before = there & (e > 0)
    start = tl.load(ENDS + e - 1, before, other=0)
    end = tl.load(ENDS + e, there, other=0)
    row = start + (tile - tl.load(TILE_ENDS + e - 1, before, other=0)) * BM
    return e, row, end - row, column.to(tl.int64)


# The products over rows have the weights' rows on the first axis and the tokens' on the second: the
# matrix units want at least 64 on the first, and an expert may have few tokens. A tile's first row
# and column are 64-bit numbers; within the tile 32 bits do, which saves registers.


@triton.jit(do_not_specialize=["tiles", "keep"])
def gate_up_kernel(
    X, GATE_UP, ORDER, ENDS, EXPERT_OF_TILE, TILE_ENDS, ACTIVATION, BOTH, tiles, keep,
    E: tl.constexpr, K: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    WE: tl.constexpr, WF: tl.constexpr, WC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    e, row, count, column = _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, tl.cdiv(F, BN), E, BM)
    if e >= E:
        return
    r = tl.arange(0, BM)
    f = tl.arange(0, BN)
    c = tl.arange(0, BK)
    left = F - column * BN
    token = tl.load(ORDER + row + r, r < count, other=0) // K
    a = GATE_UP + e * WE + column * (BN * WF) + (f[:, None] * WF + c[None, :] * WC)
    b = (X + token * C)[None, :] + c[:, None]
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for at in range(0, C, BK):
        inside = c < C - at
        real = (f < left)[:, None] & inside[None, :]
        x = tl.load(b, inside[:, None] & (r < count)[None, :], other=0.0)
        gate = _dot(tl.load(a, real, other=0.0), x, gate, PRECISION, INTERPRETED)
        up = _dot(tl.load(a + F * WF, real, other=0.0), x, up, PRECISION, INTERPRETED)
        a += BK * WC
        b += BK
    kept = BOTH.dtype.element_ty
    gate = gate.to(kept)
    up = up.to(kept)
    real = (f < left)[:, None] & (r < count)[None, :]
    if keep:
        both = BOTH + row * (2 * F) + column * BN + (r[None, :] * (2 * F) + f[:, None])
        tl.store(both, gate, real)
        tl.store(both + F, up, real)
    gate = gate.to(tl.float32)
    activation = gate * tl.sigmoid(gate) * up.to(tl.float32)
    out = ACTIVATION + row * F + column * BN + (r[None, :] * F + f[:, None])
    tl.store(out, activation.to(kept), real)


@triton.jit(do_not_specialize=["tiles"])
def rows_kernel(
    A, W, ENDS, EXPERT_OF_TILE, TILE_ENDS, OUT, tiles,
    E: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    WE: tl.constexpr, WI: tl.constexpr, WJ: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    e, row, count, column = _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, tl.cdiv(J, BN), E, BM)
    if e >= E:
        return
    r = tl.arange(0, BM)
    j = tl.arange(0, BN)
    i = tl.arange(0, BK)
    left = J - column * BN
    a = W + e * WE + column * (BN * WJ) + (j[:, None] * WJ + i[None, :] * WI)
    b = A + row * I + (r[None, :] * I + i[:, None])
    sums = tl.zeros((BN, BM), tl.float32)
    for at in range(0, I, BK):
        inside = i < I - at
        w = tl.load(a, (j < left)[:, None] & inside[None, :], other=0.0)
        x = tl.load(b, inside[:, None] & (r < count)[None, :], other=0.0)
        if WJ == 1:
            w = turned(w, PRECISION)
        sums = _dot(w, x, sums, PRECISION, INTERPRETED)
        a += BK * WI
        b += BK
    out = OUT + row * J + column * BN + (r[None, :] * J + j[:, None])
    tl.store(out, sums.to(OUT.dtype.element_ty), (j < left)[:, None] & (r < count)[None, :])


@triton.jit(do_not_specialize=["tiles"])
def activation_grad_kernel(
    DY, DOWN, BOTH, WEIGHTS, ORDER, ENDS, EXPERT_OF_TILE, TILE_ENDS, DBOTH, SCALED, DWEIGHTS, tiles,
    E: tl.constexpr, K: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    WE: tl.constexpr, WC: tl.constexpr, WF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(F, BN)
    e, row, count, column = _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, columns, E, BM)
    if e >= E:
        return
    r = tl.arange(0, BM)
    f = tl.arange(0, BN)
    c = tl.arange(0, BK)
    left = F - column * BN
    choice = tl.load(ORDER + row + r, r < count, other=0)
    a = DOWN + e * WE + column * (BN * WF) + (f[:, None] * WF + c[None, :] * WC)
    b = (DY + choice // K * C)[None, :] + c[:, None]
    grad = tl.zeros((BN, BM), tl.float32)
    for at in range(0, C, BK):
        inside = c < C - at
        w = tl.load(a, (f < left)[:, None] & inside[None, :], other=0.0)
        dy = tl.load(b, inside[:, None] & (r < count)[None, :], other=0.0)
        if WF == 1:
            w = turned(w, PRECISION)
        grad = _dot(w, dy, grad, PRECISION, INTERPRETED)
        a += BK * WC
        b += BK
    dtype = BOTH.dtype.element_ty
    real = (f < left)[:, None] & (r < count)[None, :]
    base = row * (2 * F) + column * BN
    at = r[None, :] * (2 * F) + f[:, None]
    gate = tl.load(BOTH + base + at, real, other=0.0).to(tl.float32)
    up = tl.load(BOTH + (base + F) + at, real, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHTS + choice, r < count, other=0.0).to(tl.float32)[None, :]
    chance = tl.sigmoid(gate)
    silu = gate * chance
    activation = silu * up
    out = SCALED + row * F + column * BN + (r[None, :] * F + f[:, None])
    tl.store(out, (weight * activation).to(dtype), real)
    tl.store(DWEIGHTS + choice * columns + column, tl.sum(grad * activation, 0), r < count)
    grad *= weight
    tl.store(DBOTH + base + at, (grad * up * (chance + silu * (1.0 - chance))).to(dtype), real)
    tl.store(DBOTH + (base + F) + at, (grad * silu).to(dtype), real)


@triton.jit
def weight_grad_kernel(
    LEFT, RIGHT, ORDER, ENDS, OUT,
    K: tl.constexpr, I: tl.constexpr, J: tl.constexpr, OE: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (J + BN - 1) // BN
    tiles: tl.constexpr = (I + BM - 1) // BM * columns
    program = tl.program_id(0)
    e = (program // tiles).to(tl.int64)
    row = (program % tiles // columns).to(tl.int64) * BM
    column = (program % columns).to(tl.int64) * BN
    i = tl.arange(0, BM)
    j = tl.arange(0, BN)
    r = tl.arange(0, BK)
    start = tl.load(ENDS + e - 1, e > 0, other=0)
    end = tl.load(ENDS + e)
    sums = tl.zeros((BM, BN), tl.float32)
    for at in range(start, end, BK):
        mine = r < end - at
        token = tl.load(ORDER + at + r, mine, other=0) // K
        if GATHER_LEFT:
            a = (LEFT + row + token * I)[None, :] + i[:, None]
            b = RIGHT + column + at * J + (r[:, None] * J + j[None, :])
        else:
            a = LEFT + row + at * I + (r[None, :] * I + i[:, None])
            b = (RIGHT + column + token * J)[:, None] + j[None, :]
        left = tl.load(a, mine[None, :] & (i < I - row)[:, None], other=0.0)
        right = tl.load(b, mine[:, None] & (j < J - column)[None, :], other=0.0)
        left, right = turned(left, PRECISION), turned(right, PRECISION)
        sums = _dot(left, right, sums, PRECISION, INTERPRETED)
    out = OUT + e * OE + row * J + column + (i[:, None] * J + j[None, :])
    tl.store(out, sums.to(OUT.dtype.element_ty), (i < I - row)[:, None] & (j < J - column)[None, :])


@triton.jit(do_not_specialize=["S"])
def combine_kernel(
    ROWS, PLACE, WEIGHTS, OUT, S,
    K: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    real = (s < S)[:, None] & (c < C)[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(K):
        place = tl.load(PLACE + s * K + k, s < S, other=0)
        rows = tl.load(ROWS + place[:, None] * C + c[None, :], real, other=0.0).to(tl.float32)
        if WEIGHTS is not None:
            rows *= tl.load(WEIGHTS + s * K + k, s < S, other=0.0).to(tl.float32)[:, None]
        sums += rows
    tl.store(OUT + s[:, None] * C + c[None, :], sums.to(OUT.dtype.element_ty), real)
