# mypy: ignore-errors
# Triton's language has no Python types.
"""The kernels of `selective_scan_triton` for values, and what those for gradients share.

A launch takes the `batch` rows of one direction or, after them, those of the other one too, which
has pointers of its own, named _2, with the same strides; `reverse` says whether the first direction
is the one from the right. What the launcher allocates has all `rows` of both.

A program takes BLOCK channels of one row and one segment of its tokens, and Q tokens at a time: it
loads what belongs to the channels, and then, for one n after the other, carries the n-th state of
its channels through the Q tokens in registers. Between groups of Q tokens the states wait in CARRY.
So registers depend on Q and BLOCK alone, never on N, and the loads of Q tokens are in flight at
once. s is a place in scan order, t the token there. FLAGS holds 1 for a real token and 2 more where
a sequence starts. B and C come prepared, as BC, so that their numbers at some tokens lie together.

`nought` is 0, which the compiler does not know, lest it keep the addresses of the first loads for
the last ones, through the loop over n, in twice Q registers for each tensor.

A tuple is Q values, one a token. What lies in memory by channels is loaded and stored as a tile,
(Q, BLOCK), so that a thread has 128 bits side by side, and taken apart into a tuple, and put
together from it, once for all n. Each kernel is one warp wide: sums over channels need no shared
memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from brickwork.kernels.tile_triton import columns_of, tile_of

LOG2_E = tl.constexpr(1.4426950408889634)
VARY = ["batch", "tokens", "segments", "segment", "nought", "reverse"]


@triton.jit
def direction_of(row, batch, reverse, tokens):
    """Of a row: whether it is one of the second direction, which row of the inputs, the token that
    comes first, and how far apart tokens lie (1 or -1)."""
    second = row >= batch
    backwards = tl.where(second, 1 - reverse, reverse)
    return second, tl.where(second, row - batch, row), backwards * (tokens - 1), 1 - 2 * backwards


@triton.jit
def chosen(second, P, P_2):
    """The pointer of a row's direction."""
    if P is None:
        return P
    else:
        return tl.where(second, P_2, P)


@triton.jit(do_not_specialize=["batch", "tokens", "reverse"])
def prepare_kernel(
    B, B_2, C, C_2, FLAGS, BC, b_batch, b_token, b_group, c_batch, c_token, c_group, batch, tokens,
    padded, groups, reverse, N: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """B and C in scan order, (rows, groups, padded / TOGETHER, 2, N, TOGETHER) in float32, 0 where
    no real token is."""
    blocks = tl.cdiv(padded, ROWS)
    s = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    both = (tl.program_id(0) // blocks).to(tl.int64)
    group = both % groups
    row = both // groups
    second, given, origin, turn = direction_of(row, batch, reverse, tokens)
    n = tl.arange(0, COLUMNS)[None, :]
    t = (origin + s * turn).to(tl.int64)
    real = s < tokens
    if FLAGS is not None:
        real = (tl.load(FLAGS + row * tokens + t, mask=real, other=0).to(tl.int32) & 1) != 0
    mask = real[:, None] & (n < N)
    b_at = given * b_batch + group * b_group + t[:, None] * b_token + n
    c_at = given * c_batch + group * c_group + t[:, None] * c_token + n
    b = tl.load(chosen(second, B, B_2) + b_at, mask=mask, other=0.0)
    c = tl.load(chosen(second, C, C_2) + c_at, mask=mask, other=0.0)
    first = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS // TOGETHER)[:, None] * TOGETHER
    i = tl.arange(0, COLUMNS * TOGETHER)[None, :]
    out = BC + (both * padded + first) * (2 * N) + i
    mask = (first < padded) & (i < N * TOGETHER)
    tl.store(out, _turned(b.to(tl.float32), ROWS, COLUMNS, TOGETHER), mask=mask)
    tl.store(out + N * TOGETHER, _turned(c.to(tl.float32), ROWS, COLUMNS, TOGETHER), mask=mask)


@triton.jit
def _turned(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr):
    """(ROWS, COLUMNS) as (ROWS / TOGETHER, COLUMNS · TOGETHER)."""
    turned = tl.permute(tl.reshape(tile, (ROWS // TOGETHER, TOGETHER, COLUMNS)), (0, 2, 1))
    return tl.reshape(turned, (ROWS // TOGETHER, COLUMNS * TOGETHER))


@triton.jit
def place_of(tokens, width, groups, segment, part, parts, BLOCK: tl.constexpr):
    """Of this program, one of those for the `parts` segments from `part` on: row, segment, its
    first place, the place behind it, group (of `width` channels), the number of its block in the
    group, its channels, which of them there are."""
    blocks = tl.cdiv(width, BLOCK)
    block = tl.program_id(0) % (groups * blocks)
    row = tl.program_id(0) // (groups * blocks)
    part += row % parts
    begin = part * segment
    at = block % blocks * BLOCK + tl.arange(0, BLOCK)
    return (
        (row // parts).to(tl.int64),
        part.to(tl.int64),
        begin,
        tl.minimum(begin + segment, tokens),
        block // blocks,
        block % blocks,
        block // blocks * width + at,
        at < width,
    )


@triton.jit
def _softplus(v):
    """log(1 + exp(v)), to float32's precision for small results too: 2 artanh(e / (2 + e))."""
    e = tl.exp2(-tl.abs(v) * LOG2_E)
    u = e / (2 + e)
    q = u * u
    series = 1 / 11 + q * (1 / 13 + q * (1 / 15))
    series = 1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * series)))
    return tl.maximum(v, 0.0) + 2 * u * (1 + q * series)


@triton.jit
def tokens_of(FLAGS, first, end, origin, turn, Q: tl.constexpr):
    """Q tokens from place `first` on: which, and whether each is there, as tensors; whether each is
    real, as a tuple; and a bit for each whether a sequence starts at it."""
    j = tl.arange(0, Q)
    t = tl.cast(origin + first * turn, tl.int64) + j * turn
    there = first + j < end
    reals, starts = (), 0
    if FLAGS is not None:
        flags = tl.load(FLAGS + t, mask=there, other=0).to(tl.int32)
        bits = tl.sum((flags & 1) << j | (flags >> 1) << (Q + j))
        starts = bits >> Q
    for k in tl.static_range(Q):
        if FLAGS is not None:
            reals = reals + ((bits >> k) & 1 != 0,)
        else:
            reals = reals + (first + k < end,)
    return t, there, reals, starts


@triton.jit
def rows_of(X, token_stride, e, inside, t, there, FLAGS, reals):
    """X at each token, 0 where it is not real. No address waits for a flag."""
    at = X + t[:, None] * token_stride + e[None, :]
    tile = tl.load(at, mask=inside[None, :] & there[:, None], other=0.0)
    columns = columns_of(tl.permute(tile, (1, 0)), e.shape[0], t.shape[0])
    rows = ()
    for j in tl.static_range(len(reals)):
        row = columns[j].to(tl.float32)
        if FLAGS is not None:
            row = tl.where(reals[j], row, 0.0)
        rows = rows + (row,)
    return rows


@triton.jit
def store_rows(Y, rows, row, tokens, channels, e, inside, t, there):
    """Y (rows, T, E) at each token that there is."""
    narrow = ()
    for j in tl.static_range(len(rows)):
        narrow = narrow + (rows[j].to(Y.dtype.element_ty),)
    at = Y + (row * tokens + t)[:, None] * channels + e[None, :]
    tl.store(at, tile_of(narrow, e.shape[0]), mask=inside[None, :] & there[:, None])


@triton.jit
def steps_of(raw, bias, reals, SOFTPLUS: tl.constexpr):
    """The step sizes, 0 at tokens that are not real."""
    steps = ()
    for j in tl.static_range(len(raw)):
        v = raw[j] + bias
        if SOFTPLUS:
            v = _softplus(v)
        steps = steps + (tl.where(reals[j], v, 0.0),)
    return steps


@triton.jit
def products_of(one, other):
    products = ()
    for j in tl.static_range(len(one)):
        products = products + (one[j] * other[j],)
    return products


@triton.jit
def per_channel(P, e, inside):
    """P at the channels in float32, 0 if it is not given."""
    if P is not None:
        return tl.load(P + e, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros(e.shape, tl.float32)


@triton.jit
def numbers_of(
    BC, first, n, WHICH: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The n-th number of B (WHICH = 0) or C (1) at Q tokens from place `first` on, (BLOCK) each.

    Each of the LANES threads of a warp loads TOGETHER of them at once, all threads the same.
    """
    same = tl.zeros((LANES, 1), tl.int32) + tl.arange(0, TOGETHER)[None, :]
    at = BC + tl.cast(first // TOGETHER, tl.int64) * (2 * N * TOGETHER) + n * TOGETHER + same
    numbers = ()
    for j in tl.static_range(Q // TOGETHER):
        columns = columns_of(tl.load(at + (2 * j + WHICH) * (N * TOGETHER)), LANES, TOGETHER)
        for k in tl.static_range(TOGETHER):
            spread = tl.broadcast_to(columns[k][:, None], (LANES, BLOCK // LANES))
            numbers = numbers + (tl.reshape(spread, (BLOCK,)),)
    return numbers


@triton.jit
def decay_of(DECAY, A, total, cut, channels, states, e, inside):
    """What is left of each state after steps of this sum, nothing if a sequence started."""
    for n in range(states):
        rate = tl.load(A + n * channels + e, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        left = tl.where(cut != 0, 0.0, tl.exp2(total * rate))
        tl.store(DECAY + n * channels + e, left, mask=inside)


@triton.jit(do_not_specialize=VARY)
def forward_kernel(
    X, X_2, DELTA, DELTA_2, A, BC, D, D_2, Z, BIAS, BIAS_2, FLAGS, CARRY, DECAY, STATES, Y,
    x_batch, x_token, delta_batch, delta_token, z_batch, z_token, batch, tokens, padded, channels,
    width, groups, states, segments, segment, chunk, nought, reverse, SUMMARY: tl.constexpr,
    SOFTPLUS: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Carries CARRY (rows, segments, N, E) through each segment, from the state in front of it to
    that behind it; gives Y and, where STATES is, the state in front of every chunk.

    As a SUMMARY it starts from zeros, for all segments but the last, and gives DECAY instead of Y:
    how much of a state in front of the segment is left behind it.
    """
    row, part, begin, end, group, _, e, inside = place_of(
        tokens, width, groups, segment, 0, segments - 1 if SUMMARY else segments, BLOCK
    )
    second, given, origin, turn = direction_of(row, batch, reverse, tokens)
    X = chosen(second, X, X_2) + given * x_batch
    DELTA = chosen(second, DELTA, DELTA_2) + given * delta_batch
    A += tl.where(second, states * channels, 0)
    BC += (row * groups + group) * padded * (2 * N)
    CARRY += (row * segments + part) * states * channels
    if FLAGS is not None:
        FLAGS += row * tokens
    if STATES is not None:
        STATES += row * tl.cdiv(tokens, chunk) * states * channels
    bias = per_channel(chosen(second, BIAS, BIAS_2), e, inside)
    skip = per_channel(chosen(second, D, D_2), e, inside)
    total = tl.zeros((BLOCK,), tl.float32)
    cut = 0
    for first in range(begin, end, Q):
        t, there, reals, starts = tokens_of(FLAGS, first, end, origin, turn, Q)
        deltas = rows_of(DELTA, delta_token, e, inside, t, there, FLAGS, reals)
        steps = steps_of(deltas, bias, reals, SOFTPLUS)
        xs = rows_of(X, x_token, e, inside, t, there, FLAGS, reals)
        pushes = products_of(steps, xs)
        ys = ()
        for j in tl.static_range(Q):
            if SUMMARY:
                total += steps[j]
            else:
                ys = ys + (skip * xs[j],)
        cut |= starts
        for n in range(states):
            at = n * channels + e
            h = tl.load(CARRY + at, mask=inside, other=0.0)
            if STATES is not None:
                kept = STATES + (first // chunk).to(tl.int64) * states * channels + at
                tl.store(kept, h, mask=inside & (first % chunk == 0))
            rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            bs = numbers_of(BC, first, n, 0, N, Q, BLOCK, TOGETHER, LANES)
            if not SUMMARY:
                cs = numbers_of(BC, first, n, 1, N, Q, BLOCK, TOGETHER, LANES)
            sums = ()
            for j in tl.static_range(Q):
                if FLAGS is not None:
                    h = tl.where((starts >> j) & 1 != 0, 0.0, h)
                h = tl.exp2(steps[j] * rate) * h + pushes[j] * bs[j]
                if not SUMMARY:
                    sums = sums + (ys[j] + h * cs[j],)
            ys = sums
            tl.store(CARRY + at, h, mask=inside)
        if not SUMMARY:
            t, there, reals, starts = tokens_of(FLAGS, first + nought, end, origin, turn, Q)
            if Z is not None:
                zs = rows_of(Z + given * z_batch, z_token, e, inside, t, there, FLAGS, reals)
            gated = ()
            for j in tl.static_range(Q):
                y = ys[j]
                if Z is not None:
                    y *= zs[j] * tl.sigmoid(zs[j])
                if FLAGS is not None:
                    y = tl.where(reals[j], y, 0.0)
                gated = gated + (y,)
            store_rows(Y, gated, row, tokens, channels, e, inside, t, there)
        tl.debug_barrier()  # the next tokens read CARRY
    if SUMMARY:
        DECAY += (row * segments + part) * states * channels
        decay_of(DECAY, A, total, cut, channels, states, e, inside)


@triton.jit(do_not_specialize=["segments"])
def combine_kernel(
    START, DECAY, CARRY, size, segments, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr
):
    """From what each segment does to a state, the state in front of each, in place; `size` is N·E.

    The segments' effects are DECAY and, from zero, CARRY. START is in front of the first one, that
    is the last one if BACKWARDS, whose effect is not asked for.
    """
    blocks = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(START + row * size + i, mask=i < size, other=0.0)
    for k in range(segments):
        part = segments - 1 - k if BACKWARDS else k
        at = (row * segments + part) * size + i
        mask = (i < size) & (k < segments - 1)
        change = tl.load(CARRY + at, mask=mask, other=0.0)
        left = tl.load(DECAY + at, mask=mask, other=0.0)
        tl.store(CARRY + at, h, mask=i < size)
        h = tl.where(left == 0, 0.0, left * h) + change  # nothing is left of infinity either
