# mypy: ignore-errors
# Triton's language has no Python types.
"""The kernels of `selective_scan_triton` for gradients, in the terms of those for values.

A chunk's states are computed again from the one kept in front of it, first those in front of its
groups of Q tokens, into SCRATCH, then, group by group from the last, all Q of them in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from brickwork.kernels.selective_scan_triton_forward import (
    LOG2_E,
    VARY,
    chosen,
    decay_of,
    direction_of,
    numbers_of,
    per_channel,
    place_of,
    products_of,
    rows_of,
    steps_of,
    store_rows,
    tokens_of,
)


@triton.jit
def _slopes(DY, Z, dy_token, z_token, e, inside, t, there, FLAGS, reals):
    """The gradient of (C · h + D x) at each token."""
    slopes = rows_of(DY, dy_token, e, inside, t, there, FLAGS, reals)
    if Z is not None:
        gated = ()
        zs = rows_of(Z, z_token, e, inside, t, there, FLAGS, reals)
        for j in tl.static_range(len(slopes)):
            gated = gated + (slopes[j] * zs[j] * tl.sigmoid(zs[j]),)
        slopes = gated
    return slopes


@triton.jit(do_not_specialize=VARY)
def backward_summary_kernel(
    DY, DELTA, DELTA_2, A, BC, Z, BIAS, BIAS_2, FLAGS, CARRY, DECAY, dy_batch, dy_token,
    delta_batch, delta_token, z_batch, z_token, batch, tokens, padded, channels, width, groups,
    states, segments, segment, reverse, SOFTPLUS: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """For all segments but the first: what each adds to the gradient of the state in front of it
    (CARRY, which holds zeros), and how much of that of the state behind it arrives (DECAY)."""
    row, part, begin, end, group, _, e, inside = place_of(
        tokens, width, groups, segment, 1, segments - 1, BLOCK
    )
    second, given, origin, turn = direction_of(row, batch, reverse, tokens)
    DY += given * dy_batch
    DELTA = chosen(second, DELTA, DELTA_2) + given * delta_batch
    A += tl.where(second, states * channels, 0)
    BC += (row * groups + group) * padded * (2 * N)
    CARRY += (row * segments + part) * states * channels
    if FLAGS is not None:
        FLAGS += row * tokens
    if Z is not None:
        Z += given * z_batch
    bias = per_channel(chosen(second, BIAS, BIAS_2), e, inside)
    total = tl.zeros((BLOCK,), tl.float32)
    cut = 0
    blocks = tl.cdiv(end - begin, Q)
    for i in range(blocks):
        first = begin + (blocks - 1 - i) * Q
        t, there, reals, starts = tokens_of(FLAGS, first, end, origin, turn, Q)
        deltas = rows_of(DELTA, delta_token, e, inside, t, there, FLAGS, reals)
        steps = steps_of(deltas, bias, reals, SOFTPLUS)
        slopes = _slopes(DY, Z, dy_token, z_token, e, inside, t, there, FLAGS, reals)
        for j in tl.static_range(Q):
            total += steps[j]
        cut |= starts
        for n in range(states):
            at = n * channels + e
            g = tl.load(CARRY + at, mask=inside, other=0.0)
            rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
            cs = numbers_of(BC, first, n, 1, N, Q, BLOCK, TOGETHER, LANES)
            for j in tl.static_range(Q - 1, -1, -1):
                g = tl.exp2(steps[j] * rate) * (g + cs[j] * slopes[j])
                if FLAGS is not None:
                    g = tl.where((starts >> j) & 1 != 0, 0.0, g)
            tl.store(CARRY + at, g, mask=inside)
        tl.debug_barrier()  # the next tokens read CARRY
    DECAY += (row * segments + part) * states * channels
    decay_of(DECAY, A, total, cut, channels, states, e, inside)


@triton.jit(do_not_specialize=VARY)
def backward_kernel(
    DY, X, X_2, DELTA, DELTA_2, A, BC, D, D_2, Z, BIAS, BIAS_2, FLAGS, STATES, CARRY, SCRATCH, DX,
    DDELTA, DA, SHARES, DZ, SUMS, dy_batch, dy_token, x_batch, x_token, delta_batch, delta_token,
    z_batch, z_token, rows, batch, tokens, padded, channels, width, groups, states, segments,
    segment, chunk, nought, reverse, SOFTPLUS: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Every gradient of each segment, from the gradient of the state behind it (CARRY, which
    becomes that of the state in front of it) and the states in front of its chunks.

    DA (rows, segments, N, E), which holds zeros, SUMS (rows, segments, 2, E) of D and the bias,
    and SHARES of B and C (blocks of a group, rows, groups, padded, 2, N), in scan order, at padding
    whatever, are for the caller to sum up. SCRATCH takes the states in front of a chunk's
    groups of Q tokens.
    """
    row, part, begin, end, group, block, e, inside = place_of(
        tokens, width, groups, segment, 0, segments, BLOCK
    )
    second, given, origin, turn = direction_of(row, batch, reverse, tokens)
    DY += given * dy_batch
    DELTA = chosen(second, DELTA, DELTA_2) + given * delta_batch
    A += tl.where(second, states * channels, 0)
    X = chosen(second, X, X_2) + given * x_batch
    BC += (row * groups + group) * padded * (2 * N)
    CARRY += (row * segments + part) * states * channels
    DA += (row * segments + part) * states * channels
    STATES += row * tl.cdiv(tokens, chunk) * states * channels
    SCRATCH += (row * segments + part) * (chunk // Q) * states * channels
    SHARES += ((block * rows + row) * groups + group) * padded * (2 * N)
    if FLAGS is not None:
        FLAGS += row * tokens
    if Z is not None:
        Z += given * z_batch
    bias = per_channel(chosen(second, BIAS, BIAS_2), e, inside)
    skip = per_channel(chosen(second, D, D_2), e, inside)
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
            t, there, reals, starts = tokens_of(FLAGS, first, end, origin, turn, Q)
            deltas = rows_of(DELTA, delta_token, e, inside, t, there, FLAGS, reals)
            steps = steps_of(deltas, bias, reals, SOFTPLUS)
            pushes = products_of(steps, rows_of(X, x_token, e, inside, t, there, FLAGS, reals))
            for n in range(states):
                at = n * channels + e
                h = tl.load(SCRATCH + k * states * channels + at, mask=inside, other=0.0)
                rate = tl.load(A + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
                bs = numbers_of(BC, first, n, 0, N, Q, BLOCK, TOGETHER, LANES)
                for j in tl.static_range(Q):
                    if FLAGS is not None:
                        h = tl.where((starts >> j) & 1 != 0, 0.0, h)
                    h = tl.exp2(steps[j] * rate) * h + pushes[j] * bs[j]
                tl.store(SCRATCH + (k + 1) * states * channels + at, h, mask=inside)
        for back_k in range(blocks):
            tl.debug_barrier()
            k = blocks - 1 - back_k
            first = front + k * Q
            t, there, reals, starts = tokens_of(FLAGS, first, end, origin, turn, Q)
            deltas = rows_of(DELTA, delta_token, e, inside, t, there, FLAGS, reals)
            steps = steps_of(deltas, bias, reals, SOFTPLUS)
            pushes = products_of(steps, rows_of(X, x_token, e, inside, t, there, FLAGS, reals))
            slopes = _slopes(DY, Z, dy_token, z_token, e, inside, t, there, FLAGS, reals)
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
                bs = numbers_of(BC, first, n, 0, N, Q, BLOCK, TOGETHER, LANES)
                cs = numbers_of(BC, first, n, 1, N, Q, BLOCK, TOGETHER, LANES)
                decays, before, sums = (), (), ()
                for j in tl.static_range(Q):
                    if FLAGS is not None:
                        h = tl.where((starts >> j) & 1 != 0, 0.0, h)
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
                        g = tl.where((starts >> j) & 1 != 0, 0.0, g)
                dpushes, dsteps = on_push, on_step
                tl.store(CARRY + at, g, mask=inside)
                tl.store(DA + at, drate, mask=inside)
            t, there, reals, starts = tokens_of(FLAGS, first + nought, end, origin, turn, Q)
            xs = rows_of(X, x_token, e, inside, t, there, FLAGS, reals)
            raw = rows_of(DELTA, delta_token, e, inside, t, there, FLAGS, reals)
            if Z is not None:
                zs = rows_of(Z, z_token, e, inside, t, there, FLAGS, reals)
                dys = rows_of(DY, dy_token, e, inside, t, there, FLAGS, reals)
            dxs, ddeltas, dzs = (), (), ()
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
                dxs, ddeltas = dxs + (dx,), ddeltas + (ddelta,)
                if Z is not None:
                    gate = tl.sigmoid(zs[j])
                    dz = dys[j] * (outs[j] + skip * xs[j]) * gate * (1 + zs[j] * (1 - gate))
                    if FLAGS is not None:
                        dz = tl.where(reals[j], dz, 0.0)
                    dzs = dzs + (dz,)
            store_rows(DX, dxs, row, tokens, channels, e, inside, t, there)
            store_rows(DDELTA, ddeltas, row, tokens, channels, e, inside, t, there)
            if Z is not None:
                store_rows(DZ, dzs, row, tokens, channels, e, inside, t, there)
        tl.debug_barrier()  # the next chunk writes SCRATCH
    SUMS += (row * segments + part) * 2 * channels + e
    tl.store(SUMS, dskip, mask=inside)
    tl.store(SUMS + channels, dbias, mask=inside)
