# mypy: ignore-errors
"""The Triton kernels of `ssd_scan` that both passes run: decays, C Bᵀ, states and results.

B batch, T tokens, H heads of P channels, K of them per group G of B and C, N state. Tokens come in
scan order: a reversed scan has negative strides from token to token and `origin` T - 1, the token
that comes first; otherwise this is 0. A chunk has
`chunk` tokens in a tile of Q; what a kernel leaves for another has Q entries per chunk:

- `steps`, `high`, `low` (B, H, chunks, Q): the step sizes, 0 at padding and beyond the end, and the
  running sums of Δ A log₂e within the chunk, in two parts: their differences keep the small steps
  after a large one;
- `through` (B, H, chunks): what a chunk leaves of the state before it;
- `past` (B, chunks, Q): how many tokens back each token's sequence reaches in the chunk, itself
  counted, and one more if into the state before it; 0 at padding and beyond the end. `opens`
  (B, chunks): where the last sequence of a chunk starts, -1 if before it;
- `pairs` (B, chunks, G, Q, Q): C_i · B_j, whole tiles on and below the diagonal;
- `states` (B, chunks, H, P, N): the state before each chunk.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from brickwork.kernels.tf32_triton import turned, widened

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """`total + a @ b`, of operands rounded to bfloat16, or float32 as `PRECISION` says."""
    if PRECISION == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if INTERPRETED:  # its matrix product takes no bfloat16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
    else:
        a, b = widened(a, PRECISION), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def take(pointer, rows, row_stride, columns, real, limit):
    """The tile of `rows` and `columns`, 0 where a row is not real or a column beyond `limit`."""
    mask = real[:, None] & (columns < limit)[None, :]
    return tl.load(pointer + rows[:, None] * row_stride + columns[None, :], mask, other=0.0)


@triton.jit
def across(pointer, rows, row_stride, columns, real, limit):
    """The same tile transposed."""
    mask = real[None, :] & (columns < limit)[:, None]
    return tl.load(pointer + rows[None, :] * row_stride + columns[:, None], mask, other=0.0)


@triton.jit
def put(pointer, rows, row_stride, columns, inside, limit, value):
    mask = inside[:, None] & (columns < limit)[None, :]
    at = pointer + rows[:, None] * row_stride + columns[None, :]
    tl.store(at, value.to(pointer.dtype.element_ty), mask)


@triton.jit
def past_of(past, index, rows, length, Q: tl.constexpr, PACKED: tl.constexpr):
    """The `past` of these rows of a chunk of `length` tokens; the real ones are those above 0."""
    if PACKED:
        reach = tl.where(rows < length, tl.load(past + index * Q + rows), 0)
    else:
        reach = tl.where(rows < length, rows + 2, 0)
    return reach


@triton.jit
def decays(exponent, i, j, reach):
    """2^exponent from token j to token i, 0 if that is not in i's past."""
    # One comparison, as unsigned: j > i is beyond any reach. Masked before exp2, as that of a
    # forbidden exponent may be inf.
    allowed = (i - j).to(tl.uint32) < reach.to(tl.uint32)
    return tl.exp2(tl.where(allowed, exponent, float("-inf")))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def softplus_of(x):
    small = tl.exp2(-tl.abs(x) * LOG2_E)
    above = 1.0 + small
    lost = tl.where(above == 1.0, 1.0, above - 1.0)  # log1p without its cancellation
    log1p = tl.where(above == 1.0, small, tl.log(above) * (small / lost))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def add_exactly(high, low, other_high, other_low):
    """The sum of two numbers, each the sum of a high and a low part."""
    total = high + other_high
    shown = total - high
    lost = (high - (total - shown)) + (other_high - shown)
    return total, low + other_low + lost


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_decays(
    delta, A, bias, mask, starts, steps, high, low, through, past, opens, T, H, chunks, chunk,
    origin, delta_b, delta_t, delta_h, mask_b, mask_t, starts_b, starts_t, Q: tl.constexpr,
    HEADS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Program (chunk, block of heads): step sizes and their running sums."""
    index = tl.program_id(0).to(tl.int64)
    b, c = index // chunks, index % chunks
    rows = tl.arange(0, Q)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
    first = c * chunk - origin
    real = rows < length
    if mask is not None:
        at = mask + b * mask_b + first * mask_t + rows * mask_t
        real = real & (tl.load(at, real, other=0) != 0)
    start = tl.full([Q], -1, tl.int32)
    if starts is not None:
        at = starts + b * starts_b + first * starts_t + rows * starts_t
        start = tl.where(tl.load(at, real, other=0) != 0, rows, -1)
    last = tl.max(start, 0)
    if past is not None:  # noqa: SIM102 (decided while compiling, the inner one while running)
        if tl.program_id(1) == 0:
            reach = rows - tl.associative_scan(start, 0, larger) + 1
            tl.store(past + index * Q + rows, tl.where(real, reach, 0))
            tl.store(opens + index, last)

    known = heads < H
    at = delta + b * delta_b + first * delta_t + rows[:, None] * delta_t + heads[None, :] * delta_h
    step = tl.load(at, real[:, None] & known[None, :], other=0.0).to(tl.float32)
    if bias is not None:
        step += tl.load(bias + heads, known, other=0.0).to(tl.float32)[None, :]
    if SOFTPLUS:
        step = softplus_of(step)
    step = tl.where(real[:, None], step, 0.0)
    rate = tl.load(A + heads, known, other=0.0).to(tl.float32) * LOG2_E
    exponent = step * rate[None, :]
    sums, lost = tl.associative_scan((exponent, tl.zeros_like(exponent)), 0, add_exactly)
    at = (b * H + heads[None, :]) * chunks * Q + c * Q + rows[:, None]
    tl.store(steps + at, step, known[None, :])
    tl.store(high + at, sums, known[None, :])
    tl.store(low + at, lost, known[None, :])
    at_end = (rows == Q - 1)[:, None]
    total = tl.sum(tl.where(at_end, sums, 0.0), 0) + tl.sum(tl.where(at_end, lost, 0.0), 0)
    tl.store(through + (b * H + heads) * chunks + c, tl.where(last < 0, tl.exp2(total), 0.0), known)


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_pairs(
    B, C, past, pairs, T, G, N, chunks, chunk, origin, B_b, B_t, B_g, C_b, C_t, C_g,
    Q: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, group; tile of tokens i; of tokens j): C_i · B_j."""
    i, j = tl.program_id(1) * ROWS, tl.program_id(2) * ROWS
    if j > i:
        return
    index = tl.program_id(0).to(tl.int64)
    g, at = index % G, index // G
    b, c = at // chunks, at % chunks
    length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
    first = c * chunk - origin
    rows_i, rows_j = i + tl.arange(0, ROWS), j + tl.arange(0, ROWS)
    real_i = past_of(past, at, rows_i, length, Q, PACKED) > 0
    real_j = past_of(past, at, rows_j, length, Q, PACKED) > 0
    from_C = C + b * C_b + first * C_t + g * C_g
    from_B = B + b * B_b + first * B_t + g * B_g
    total = tl.zeros([ROWS, ROWS], tl.float32)
    for n in range(0, N, BN):
        columns = n + tl.arange(0, BN)
        left = take(from_C, rows_i, C_t, columns, real_i, N)
        right = across(from_B, rows_j, B_t, columns, real_j, N)
        total = product(left, right, total, PRECISION)
    tl.store(pairs + index * Q * Q + rows_i[:, None] * Q + rows_j[None, :], total)


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_states(
    values, vectors, steps, high, low, through, past, opens, initial, entered, states, final, inner,
    T, H, P, N, K, chunks, chunk, origin, values_b, values_t, values_h, vectors_b, vectors_t,
    vectors_g, Q: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CARRY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row and head, or also chunk unless CARRY; tile of P; tile of N).

    Forward: `states` before each chunk and the `final` one, of values x and vectors B. BACKWARD:
    the gradients of the states after each chunk and of the `initial` one (here `final`), of values
    dy and vectors C, and `inner`, per tile the products of these with the states `entered`. Without
    CARRY `states` are what each chunk adds, for `ssd_carry`.
    """
    index = tl.program_id(0).to(tl.int64)
    count, start = chunks, tl.full([], 0, tl.int64)
    if not CARRY:
        count, start = 1, index % chunks
        index = index // chunks
    b, h = index // H, index % H
    columns_p = tl.program_id(1) * BP + tl.arange(0, BP)
    columns_n = tl.program_id(2) * BN + tl.arange(0, BN)
    at_state = columns_p[:, None] * N + columns_n[None, :]
    in_state = (columns_p < P)[:, None] & (columns_n < N)[None, :]
    state = tl.zeros([BP, BN], tl.float32)
    if CARRY and initial is not None:
        state = tl.load(initial + index * P * N + at_state, in_state, other=0.0)
    for k in range(count):
        c = start + k
        if CARRY and BACKWARD:
            c = start + (chunks - 1 - k)
        chunk_index = b * chunks + c
        here = (chunk_index * H + h) * P * N
        if CARRY:
            tl.store(states + here + at_state, state, in_state)
            if BACKWARD:
                other = tl.load(entered + here + at_state, in_state, other=0.0)
                tile = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
                tiles = tl.num_programs(1) * tl.num_programs(2)
                at = (index * chunks + c) * tiles + tile
                tl.store(inner + at, tl.sum(tl.sum(state * other, 1), 0))
        length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
        first = c * chunk - origin
        from_values = values + b * values_b + first * values_t + h * values_h
        from_vectors = vectors + b * vectors_b + first * vectors_t + (h // K) * vectors_g
        row = (index * chunks + c) * Q
        last = -1
        if PACKED:
            last = tl.load(opens + chunk_index)
        end_high, end_low = tl.load(high + row + Q - 1), tl.load(low + row + Q - 1)
        added = tl.zeros([BP, BN], tl.float32)
        for j in range(0, Q, ROWS):
            rows = j + tl.arange(0, ROWS)
            reach = past_of(past, chunk_index, rows, length, Q, PACKED)
            real = reach > 0
            sums, lost = tl.load(high + row + rows), tl.load(low + row + rows)
            if BACKWARD:
                weight = decays(sums + lost, rows, -1, reach)
            else:
                left = tl.exp2((end_high - sums) + (end_low - lost))
                weight = tl.where(rows >= last, left, 0.0) * tl.load(steps + row + rows)
            value = across(from_values, rows, values_t, columns_p, real, P)
            vector = take(from_vectors, rows, vectors_t, columns_n, real, N).to(tl.float32)
            added = product(value, vector * weight[:, None], added, PRECISION)
        if CARRY:
            state = state * tl.load(through + index * chunks + c) + added
        else:
            tl.store(states + here + at_state, added, in_state)
    if CARRY:
        tl.store(final + index * P * N + at_state, state, in_state)


@triton.jit(do_not_specialize=["chunks"])
def ssd_carry(
    through, initial, entered, states, final, inner, H, size, chunks, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Program (row and head; block of the `size` numbers of a state): from chunk to chunk."""
    index = tl.program_id(0).to(tl.int64)
    b, h = index // H, index % H
    at_state = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_state = at_state < size
    state = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        state = tl.load(initial + index * size + at_state, in_state, other=0.0)
    for k in range(chunks):
        c = k
        if BACKWARD:
            c = chunks - 1 - k
        here = ((b * chunks + c) * H + h) * size
        added = tl.load(states + here + at_state, in_state, other=0.0)
        tl.store(states + here + at_state, state, in_state)
        if BACKWARD:
            other = tl.load(entered + here + at_state, in_state, other=0.0)
            at = (index * chunks + c) * tl.num_programs(1) + tl.program_id(1)
            tl.store(inner + at, tl.sum(state * other, 0))
        state = state * tl.load(through + index * chunks + c) + added
    tl.store(final + index * size + at_state, state, in_state)


@triton.jit(do_not_specialize=["T", "chunks", "chunk", "origin"])
def ssd_outputs(
    x, C, D, z, dy, steps, high, low, past, pairs, states, y, dz, T, H, P, N, K, chunks, chunk,
    origin, x_b, x_t, x_h, C_b, C_t, C_g, D_h, D_p, z_b, z_t, z_h, dy_b, dy_t, dy_h, y_b, y_t, y_h,
    Q: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, tile of tokens, head; tile of P): y; or, given dy, the gradients of z and of
    the result before the gate (here `y`)."""
    index = tl.program_id(0).to(tl.int64)
    h, index = index % H, index // H
    i, index = (index % (Q // ROWS)).to(tl.int32) * ROWS, index // (Q // ROWS)
    b, c = index // chunks, index % chunks
    length = tl.minimum(T - c * chunk, chunk).to(tl.int32)
    first = c * chunk - origin
    rows, columns = i + tl.arange(0, ROWS), tl.program_id(1) * BP + tl.arange(0, BP)
    reach = past_of(past, index, rows, length, Q, PACKED)
    real = reach > 0
    row = ((b * H + h) * chunks + c) * Q
    sums, lost = tl.load(high + row + rows), tl.load(low + row + rows)
    from_x = x + b * x_b + first * x_t + h * x_h
    from_C = C + b * C_b + first * C_t + (h // K) * C_g
    from_pairs = pairs + (index * (H // K) + h // K) * Q * Q
    from_state = states + (index * H + h) * P * N

    total = tl.zeros([ROWS, BP], tl.float32)
    for n in range(0, N, BN):
        at = n + tl.arange(0, BN)
        vector = take(from_C, rows, C_t, at, real, N)
        state = across(from_state, columns, N, at, columns < P, N)
        total = product(vector, state, total, PRECISION)
    total *= decays(sums + lost, rows, -1, reach)[:, None]
    for j in range(0, i + ROWS, ROWS):
        before = j + tl.arange(0, ROWS)
        real_j = past_of(past, index, before, length, Q, PACKED) > 0
        exponent = sums[:, None] - tl.load(high + row + before)[None, :]
        exponent += lost[:, None] - tl.load(low + row + before)[None, :]
        weight = decays(exponent, rows[:, None], before[None, :], reach[:, None])
        weight *= tl.load(from_pairs + rows[:, None] * Q + before[None, :])
        weight *= tl.load(steps + row + before)[None, :]
        value = take(from_x, before, x_t, columns, real_j, P)
        total = product(weight, turned(value, PRECISION), total, PRECISION)
    if D is not None:
        skip = tl.load(D + h * D_h + columns * D_p, columns < P, other=0.0).to(tl.float32)
        total += skip[None, :] * take(from_x, rows, x_t, columns, real, P).to(tl.float32)
    to_y = y + b * y_b + first * y_t + h * y_h
    if z is not None:
        gate = take(z + b * z_b + first * z_t + h * z_h, rows, z_t, columns, real, P)
        gate = gate.to(tl.float32)
        share = sigmoid(gate)
        if dy is not None:
            upstream = take(dy + b * dy_b + first * dy_t + h * dy_h, rows, dy_t, columns, real, P)
            upstream = upstream.to(tl.float32)
            slope = total * upstream * (share * (1.0 + gate * (1.0 - share)))
            to_dz = dz + b * y_b + first * y_t + h * y_h
            put(to_dz, rows, y_t, columns, rows < length, P, tl.where(real[:, None], slope, 0.0))
            total = upstream
        total *= gate * share
    put(to_y, rows, y_t, columns, rows < length, P, tl.where(real[:, None], total, 0.0))
