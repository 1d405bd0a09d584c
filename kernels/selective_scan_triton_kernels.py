"""The kernels of `selective_scan_triton`, which launches them.

A program takes BLOCK channels of one row and one segment of its tokens, and Q tokens at a time: it
loads what belongs to the channels, and then, for one n after the other, carries the n-th state of
its channels through the Q tokens in registers. Between groups of Q tokens the states wait in CARRY.
So registers depend on Q and BLOCK alone, never on N, and the loads of Q tokens are in flight at
once. s is a place in scan order, t the token there. FLAGS holds 1 for a real token and 2 more where
a sequence starts. B and C come prepared, as BC, so that their Q numbers lie at fixed distances.

`nought` is 0, which the compiler does not know, lest it keep the addresses of the first loads for
the last ones, through the loop over n, in twice Q registers for each tensor.

A tuple is Q values, one a token. Each kernel is one warp wide: sums over channels need no shared
memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_VARY = ["tokens", "segments", "segment", "nought"]


@triton.jit(do_not_specialize=["tokens"])
def prepare_kernel(
    B,
    C,
    FLAGS,
    BC,
    b_batch,
    b_token,
    b_group,
    c_batch,
    c_token,
    c_group,
    tokens,
    padded,
    groups,
    REVERSE: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """B and C in scan order, (batch, groups, padded, 2, N) in float32, 0 where no real token is."""
    blocks = tl.cdiv(padded, ROWS)
    s = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    group = row % groups
    batch_row = row // groups
    n = tl.arange(0, COLUMNS)[None, :]
    if REVERSE:
        t = (tokens - 1 - s).to(tl.int64)
    else:
        t = s.to(tl.int64)
    real = s < tokens
    if FLAGS is not None:
        real = (tl.load(FLAGS + batch_row * tokens + t, mask=real, other=0).to(tl.int32) & 1) != 0
    mask = real[:, None] & (n < N)
    t = t[:, None]
    b = tl.load(B + batch_row * b_batch + group * b_group + t * b_token + n, mask=mask, other=0.0)
    c = tl.load(C + batch_row * c_batch + group * c_group + t * c_token + n, mask=mask, other=0.0)
    out = BC + (row * padded + s[:, None]) * (2 * N) + n
    mask = (s < padded)[:, None] & (n < N)
    tl.store(out, b.to(tl.float32), mask=mask)
    tl.store(out + N, c.to(tl.float32), mask=mask)


@triton.jit
def _place(tokens, channels, groups, segment, part, parts, BLOCK: tl.constexpr):
    """Of this program, one of those for the `parts` segments from `part` on: row, segment, its
    first place, the place behind it, group, the number of its block in the group, its channels,
    which of them there are."""
    width = channels // groups
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
def _tokens(FLAGS, first, end, tokens, TURN: tl.constexpr, Q: tl.constexpr):
    """Q tokens from place `first` on: the first of them, and for each whether it is real, and
    whether a sequence starts at it. The others lie TURN (1 or -1) apart."""
    if TURN < 0:
        t = tl.cast(tokens - 1 - first, tl.int64)
    else:
        t = tl.cast(first, tl.int64)
    reals, starts = (), ()
    for j in tl.static_range(Q):
        real = first + j < end
        if FLAGS is not None:
            flags = tl.load(FLAGS + t + j * TURN, mask=real, other=0).to(tl.int32)
            real = (flags & 1) != 0
            starts = starts + ((flags & 2) != 0,)
        reals = reals + (real,)
    return t, reals, starts


@triton.jit
def _rows(X, token_stride, e, inside, t, reals, TURN: tl.constexpr):
    """X at each token, 0 where it is not real."""
    stride = tl.cast(token_stride, tl.int64)
    at = X + t * stride + e
    rows = ()
    for j in tl.static_range(len(reals)):
        row = tl.load(at, mask=inside & reals[j], other=0.0)
        rows = rows + (row.to(tl.float32),)
        at += stride * TURN
    return rows


@triton.jit
def _steps(raw, bias, reals, SOFTPLUS: tl.constexpr):
    """The step sizes, 0 at tokens that are not real."""
    steps = ()
    for j in tl.static_range(len(raw)):
        v = raw[j] + bias
        if SOFTPLUS:
            v = _softplus(v)
        steps = steps + (tl.where(reals[j], v, 0.0),)
    return steps


@triton.jit
def _products(one, other):
    products = ()
    for j in tl.static_range(len(one)):
        products = products + (one[j] * other[j],)
    return products


@triton.jit
def _per_channel(P, e, inside):
    """P at the channels in float32, 0 if it is not given."""
    if P is not None:
        return tl.load(P + e, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros(e.shape, tl.float32)


@triton.jit
def _numbers(BC, first, n, WHICH: tl.constexpr, N: tl.constexpr, Q: tl.constexpr):
    """The n-th number of B (WHICH = 0) or C (1) at Q tokens from place `first` on."""
    at = BC + tl.cast(first, tl.int64) * (2 * N) + n
    numbers = ()
    for j in tl.static_range(Q):
        numbers = numbers + (tl.load(at + (2 * j + WHICH) * N),)
    return numbers


@triton.jit
def _store_decay(DECAY, A, total, cut, channels, states, e, inside):
    """What is left of each state after steps of this sum, nothing if a sequence started."""
    for n in range(states):
        rate = tl.load(A + n * channels + e, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        left = tl.where(cut, 0.0, tl.exp2(total * rate))
        tl.store(DECAY + n * channels + e, left, mask=inside)


@triton.jit(do_not_specialize=_VARY)
def forward_kernel(
    X,
    DELTA,
    A,
    BC,
    D,
    Z,
    BIAS,
    FLAGS,
    CARRY,
    DECAY,
    STATES,
    Y,
    x_batch,
    x_token,
    delta_batch,
    delta_token,
    z_batch,
    z_token,
    tokens,
    padded,
    channels,
    groups,
    states,
    segments,
    segment,
    chunk,
    nought,
    SUMMARY: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    TURN: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Carries CARRY (batch, segments, N, E) through each segment, from the state in front of it to
    that behind it; gives Y and, where STATES is, the state in front of every chunk.

    As a SUMMARY it starts from zeros, for all segments but the last, and gives DECAY instead of Y:
    how much of a state in front of the segment is left behind it.
    """
    row, part, begin, end, group, _, e, inside = _place(
        tokens, channels, groups, segment, 0, segments - 1 if SUMMARY else segments, BLOCK
    )
    X += row * x_batch
    DELTA += row * delta_batch
    BC += (row * groups + group) * padded * (2 * N)
    CARRY += (row * segments + part) * states * channels
    if FLAGS is not None:
        FLAGS += row * tokens
    if STATES is not None:
        STATES += row * tl.cdiv(tokens, chunk) * states * channels
    bias = _per_channel(BIAS, e, inside)
    skip = _per_channel(D, e, inside)
    total = tl.zeros((BLOCK,), tl.float32)
    cut = begin < 0
    for first in range(begin, end, Q):
        t, reals, starts = _tokens(FLAGS, first, end, tokens, TURN, Q)
        steps = _steps(_rows(DELTA, delta_token, e, inside, t, reals, TURN), bias, reals, SOFTPLUS)
        xs = _rows(X, x_token, e, inside, t, reals, TURN)
        pushes = _products(steps, xs)
        ys = ()
        for j in tl.static_range(Q):
            if SUMMARY:
                total += steps[j]
                if FLAGS is not None:
                    cut = cut | starts[j]
            else:
                ys = ys + (skip * xs[j],)
        for n in range(states):
            at = n * channels + e
            h = tl.load(CARRY + at, mask=inside, other=0.0)
            if STATES is not None:
                kept = STATES + (first // chunk).to(tl.int64) * states * channels + at
                tl.store(kept, h, mask=inside & (first % chunk == 0))
            rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            bs = _numbers(BC, first, n, 0, N, Q)
            if not SUMMARY:
                cs = _numbers(BC, first, n, 1, N, Q)
            sums = ()
            for j in tl.static_range(Q):
                if FLAGS is not None:
                    h = tl.where(starts[j], 0.0, h)
                h = tl.exp2(steps[j] * rate) * h + pushes[j] * bs[j]
                if not SUMMARY:
                    sums = sums + (ys[j] + h * cs[j],)
            ys = sums
            tl.store(CARRY + at, h, mask=inside)
        if not SUMMARY:
            t, reals, starts = _tokens(FLAGS, first + nought, end, tokens, TURN, Q)
            if Z is not None:
                zs = _rows(Z + row * z_batch, z_token, e, inside, t, reals, TURN)
            at = Y + (row * tokens + t) * channels + e
            for j in tl.static_range(Q):
                y = ys[j]
                if Z is not None:
                    y *= zs[j] * tl.sigmoid(zs[j])
                if FLAGS is not None:
                    y = tl.where(reals[j], y, 0.0)
                tl.store(at, y.to(Y.dtype.element_ty), mask=inside & (first + j < end))
                at += channels * TURN
        tl.debug_barrier()  # the next tokens read CARRY
    if SUMMARY:
        DECAY += (row * segments + part) * states * channels
        _store_decay(DECAY, A, total, cut, channels, states, e, inside)


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
        h = left * h + change


@triton.jit
def _slopes(DY, Z, dy_token, z_token, e, inside, t, reals, TURN: tl.constexpr):
    """The gradient of (C · h + D x) at each token."""
    slopes = _rows(DY, dy_token, e, inside, t, reals, TURN)
    if Z is not None:
        gated = ()
        zs = _rows(Z, z_token, e, inside, t, reals, TURN)
        for j in tl.static_range(len(slopes)):
            gated = gated + (slopes[j] * zs[j] * tl.sigmoid(zs[j]),)
        slopes = gated
    return slopes


@triton.jit(do_not_specialize=_VARY)
def backward_summary_kernel(
    DY,
    DELTA,
    A,
    BC,
    Z,
    BIAS,
    FLAGS,
    CARRY,
    DECAY,
    dy_batch,
    dy_token,
    delta_batch,
    delta_token,
    z_batch,
    z_token,
    tokens,
    padded,
    channels,
    groups,
    states,
    segments,
    segment,
    SOFTPLUS: tl.constexpr,
    TURN: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For all segments but the first: what each adds to the gradient of the state in front of it
    (CARRY, which holds zeros), and how much of that of the state behind it arrives (DECAY)."""
    row, part, begin, end, group, _, e, inside = _place(
        tokens, channels, groups, segment, 1, segments - 1, BLOCK
    )
    DY += row * dy_batch
    DELTA += row * delta_batch
    BC += (row * groups + group) * padded * (2 * N)
    CARRY += (row * segments + part) * states * channels
    if FLAGS is not None:
        FLAGS += row * tokens
    if Z is not None:
        Z += row * z_batch
    bias = _per_channel(BIAS, e, inside)
    total = tl.zeros((BLOCK,), tl.float32)
    cut = begin < 0
    blocks = tl.cdiv(end - begin, Q)
    for i in range(blocks):
        first = begin + (blocks - 1 - i) * Q
        t, reals, starts = _tokens(FLAGS, first, end, tokens, TURN, Q)
        steps = _steps(_rows(DELTA, delta_token, e, inside, t, reals, TURN), bias, reals, SOFTPLUS)
        slopes = _slopes(DY, Z, dy_token, z_token, e, inside, t, reals, TURN)
        for j in tl.static_range(Q):
            total += steps[j]
            if FLAGS is not None:
                cut = cut | starts[j]
        for n in range(states):
            at = n * channels + e
            g = tl.load(CARRY + at, mask=inside, other=0.0)
            rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            cs = _numbers(BC, first, n, 1, N, Q)
            for j in tl.static_range(Q - 1, -1, -1):
                g = tl.exp2(steps[j] * rate) * (g + cs[j] * slopes[j])
                if FLAGS is not None:
                    g = tl.where(starts[j], 0.0, g)
            tl.store(CARRY + at, g, mask=inside)
        tl.debug_barrier()  # the next tokens read CARRY
    DECAY += (row * segments + part) * states * channels
    _store_decay(DECAY, A, total, cut, channels, states, e, inside)


@triton.jit(do_not_specialize=_VARY)
def backward_kernel(
    DY,
    X,
    DELTA,
    A,
    BC,
    D,
    Z,
    BIAS,
    FLAGS,
    STATES,
    CARRY,
    SCRATCH,
    DX,
    DDELTA,
    DA,
    SHARES,
    DZ,
    SUMS,
    dy_batch,
    dy_token,
    x_batch,
    x_token,
    delta_batch,
    delta_token,
    z_batch,
    z_token,
    batch,
    tokens,
    padded,
    channels,
    groups,
    states,
    segments,
    segment,
    chunk,
    nought,
    SOFTPLUS: tl.constexpr,
    TURN: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every gradient of each segment, from the gradient of the state behind it (CARRY, which
    becomes that of the state in front of it) and the states in front of its chunks.

    DA (batch, segments, N, E), which holds zeros, SUMS (batch, segments, 2, E) of D and the bias,
    and SHARES of B and C (blocks of a group, batch, groups, padded, 2, N), in scan order (at
    padding whatever), are for the caller to sum up. SCRATCH takes the states in front of a chunk's groups of Q tokens.
    """
    row, part, begin, end, group, block, e, inside = _place(
        tokens, channels, groups, segment, 0, segments, BLOCK
    )
    X += row * x_batch
    DY += row * dy_batch
    DELTA += row * delta_batch
    BC += (row * groups + group) * padded * (2 * N)
    CARRY += (row * segments + part) * states * channels
    DA += (row * segments + part) * states * channels
    STATES += row * tl.cdiv(tokens, chunk) * states * channels
    SCRATCH += (row * segments + part) * (chunk // Q) * states * channels
    SHARES += ((block * batch + row) * groups + group) * padded * (2 * N)
    if FLAGS is not None:
        FLAGS += row * tokens
    if Z is not None:
        Z += row * z_batch
    bias = _per_channel(BIAS, e, inside)
    skip = _per_channel(D, e, inside)
    dskip = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    chunks = tl.cdiv(end - begin, chunk)
    for i in range(chunks):
        front = begin + (chunks - 1 - i) * chunk
        back_end = tl.minimum(front + chunk, end)
        blocks = tl.cdiv(back_end - front, Q)
        for n in range(states):
            at = n * channels + e
            kept = STATES + (front // chunk).to(tl.int64) * states * channels + at
            tl.store(SCRATCH + at, tl.load(kept, mask=inside, other=0.0), mask=inside)
        for k in range(blocks - 1):
            tl.debug_barrier()
            first = front + k * Q
            t, reals, starts = _tokens(FLAGS, first, end, tokens, TURN, Q)
            steps = _steps(
                _rows(DELTA, delta_token, e, inside, t, reals, TURN), bias, reals, SOFTPLUS
            )
            pushes = _products(steps, _rows(X, x_token, e, inside, t, reals, TURN))
            for n in range(states):
                at = n * channels + e
                h = tl.load(SCRATCH + k * states * channels + at, mask=inside, other=0.0)
                rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
                bs = _numbers(BC, first, n, 0, N, Q)
                for j in tl.static_range(Q):
                    if FLAGS is not None:
                        h = tl.where(starts[j], 0.0, h)
                    h = tl.exp2(steps[j] * rate) * h + pushes[j] * bs[j]
                tl.store(SCRATCH + (k + 1) * states * channels + at, h, mask=inside)
        for back_k in range(blocks):
            tl.debug_barrier()
            k = blocks - 1 - back_k
            first = front + k * Q
            t, reals, starts = _tokens(FLAGS, first, end, tokens, TURN, Q)
            steps = _steps(
                _rows(DELTA, delta_token, e, inside, t, reals, TURN), bias, reals, SOFTPLUS
            )
            pushes = _products(steps, _rows(X, x_token, e, inside, t, reals, TURN))
            slopes = _slopes(DY, Z, dy_token, z_token, e, inside, t, reals, TURN)
            share = SHARES + tl.cast(first, tl.int64) * (2 * N)
            dpushes, dsteps, outs = (), (), ()
            for _ in tl.static_range(Q):
                dpushes = dpushes + (tl.zeros((BLOCK,), tl.float32),)
                dsteps = dsteps + (tl.zeros((BLOCK,), tl.float32),)
                if Z is not None:
                    outs = outs + (tl.zeros((BLOCK,), tl.float32),)
            for n in range(states):
                at = n * channels + e
                h = tl.load(SCRATCH + k * states * channels + at, mask=inside, other=0.0)
                rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
                bs = _numbers(BC, first, n, 0, N, Q)
                cs = _numbers(BC, first, n, 1, N, Q)
                decays, before, sums = (), (), ()
                for j in tl.static_range(Q):
                    if FLAGS is not None:
                        h = tl.where(starts[j], 0.0, h)
                    before = before + (h,)
                    decays = decays + (tl.exp2(steps[j] * (rate * LOG2_E)),)
                    h = decays[j] * h + pushes[j] * bs[j]
                    if Z is not None:
                        sums = sums + (outs[j] + h * cs[j],)
                    tl.store(share + (2 * j + 1) * N + n, tl.sum(h * slopes[j]))
                outs = sums
                g = tl.load(CARRY + at, mask=inside, other=0.0)
                drate = tl.load(DA + at, mask=inside, other=0.0)
                on_push, on_step = (), ()
                for j in tl.static_range(Q - 1, -1, -1):
                    g += cs[j] * slopes[j]
                    tl.store(share + 2 * j * N + n, tl.sum(g * pushes[j]))
                    on_push = (dpushes[j] + g * bs[j],) + on_push
                    g *= decays[j]
                    slope = g * before[j]
                    on_step = (dsteps[j] + slope * rate,) + on_step
                    drate += slope * steps[j]
                    if FLAGS is not None:
                        g = tl.where(starts[j], 0.0, g)
                dpushes, dsteps = on_push, on_step
                tl.store(CARRY + at, g, mask=inside)
                tl.store(DA + at, drate, mask=inside)
            t, reals, starts = _tokens(FLAGS, first + nought, end, tokens, TURN, Q)
            xs = _rows(X, x_token, e, inside, t, reals, TURN)
            raw = _rows(DELTA, delta_token, e, inside, t, reals, TURN)
            if Z is not None:
                zs = _rows(Z, z_token, e, inside, t, reals, TURN)
                dys = _rows(DY, dy_token, e, inside, t, reals, TURN)
            out = (row * tokens + t) * channels + e
            for j in tl.static_range(Q):
                dx = steps[j] * dpushes[j] + skip * slopes[j]
                ddelta = xs[j] * dpushes[j] + dsteps[j]
                if SOFTPLUS:
                    ddelta *= tl.sigmoid(raw[j] + bias)
                if FLAGS is not None:
                    dx = tl.where(reals[j], dx, 0.0)
                    ddelta = tl.where(reals[j], ddelta, 0.0)
                dskip += xs[j] * slopes[j]
                dbias += tl.where(reals[j], ddelta, 0.0)
                there = inside & (first + j < end)
                tl.store(DX + out, dx.to(DX.dtype.element_ty), mask=there)
                tl.store(DDELTA + out, ddelta.to(DDELTA.dtype.element_ty), mask=there)
                if Z is not None:
                    gate = tl.sigmoid(zs[j])
                    dz = dys[j] * (outs[j] + skip * xs[j]) * gate * (1 + zs[j] * (1 - gate))
                    if FLAGS is not None:
                        dz = tl.where(reals[j], dz, 0.0)
                    tl.store(DZ + out, dz.to(DZ.dtype.element_ty), mask=there)
                out += channels * TURN
        tl.debug_barrier()  # the next chunk writes SCRATCH
    SUMS += (row * segments + part) * 2 * channels + e
    tl.store(SUMS, dskip, mask=inside)
    tl.store(SUMS + channels, dbias, mask=inside)
