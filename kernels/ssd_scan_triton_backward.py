# mypy: ignore-errors
"""The Triton kernels of `ssd_scan` that only the backward pass past.

Names as in `ssd_scan_triton_forward`. `dy` here is the gradient of the result before the gate, and
`carries` (B, chunks, H, P, N) those of the state after each chunk. With L_ij the decay from token j
to token i, e_i that of the state before the chunk and l_j that towards the state after it, the
exponent of token k stands in every decay from before k to k or later, so that its gradient is

`Σ_{j<k≤i} M_ij + Σ_{i≥k} E_i + Σ_{j<k} m_j + the decay of S times S·dS`,

M_ij = Δ_j L_ij (C_i·B_j) (dy_i·x_j), E_i = e_i dy_i·(S C_i), m_j = Δ_j l_j x_j·(dS B_j). These sums
are taken as they stand. As differences, of what comes after k and what does not, they would be
lost where Δ is large, and what a start of a sequence cuts would not be 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from brickwork.kernels.ssd_scan_triton_forward import (
    across,
    decays,
    past_of,
    product,
    put,
    sigmoid,
    take,
)
from brickwork.kernels.tf32_triton import turned


@triton.jit
def shifted(pointers, rows, end, values):
    """Store what belongs one place on, below `end`; the first place of all holds 0."""
    tl.store(pointers + 1, values, rows + 1 < end)
    tl.store(pointers, tl.zeros_like(values), rows == 0)


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_input_gradients(
    dy, x, B, D, steps, high, low, past, opens, pairs, carries, dx, dD, direct, leaving, T, H, P, N,
    K, chunks, chunk, origin, dy_b, dy_t, dy_h, x_b, x_t, x_h, B_b, B_t, B_g, D_h, D_p, dx_b, dx_t,
    dx_h, Q: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, tile of tokens, head; tile of P): dx, a tile's share of dD, and per token,
    summed over the tile of P: `direct`, the gradient of Δ but for the exponents, and, one token on,
    `leaving`, m."""
    index = tl.program_id(0).to(tl.int64)
    h, index = index % H, index // H
    tile, index = (index % (Q // ROWS)).to(tl.int32), index // (Q // ROWS)
    b, c = index // chunks, index % chunks
    length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
    first = c * chunk - origin
    rows, columns = tile * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BP + tl.arange(0, BP)
    real = past_of(past, index, rows, length, Q, PACKED) > 0
    last = -1
    if PACKED:
        last = tl.load(opens + index)
    row = ((b * H + h) * chunks + c) * Q
    sums, lost = tl.load(high + row + rows), tl.load(low + row + rows)
    step = tl.load(steps + row + rows)
    end_high, end_low = tl.load(high + row + Q - 1), tl.load(low + row + Q - 1)
    from_dy = dy + b * dy_b + first * dy_t + h * dy_h
    from_B = B + b * B_b + first * B_t + (h // K) * B_g
    from_pairs = pairs + (index * (H // K) + h // K) * Q * Q
    from_carry = carries + (index * H + h) * P * N
    from_x = x + b * x_b + first * x_t + h * x_h
    at_part = row * tl.num_programs(1) + tl.program_id(1) * Q + rows

    outward = tl.zeros([ROWS, BP], tl.float32)
    for n in range(0, N, BN):
        at = n + tl.arange(0, BN)
        vector = take(from_B, rows, B_t, at, real, N)
        carry = across(from_carry, columns, N, at, columns < P, N)
        outward = product(vector, carry, outward, PRECISION)
    weight = tl.where(rows >= last, tl.exp2((end_high - sums) + (end_low - lost)), 0.0)
    outward *= weight[:, None]
    within = tl.zeros([ROWS, BP], tl.float32)
    for i in range(tile * ROWS, Q, ROWS):
        after = i + tl.arange(0, ROWS)
        reach = past_of(past, index, after, length, Q, PACKED)
        real_i = reach > 0
        exponent = tl.load(high + row + after)[None, :] - sums[:, None]
        exponent += tl.load(low + row + after)[None, :] - lost[:, None]
        decay = decays(exponent, after[None, :], rows[:, None], reach[None, :])
        decay *= tl.load(from_pairs + after[None, :] * Q + rows[:, None])
        upstream = take(from_dy, after, dy_t, columns, real_i, P)
        within = product(decay, turned(upstream, PRECISION), within, PRECISION)

    value = take(from_x, rows, x_t, columns, real, P).to(tl.float32)
    upstream = take(from_dy, rows, dy_t, columns, real, P).to(tl.float32)
    m = step * tl.sum(value * outward, 1)
    push = outward + within
    tl.store(direct + at_part, tl.sum(value * push, 1))
    shifted(leaving + at_part, rows, Q, m)
    push *= step[:, None]
    if D is not None:
        skip = tl.load(D + h * D_h + columns * D_p, columns < P, other=0.0).to(tl.float32)
        push += skip[None, :] * upstream
        at = ((index * (Q // ROWS) + tile) * H + h) * P
        tl.store(dD + at + columns, tl.sum(upstream * value, 0), columns < P)
    to_dx = dx + b * dx_b + first * dx_t + h * dx_h
    put(to_dx, rows, dx_t, columns, rows < length, P, tl.where(real[:, None], push, 0.0))


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_pair_gradients(
    dy, x, steps, high, low, past, pairs, dpairs, right, below, T, H, P, K, chunks, chunk, origin,
    splits, dy_b, dy_t, dy_h, x_b, x_t, x_h, Q: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (split of a group's heads, chunk, group; tile of tokens i; of tokens j): the gradient
    of C_i · B_j summed over the heads, and per head `right`, Σ M_ij over the tile's j, and, one
    token on, `below`, Σ M_ij over its i; on the diagonal Σ M_ij' over i > j and j' ≤ j."""
    tile_i, tile_j = tl.program_id(1), tl.program_id(2)
    if tile_j > tile_i:
        return
    index = tl.program_id(0).to(tl.int64)
    here = index * Q * Q
    G = H // K
    g, index = index % G, index // G
    per_split = tl.num_programs(0) // (splits * G)
    split, index = index // per_split, index % per_split
    b, c = index // chunks, index % chunks
    length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
    first = c * chunk - origin
    rows_i, rows_j = tile_i * ROWS + tl.arange(0, ROWS), tile_j * ROWS + tl.arange(0, ROWS)
    reach = past_of(past, index, rows_i, length, Q, PACKED)
    real_i = reach > 0
    real_j = past_of(past, index, rows_j, length, Q, PACKED) > 0
    at_pairs = rows_i[:, None] * Q + rows_j[None, :]
    pair = tl.load(pairs + (index * G + g) * Q * Q + at_pairs)
    total = tl.zeros([ROWS, ROWS], tl.float32)
    each = (K + splits - 1) // splits
    for k in range(split * each, tl.minimum(split * each + each, K)):
        h = g * K + k
        row = ((b * H + h) * chunks + c) * Q
        from_dy = dy + b * dy_b + first * dy_t + h * dy_h
        from_x = x + b * x_b + first * x_t + h * x_h
        dots = tl.zeros([ROWS, ROWS], tl.float32)
        for p in range(0, P, BP):
            columns = p + tl.arange(0, BP)
            upstream = take(from_dy, rows_i, dy_t, columns, real_i, P)
            value = across(from_x, rows_j, x_t, columns, real_j, P)
            dots = product(upstream, value, dots, PRECISION)
        exponent = tl.load(high + row + rows_i)[:, None] - tl.load(high + row + rows_j)[None, :]
        exponent += tl.load(low + row + rows_i)[:, None] - tl.load(low + row + rows_j)[None, :]
        dots *= decays(exponent, rows_i[:, None], rows_j[None, :], reach[:, None])
        dots *= tl.load(steps + row + rows_j)[None, :]
        total += dots
        dots *= pair
        per_tile = below + row * (Q // ROWS) + tile_i * Q + rows_j
        if tile_i == tile_j:
            crossing = tl.where(rows_i[:, None] > rows_j[None, :], tl.cumsum(dots, 1), 0.0)
            shifted(per_tile, rows_j, tile_j * ROWS + ROWS, tl.sum(crossing, 0))
        else:
            tl.store(right + row * (Q // ROWS) + tile_j * Q + rows_i, tl.sum(dots, 1))
            shifted(per_tile, rows_j, tile_j * ROWS + ROWS, tl.sum(dots, 0))
    tl.store(dpairs + here + at_pairs, total)


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_vector_gradients(
    values, own, other, steps, high, low, past, opens, dpairs, states, out, entering, T, H, P, N, K,
    chunks, chunk, origin, splits, values_b, values_t, values_h, own_b, own_t, own_g, other_b,
    other_t, other_g, out_s, out_b, out_t, out_g, Q: tl.constexpr, ROWS: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr, OF_C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (split of a group's heads, chunk, group; tile of tokens; tile of N): the gradient of
    C, of values dy, own C, other B and the states before the chunks, with per head `entering`, the
    tile's part of e_i dy_i·(S C_i); else that of B, of values x, own B, other C and the carries."""
    index = tl.program_id(0).to(tl.int64)
    G = H // K
    g, index = index % G, index // G
    per_split = tl.num_programs(0) // (splits * G)
    split, index = index // per_split, index % per_split
    b, c = index // chunks, index % chunks
    length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
    first = c * chunk - origin
    tile = tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * BN + tl.arange(0, BN)
    reach = past_of(past, index, rows, length, Q, PACKED)
    real = reach > 0
    last = -1
    if PACKED:
        last = tl.load(opens + index)
    total = tl.zeros([ROWS, BN], tl.float32)
    if OF_C:
        low_j, high_j = 0, (tile + 1) * ROWS
        vector = take(
            own + b * own_b + first * own_t + g * own_g, rows, own_t, columns, real, N
        ).to(tl.float32)
    else:
        low_j, high_j = tile * ROWS, Q
    if split > 0:  # the product with the others is the first split's
        high_j = low_j
    from_other = other + b * other_b + first * other_t + g * other_g
    from_pairs = dpairs + (index * G + g) * Q * Q
    for j in range(low_j, high_j, ROWS):
        others = j + tl.arange(0, ROWS)
        real_j = past_of(past, index, others, length, Q, PACKED) > 0
        if OF_C:
            weight = tl.load(from_pairs + rows[:, None] * Q + others[None, :])
        else:
            weight = tl.load(from_pairs + others[None, :] * Q + rows[:, None])
            weight = turned(weight, PRECISION)
        vectors = turned(take(from_other, others, other_t, columns, real_j, N), PRECISION)
        total = product(weight, vectors, total, PRECISION)
    each = (K + splits - 1) // splits
    for k in range(split * each, tl.minimum(split * each + each, K)):
        h = g * K + k
        row = ((b * H + h) * chunks + c) * Q
        from_values = values + b * values_b + first * values_t + h * values_h
        from_state = states + (index * H + h) * P * N
        added = tl.zeros([ROWS, BN], tl.float32)
        for p in range(0, P, BP):
            at = p + tl.arange(0, BP)
            value = take(from_values, rows, values_t, at, real, P)
            state = turned(take(from_state, at, N, columns, at < P, N), PRECISION)
            added = product(value, state, added, PRECISION)
        sums, lost = tl.load(high + row + rows), tl.load(low + row + rows)
        if OF_C:
            weight = decays(sums + lost, rows, -1, reach)
        else:
            end_high, end_low = tl.load(high + row + Q - 1), tl.load(low + row + Q - 1)
            left = tl.exp2((end_high - sums) + (end_low - lost))
            weight = tl.where(rows >= last, left, 0.0) * tl.load(steps + row + rows)
        added *= weight[:, None]
        total += added
        if OF_C:
            at = row * tl.num_programs(2) + tl.program_id(2) * Q + rows
            tl.store(entering + at, tl.sum(added * vector, 1))
    to_out = out + split * out_s + b * out_b + first * out_t + g * out_g
    put(to_out, rows, out_t, columns, rows < length, N, tl.where(real[:, None], total, 0.0))


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_step_gradients(
    delta, A, bias, steps, through, past, direct, leaving, inner, right, below, entering, ddelta,
    dA, dbias, T, H, chunks, chunk, origin, parts_p, parts_n, parts_inner, delta_b, delta_t,
    delta_h, ddelta_b, ddelta_t, ddelta_h, Q: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Program (chunk, block of heads): the gradient of delta, and the chunk's shares in those of A
    and of the bias, (B, chunks, H)."""
    index = tl.program_id(0).to(tl.int64)
    b, c = index // chunks, index % chunks
    rows = tl.arange(0, Q)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = heads < H
    length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
    first = c * chunk - origin
    real = past_of(past, index, rows, length, Q, PACKED) > 0
    at_chunk = (b * H + heads) * chunks + c
    known_2d = known[None, :] & real[:, None]
    everywhere = known[None, :] & (rows >= 0)[:, None]  # at padding is what is one token on
    step_gradient = tl.zeros([Q, HEADS], tl.float32)
    onward = tl.zeros([Q, HEADS], tl.float32)  # m, one token on
    for part in range(parts_p):
        at = (at_chunk * parts_p + part)[None, :] * Q + rows[:, None]
        onward += tl.load(leaving + at, everywhere, other=0.0)
        step_gradient += tl.load(direct + at, everywhere, other=0.0)
    back = tl.zeros([Q, HEADS], tl.float32)  # E
    for part in range(parts_n):
        at = (at_chunk * parts_n + part)[None, :] * Q + rows[:, None]
        back += tl.load(entering + at, everywhere, other=0.0)
    through_all = tl.zeros([HEADS], tl.float32)
    for part in range(parts_inner):
        through_all += tl.load(inner + at_chunk * parts_inner + part, known, other=0.0)
    through_all *= tl.load(through + at_chunk, known, other=0.0)
    exponent = tl.cumsum(onward, 0) + tl.cumsum(back, 0, reverse=True) + through_all[None, :]

    tile = (rows // ROWS)[:, None]
    later = rows % ROWS > 0  # the first place of a tile but the first holds nothing
    from_tiles = tl.zeros([Q, HEADS], tl.float32)
    for part in range(Q // ROWS):
        at = (at_chunk * (Q // ROWS) + part)[None, :] * Q + rows[:, None]
        value = tl.load(below + at, everywhere & (tile <= part) & later[:, None], other=0.0)
        exponent += tl.where(tile == part, value, 0.0)
        from_tiles += tl.where(tile < part, value, 0.0)
    for part in range(Q // ROWS):
        at = (at_chunk * (Q // ROWS) + part)[None, :] * Q + rows[:, None]
        value = tl.load(right + at, everywhere & (tile > part), other=0.0)
        exponent += tl.where(tile > part, tl.cumsum(value, 0, reverse=True), 0.0)
        here = tile == part
        exponent += tl.where(here, tl.cumsum(tl.where(here, from_tiles, 0.0), 0), 0.0)
    at = at_chunk[None, :] * Q + rows[:, None]
    step = tl.load(steps + at, known[None, :], other=0.0)
    rate = tl.load(A + heads, known, other=0.0).to(tl.float32)
    step_gradient += exponent * rate[None, :]
    tl.store(dA + index * H + heads, tl.sum(exponent * step, 0), known)
    if SOFTPLUS:
        at = (
            delta
            + b * delta_b
            + first * delta_t
            + rows[:, None] * delta_t
            + heads[None, :] * delta_h
        )
        raw = tl.load(at, known_2d, other=0.0).to(tl.float32)
        if bias is not None:
            raw += tl.load(bias + heads, known, other=0.0).to(tl.float32)[None, :]
        step_gradient *= sigmoid(raw)
    step_gradient = tl.where(real[:, None], step_gradient, 0.0)
    if bias is not None:
        tl.store(dbias + index * H + heads, tl.sum(step_gradient, 0), known)
    at = ddelta + b * ddelta_b + first * ddelta_t
    at += rows[:, None] * ddelta_t + heads[None, :] * ddelta_h
    tl.store(
        at, step_gradient.to(ddelta.dtype.element_ty), known[None, :] & (rows < length)[:, None]
    )
