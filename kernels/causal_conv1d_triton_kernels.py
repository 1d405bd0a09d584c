# mypy: ignore-errors
# Triton's language has no Python types.
"""The kernels of `causal_conv1d_triton`.

s is a place in scan order, t the token there, c the channels of a program. A window is a tuple of
the WIDTH - 1 tokens in front, the nearest last; where registers are scarce they stay as they are
stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from brickwork.kernels.tile_triton import columns_of, tile_of


@triton.jit
def _token(ORDER, b, s, tokens, REVERSE: tl.constexpr):
    """The token at place `s` of row `b` in scan order; any, where that is outside."""
    if ORDER is not None:
        inside = (s >= 0) & (s < tokens)
        return tl.load(ORDER + b * tokens + s, mask=inside, other=0)
    elif REVERSE:
        return (tokens - 1 - s).to(tl.int64)
    else:
        return s.to(tl.int64)


@triton.jit
def _cut(window, start):
    """`window`, all 0 if a sequence starts behind it."""
    kept = ()
    for i in tl.static_range(len(window)):
        kept = kept + (tl.where(start, 0.0, window[i]),)
    return kept


@triton.jit
def _before(
    X, INITIAL, ORDER, STARTS, b, begin, count, tokens, x_token, c, channels, WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """The WIDTH - 1 tokens in front of place `begin`, the nearest last, 0 where there is none."""
    window = ()
    for i in tl.static_range(WIDTH - 1):
        s = begin - (WIDTH - 1) + i
        inside = (s >= 0) & (s < count)
        t = _token(ORDER, b, s, tokens, REVERSE)
        tap = tl.load(X + t * x_token + c, mask=inside & (c < channels), other=0.0)
        if INITIAL is not None:
            at = INITIAL + (b * (WIDTH - 1) + s + (WIDTH - 1)) * channels + c
            tap = tl.where(s < 0, tl.load(at, mask=(s < 0) & (c < channels), other=0.0), tap)
        if STARTS is not None:
            start = tl.load(STARTS + b * tokens + t, mask=inside, other=0) != 0
            window = _cut(window, start)
        window = window + (tap,)
    return window


@triton.jit
def _rows(X, t, x_token, c, channels, real, Q: tl.constexpr, BLOCK: tl.constexpr):
    """X at Q tokens, 0 but at the `real` ones, loaded as one tile."""
    at = X + t[:, None] * x_token + c[None, :]
    tile = tl.load(at, mask=real[:, None] & (c < channels)[None, :], other=0.0)
    return columns_of(tl.permute(tile, (1, 0)), BLOCK, Q)


@triton.jit
def _store_rows(Y, rows, t, c, channels, real, BLOCK: tl.constexpr):
    """Stores rows, as one tile, at the tokens that are `real`."""
    at = Y + t[:, None] * channels + c[None, :]
    tl.store(at, tile_of(rows, BLOCK), mask=real[:, None] & (c < channels)[None, :])


@triton.jit
def _starts_of(STARTS, b, t, inside, tokens, Q: tl.constexpr):
    """A bit for each of Q tokens: whether a sequence starts at it."""
    start = tl.load(STARTS + b * tokens + t, mask=inside, other=0) != 0
    return tl.sum(start.to(tl.int32) << tl.arange(0, Q))


@triton.jit
def _before_in_tiles(
    X, INITIAL, ORDER, STARTS, b, begin, count, tokens, x_token, c, channels, WIDTH: tl.constexpr,
    REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_before` from one tile."""
    some: tl.constexpr = 4 if WIDTH <= 5 else 8
    s = begin - some + tl.arange(0, some)
    wanted = (s >= begin - (WIDTH - 1)) & (s < count)
    inside = wanted & (s >= 0)
    t = _token(ORDER, b, s, tokens, REVERSE)
    rows = _rows(X, t, x_token, c, channels, inside, some, BLOCK)
    if INITIAL is not None:
        at = INITIAL + b * (WIDTH - 1) * channels
        initial = _rows(at, s + (WIDTH - 1), channels, c, channels, wanted & (s < 0), some, BLOCK)
    if STARTS is not None:
        starts = _starts_of(STARTS, b, t, inside, tokens, some)
    window = ()
    for i in tl.static_range(some - (WIDTH - 1), some):
        tap = rows[i]
        if INITIAL is not None:
            tap = tl.where(begin - some + i < 0, initial[i], tap)
        if STARTS is not None:
            window = _cut(window, (starts >> i) & 1 != 0)
        window = window + (tap,)
    return window


@triton.jit
def _converted(window, dtype: tl.constexpr):
    kept = ()
    for i in tl.static_range(len(window)):
        kept = kept + (window[i].to(dtype),)
    return kept


@triton.jit
def _filter(WEIGHT, BIAS, c, channels, WIDTH: tl.constexpr):
    """The columns of the weight, and the bias."""
    weights = ()
    for k in tl.static_range(WIDTH):
        column = tl.load(WEIGHT + k * channels + c, mask=c < channels, other=0.0)
        weights = weights + (column.to(tl.float32),)
    if BIAS is not None:
        bias = tl.load(BIAS + c, mask=c < channels, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros_like(weights[0])
    return weights, bias


@triton.jit
def _filter_in_tiles(WEIGHT, BIAS, c, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`_filter` from one tile."""
    some: tl.constexpr = 4 if WIDTH <= 4 else 8
    k = tl.arange(0, some)
    weights = _rows(WEIGHT, k, channels, c, channels, k < WIDTH, some, BLOCK)
    weights = _converted(weights[:WIDTH], tl.float32)
    if BIAS is not None:
        bias = tl.load(BIAS + c, mask=c < channels, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros_like(weights[0])
    return weights, bias


@triton.jit
def _convolve(taps, weights, bias):
    sum = bias
    for k in tl.static_range(len(taps)):
        sum += taps[k].to(tl.float32) * weights[k]
    return sum


@triton.jit(do_not_specialize=["tokens", "per_program"])
def forward_kernel(
    X, WEIGHT, BIAS, INITIAL, ORDER, COUNT, STARTS, Y, x_batch, x_token, tokens, channels,
    per_program, WIDTH: tl.constexpr, SILU: tl.constexpr, REVERSE: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks, parts = tl.cdiv(channels, BLOCK), tl.cdiv(tokens, per_program)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) // blocks
    b = (row // parts).to(tl.int64)
    begin = row % parts * per_program
    end = tl.minimum(begin + per_program, tokens)
    count = tl.load(COUNT + b).to(tl.int32) if COUNT is not None else tokens
    X += b * x_batch
    Y += b * tokens * channels
    weights, bias = _filter(WEIGHT, BIAS, c, channels, WIDTH)
    window = _before(
        X, INITIAL, ORDER, STARTS, b, begin, count, tokens, x_token, c, channels, WIDTH, REVERSE
    )
    kept: tl.constexpr = tl.float32 if WIDTH <= 4 else X.dtype.element_ty
    window = _converted(window, kept)
    for first in range(begin, end, UNROLL):
        rows, places = (), ()
        for j in tl.static_range(UNROLL):
            s = first + j
            t = _token(ORDER, b, s, tokens, REVERSE)
            real = (s < end) & (s < count) & (c < channels)
            rows = rows + (tl.load(X + t * x_token + c, mask=real, other=0.0),)
            places = places + (t,)
        for j in tl.static_range(UNROLL):
            s = first + j
            if STARTS is not None:
                inside = (s < end) & (s < count)
                start = tl.load(STARTS + b * tokens + places[j], mask=inside, other=0) != 0
                window = _cut(window, start)
            taps = window + (rows[j].to(kept),)
            y = _convolve(taps, weights, bias)
            if SILU:
                y = y * tl.sigmoid(y)
            if ORDER is not None:
                y = tl.where(s < count, y, 0.0)
            at = Y + places[j] * channels + c
            tl.store(at, y.to(Y.dtype.element_ty), mask=(s < end) & (c < channels))
            window = taps[1:]


@triton.jit(do_not_specialize=["tokens", "per_program"])
def backward_kernel(
    DY, X, WEIGHT, BIAS, INITIAL, ORDER, COUNT, STARTS, DX, DINITIAL, SUMS, dy_batch, dy_token,
    x_batch, x_token, tokens, channels, per_program, WIDTH: tl.constexpr, SILU: tl.constexpr,
    REVERSE: tl.constexpr, UNROLL: tl.constexpr, TILED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's gradient is complete WIDTH - 1 tokens later, so the walk goes on for as many.

    If TILED, rows of UNROLL tokens are loaded and stored as one tile, so that a thread has 128 bits
    side by side though it computes with few channels, and so is the filter.
    """
    blocks, parts = tl.cdiv(channels, BLOCK), tl.cdiv(tokens, per_program)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    b = row // parts
    begin = (row % parts).to(tl.int32) * per_program
    end = tl.minimum(begin + per_program, tokens)
    count = tl.load(COUNT + b).to(tl.int32) if COUNT is not None else tokens
    X += b * x_batch
    DY += b * dy_batch
    DX += b * tokens * channels
    if TILED:
        weights, bias = _filter_in_tiles(WEIGHT, BIAS, c, channels, WIDTH, BLOCK)
        window = _before_in_tiles(
            X, INITIAL, ORDER, STARTS, b, begin, count, tokens, x_token, c, channels, WIDTH,
            REVERSE, BLOCK,
        )  # fmt: skip
    else:
        weights, bias = _filter(WEIGHT, BIAS, c, channels, WIDTH)
        window = _before(
            X, INITIAL, ORDER, STARTS, b, begin, count, tokens, x_token, c, channels, WIDTH, REVERSE
        )
    zero = tl.zeros((BLOCK,), tl.float32)
    waiting, dweight = (), ()  # gradients of the window
    linked = tl.full((), (1 << (WIDTH - 1)) - 1, tl.int32)  # a bit of each: is it of this sequence
    for _ in tl.static_range(WIDTH - 1):
        waiting = waiting + (zero,)
    for _ in tl.static_range(WIDTH):
        dweight = dweight + (zero,)
    dbias = zero
    for first in range(begin, end + WIDTH - 1, UNROLL):
        rows, slopes, places, ready = (), (), (), ()
        if TILED:
            s = first + tl.arange(0, UNROLL)
            t = _token(ORDER, b, s, tokens, REVERSE)
            real = (s < end + WIDTH - 1) & (s < count)
            rows = _rows(X, t, x_token, c, channels, real, UNROLL, BLOCK)
            slopes = _rows(DY, t, dy_token, c, channels, real, UNROLL, BLOCK)
            if STARTS is not None:
                starts = _starts_of(STARTS, b, t, s < count, tokens, UNROLL)
        for j in tl.static_range(0 if TILED else UNROLL):
            s = first + j
            t = _token(ORDER, b, s, tokens, REVERSE)
            real = (s < end + WIDTH - 1) & (s < count) & (c < channels)
            rows = rows + (tl.load(X + t * x_token + c, mask=real, other=0.0),)
            slopes = slopes + (tl.load(DY + t * dy_token + c, mask=real, other=0.0),)
            places = places + (t,)
        for j in tl.static_range(UNROLL):
            s = first + j
            if STARTS is not None:
                if TILED:
                    start = (starts >> j) & 1 != 0
                else:
                    start = tl.load(STARTS + b * tokens + places[j], mask=s < count, other=0) != 0
                window = _cut(window, start)
                linked = tl.where(start, 0, linked)
            taps = window + (rows[j],)
            slope = slopes[j].to(tl.float32)
            if SILU:
                y = _convolve(taps, weights, bias)
                gate = tl.sigmoid(y)
                slope *= gate * (1 + y * (1 - gate))
            own = tl.where(s < end, slope, 0.0)
            dbias += own
            grads, sums = (), ()
            for k in tl.static_range(WIDTH):
                sums = sums + (dweight[k] + own * taps[k].to(tl.float32),)
                part = slope * weights[k]
                if k == WIDTH - 1:
                    grads = grads + (part,)
                elif STARTS is not None:
                    grads = grads + (waiting[k] + tl.where((linked >> k) & 1 != 0, part, 0.0),)
                else:
                    grads = grads + (waiting[k] + part,)
            dweight = sums
            done = s - (WIDTH - 1)
            if TILED:
                ready = ready + (grads[0].to(DX.dtype.element_ty),)
            else:
                inside = (done >= begin) & (done < end)
                at = DX + _token(ORDER, b, done, tokens, REVERSE) * channels + c
                tl.store(at, grads[0].to(DX.dtype.element_ty), mask=inside & (c < channels))
                if DINITIAL is not None:
                    at = DINITIAL + (b * (WIDTH - 1) + s) * channels + c
                    mask = (done < 0) & (c < channels)
                    tl.store(at, grads[0].to(DINITIAL.dtype.element_ty), mask=mask & (begin == 0))
            window, waiting = taps[1:], grads[1:]
            linked = (linked | 1 << (WIDTH - 1)) >> 1
        if TILED:
            s = first + tl.arange(0, UNROLL)
            done = s - (WIDTH - 1)
            t = _token(ORDER, b, done, tokens, REVERSE)
            inside = (done >= begin) & (done < end)
            _store_rows(DX, ready, t, c, channels, inside, BLOCK)
            if DINITIAL is not None:
                at = DINITIAL + b * (WIDTH - 1) * channels
                _store_rows(at, ready, s, c, channels, (done < 0) & (begin == 0), BLOCK)
    SUMS += row * (WIDTH + 1) * channels + c
    for k in tl.static_range(WIDTH):
        tl.store(SUMS + k * channels, dweight[k], mask=c < channels)
    tl.store(SUMS + WIDTH * channels, dbias, mask=c < channels)
