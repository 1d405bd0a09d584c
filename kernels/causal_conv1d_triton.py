"""`causal_conv1d` in Triton: one pass over x in either direction, forward and backward.

A program takes a block of channels and walks along the tokens with the filter's window in
registers, so each token is loaded once. Tokens are visited in scan order: backwards for `reverse`,
and through an index that leaves padding for last where there is a mask. Channels must be
contiguous, else x is copied; batch and token strides are free.

Bytes from memory, for x and y of b bytes an element (all else is of the size of one token):
forward B·T·C·2b; backward B·T·C·3b. Programs read again what they share at their borders: forward
W - 1 tokens each, backward 3 (W - 1), and backward adds (W + 1) · C float32 partial sums for
every program along the tokens, written and read once.

B batch, T tokens, C channels, W width of the filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brickwork.kernels import triton_support
from brickwork.kernels.causal_conv1d import Activation
from brickwork.kernels.sequences import scan_order
from brickwork.kernels.triton_support import (
    TYPE_NAMES,
    Configuration,
    cdiv,
    launch_warps,
    next_power_of_2,
)

WIDEST = 8  # the window and its gradients must fit the registers
_TOKENS = 16  # least that a program walks along
_PROGRAMS = 8  # wanted for each multiprocessor
_UNROLL = 4  # tokens whose loads are in flight together


def why_not(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None
) -> str | None:
    """Why the kernels cannot run on these checked arguments now, or None."""
    if weight.shape[1] > WIDEST:
        return f"it takes widths up to {WIDEST}, got {weight.shape[1]}"
    return triton_support.why_not(x, weight, bias, initial_state)


def causal_conv1d_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    activation: Activation,
    reverse: bool,
) -> Tensor:
    """The result of `causal_conv1d` (B, T, C) for checked arguments, with sequence starts."""
    if initial_state is not None:
        initial_state = initial_state.to(x.dtype)
    order = count = None
    if mask is not None:
        order, count = scan_order(mask, reverse=reverse), mask.sum(1)
    return _forward_op(
        x, weight, bias, initial_state, order, count, starts, activation == "silu", reverse
    )


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    order: Tensor | None,
    count: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    reverse: bool,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = _dense(x)
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    block, warps = _shape_of_forward(channels, width, x.dtype)
    per_program = _tokens_per_program(x, block)
    grid = (batch * cdiv(tokens, per_program) * cdiv(channels, block),)
    _forward_kernel[grid](
        x,
        *_small(weight, bias, initial_state, order, count, starts),
        y,
        x.stride(0),
        x.stride(1),
        tokens,
        channels,
        per_program,
        WIDTH=width,
        SILU=silu,
        REVERSE=reverse,
        UNROLL=_UNROLL,
        BLOCK=block,
        num_warps=launch_warps(warps),
    )
    return y


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    order: Tensor | None,
    count: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and initial_state, in this order."""
    grads = _empty_gradients(x, weight, bias, initial_state)
    dx, dweight, dbias, dinitial = grads
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    x, dy = _dense(x), _dense(dy)
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    block, warps = _shape_of_backward(channels, width, x.dtype)
    per_program = _tokens_per_program(x, block)
    rows = batch * cdiv(tokens, per_program)
    sums = torch.empty(rows, width + 1, channels, dtype=torch.float32, device=x.device)
    _backward_kernel[(rows * cdiv(channels, block),)](
        dy,
        x,
        *_small(weight, bias, initial_state, order, count, starts),
        dx,
        dinitial.mT if initial_state is not None else None,
        sums,
        dy.stride(0),
        dy.stride(1),
        x.stride(0),
        x.stride(1),
        tokens,
        channels,
        per_program,
        WIDTH=width,
        SILU=silu,
        REVERSE=reverse,
        UNROLL=_UNROLL,
        BLOCK=block,
        num_warps=launch_warps(warps),
    )
    total = sums.sum(0)
    dweight.copy_(total[:width].mT)
    dbias.copy_(total[width])
    return grads


def _dense(tensor: Tensor) -> Tensor:
    """The same, with contiguous channels; no copy where they are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _small(
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    order: Tensor | None,
    count: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The kernels' other arguments, contiguous and with channels last."""
    return (
        weight.mT.contiguous(),
        None if bias is None else bias.contiguous(),
        None if initial_state is None else initial_state.mT.contiguous(),
        None if order is None else order.contiguous(),
        None if count is None else count.contiguous(),
        None if starts is None else starts.contiguous().view(torch.uint8),
    )


def _empty_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, _, channels), width = x.shape, weight.shape[1]
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device),
        torch.empty(channels, dtype=(weight if bias is None else bias).dtype, device=x.device),
        torch.empty(
            batch,
            0 if initial_state is None else width - 1,
            channels,
            dtype=x.dtype,
            device=x.device,
        ).mT,
    )


def _fake_forward(x: Tensor, *others: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    return _empty_gradients(x, weight, bias, initial_state)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = _backward_op(dy, *tensors, ctx.silu, ctx.reverse)
    wanted = [None if t is None else g for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None, None)


_forward_op = triton_support.register(
    "causal_conv1d_triton",
    _forward,
    _fake_forward,
    gradients=_gradients,
    setup_context=_setup_context,
)
_backward_op = triton_support.register("causal_conv1d_triton_backward", _backward, _fake_backward)


def _shape_of_forward(channels: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Channels of a program and its warps: loads of 128 bits up to width 4."""
    return _shape(channels, min(16 // dtype.itemsize, 8 if width <= 4 else 4))


def _shape_of_backward(channels: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """The same; narrower loads of 16-bit numbers, so that sums and window fit the registers."""
    return _shape(channels, 4 if width <= 4 else 2)


def _shape(channels: int, a_thread: int) -> tuple[int, int]:
    block = min(max(next_power_of_2(channels), 32 * a_thread), 128 * a_thread)
    return block, block // (32 * a_thread)


def _tokens_per_program(x: Tensor, block: int) -> int:
    """As many as keep the GPU busy."""
    batch, tokens, channels = x.shape
    wanted = _PROGRAMS * triton_support.multiprocessors(x)
    return max(_TOKENS, min(tokens, cdiv(batch * tokens * cdiv(channels, block), wanted)))


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
    X,
    INITIAL,
    ORDER,
    STARTS,
    b,
    begin,
    count,
    tokens,
    x_token,
    c,
    channels,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The WIDTH - 1 tokens in front of place `begin`, the nearest last, 0 where there is none."""
    window = ()
    for i in tl.static_range(WIDTH - 1):
        s = begin - (WIDTH - 1) + i
        inside = (s >= 0) & (s < count)
        t = _token(ORDER, b, s, tokens, REVERSE)
        tap = tl.load(X + t * x_token + c, mask=inside & (c < channels), other=0.0).to(tl.float32)
        if INITIAL is not None:
            at = INITIAL + (b * (WIDTH - 1) + s + (WIDTH - 1)) * channels + c
            tap += tl.load(at, mask=(s < 0) & (c < channels), other=0.0).to(tl.float32)
        if STARTS is not None:
            start = tl.load(STARTS + b * tokens + t, mask=inside, other=0) != 0
            window = _cut(window, start)
        window = window + (tap,)
    return window


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
def _convolve(taps, weights, bias):
    sum = bias
    for k in tl.static_range(len(taps)):
        sum += taps[k] * weights[k]
    return sum


@triton.jit(do_not_specialize=["tokens", "per_program"])
def _forward_kernel(
    X,
    WEIGHT,
    BIAS,
    INITIAL,
    ORDER,
    COUNT,
    STARTS,
    Y,
    x_batch,
    x_token,
    tokens,
    channels,
    per_program,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    REVERSE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
            taps = window + (rows[j].to(tl.float32),)
            y = _convolve(taps, weights, bias)
            if SILU:
                y = y * tl.sigmoid(y)
            if ORDER is not None:
                y = tl.where(s < count, y, 0.0)
            at = Y + places[j] * channels + c
            tl.store(at, y.to(Y.dtype.element_ty), mask=(s < end) & (c < channels))
            window = taps[1:]


@triton.jit(do_not_specialize=["tokens", "per_program"])
def _backward_kernel(
    DY,
    X,
    WEIGHT,
    BIAS,
    INITIAL,
    ORDER,
    COUNT,
    STARTS,
    DX,
    DINITIAL,
    SUMS,
    dy_batch,
    dy_token,
    x_batch,
    x_token,
    tokens,
    channels,
    per_program,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    REVERSE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's gradient is complete WIDTH - 1 tokens later, so the walk goes on for as many."""
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
    weights, bias = _filter(WEIGHT, BIAS, c, channels, WIDTH)
    window = _before(
        X, INITIAL, ORDER, STARTS, b, begin, count, tokens, x_token, c, channels, WIDTH, REVERSE
    )
    zero = tl.zeros((BLOCK,), tl.float32)
    waiting, linked, dweight = (), (), ()  # gradients of the window; whether it is of this sequence
    for _ in tl.static_range(WIDTH - 1):
        waiting, linked = waiting + (zero,), linked + (begin >= 0,)
    for _ in tl.static_range(WIDTH):
        dweight = dweight + (zero,)
    dbias = zero
    for first in range(begin, end + WIDTH - 1, UNROLL):
        rows, slopes, places = (), (), ()
        for j in tl.static_range(UNROLL):
            s = first + j
            t = _token(ORDER, b, s, tokens, REVERSE)
            real = (s < end + WIDTH - 1) & (s < count) & (c < channels)
            rows = rows + (tl.load(X + t * x_token + c, mask=real, other=0.0),)
            slopes = slopes + (tl.load(DY + t * dy_token + c, mask=real, other=0.0),)
            places = places + (t,)
        for j in tl.static_range(UNROLL):
            s = first + j
            if STARTS is not None:
                start = tl.load(STARTS + b * tokens + places[j], mask=s < count, other=0) != 0
                window = _cut(window, start)
                kept = ()
                for i in tl.static_range(WIDTH - 1):
                    kept = kept + (linked[i] & (start == 0),)
                linked = kept
            taps = window + (rows[j].to(tl.float32),)
            slope = slopes[j].to(tl.float32)
            if SILU:
                y = _convolve(taps, weights, bias)
                gate = tl.sigmoid(y)
                slope *= gate * (1 + y * (1 - gate))
            own = tl.where(s < end, slope, 0.0)
            dbias += own
            grads, sums = (), ()
            for k in tl.static_range(WIDTH):
                sums = sums + (dweight[k] + own * taps[k],)
                part = slope * weights[k]
                if k == WIDTH - 1:
                    grads = grads + (part,)
                elif STARTS is not None:
                    grads = grads + (waiting[k] + tl.where(linked[k], part, 0.0),)
                else:
                    grads = grads + (waiting[k] + part,)
            dweight = sums
            done = s - (WIDTH - 1)
            inside = (done >= begin) & (done < end)
            at = DX + _token(ORDER, b, done, tokens, REVERSE) * channels + c
            tl.store(at, grads[0].to(DX.dtype.element_ty), mask=inside & (c < channels))
            if DINITIAL is not None:
                at = DINITIAL + (b * (WIDTH - 1) + s) * channels + c
                mask = (done < 0) & (c < channels)
                tl.store(at, grads[0].to(DINITIAL.dtype.element_ty), mask=mask & (begin == 0))
            window, waiting = taps[1:], grads[1:]
            linked = linked[1:] + (begin >= 0,) if WIDTH > 1 else ()
    SUMS += row * (WIDTH + 1) * channels + c
    for k in tl.static_range(WIDTH):
        tl.store(SUMS + k * channels, dweight[k], mask=c < channels)
    tl.store(SUMS + WIDTH * channels, dbias, mask=c < channels)


def configurations() -> Iterator[Configuration]:
    """Every block of channels and every option that changes a kernel's course."""
    every = {"BIAS", "INITIAL", "ORDER", "COUNT", "STARTS"}
    cases = [
        (dtype, channels, width, {"BIAS"}, False)
        for dtype in (torch.float32, torch.bfloat16)
        for channels, width in ((256, 4), (4096, 2), (4096, 4), (4096, 8))
    ]
    cases += [
        (torch.float16, 4096, 4, {"BIAS"}, True),
        (torch.bfloat16, 4096, 1, set(), False),
        (torch.bfloat16, 4096, 4, every, False),
        (torch.bfloat16, 4096, 8, every, False),
        (torch.float32, 4096, 4, every, True),
        (torch.float32, 4096, 8, every, True),
    ]
    for dtype, channels, width, given, reverse in cases:
        options = " all options" if given == every else ""
        name = f"{channels} channels, width {width}, {TYPE_NAMES[dtype]}{options}"
        for kernel, shape in (
            (_forward_kernel, _shape_of_forward),
            (_backward_kernel, _shape_of_backward),
        ):
            block, warps = shape(channels, width, dtype)
            direction = kernel.__name__.removeprefix("_").removesuffix("_kernel")
            yield Configuration(
                kernel,
                f"causal_conv1d {direction}, {name}",
                *_arguments(kernel, dtype, given, width, reverse, block),
                num_warps=warps,
                launch_warps=True,
            )


def _arguments(
    kernel: Any, dtype: torch.dtype, given: set[str], width: int, reverse: bool, block: int
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    types = {"WEIGHT": "*fp32", "BIAS": "*fp32", "ORDER": "*i64", "COUNT": "*i64"}
    types |= {"STARTS": "*u8", "SUMS": "*fp32"}
    constants: dict[str, Any] = {"WIDTH": width, "SILU": True, "REVERSE": reverse}
    constants |= {"UNROLL": _UNROLL, "BLOCK": block}
    optional = {"BIAS", "INITIAL", "ORDER", "COUNT", "STARTS"}
    if "INITIAL" not in given:
        constants["DINITIAL"] = None
    constants |= dict.fromkeys(optional - given)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {
        name: types.get(name, f"*{TYPE_NAMES[dtype]}" if name.isupper() else "i32")
        for name in kernel.arg_names
        if name not in constants
    }
    free = {"tokens", "per_program", "ORDER", "COUNT", "STARTS"}
    return signature, constants, tuple(name for name in signature if name not in free)
