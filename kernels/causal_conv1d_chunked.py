"""`causal_conv1d` in PyTorch, one pass through the cache, with a hand-written backward.

A chunk of tokens takes all its taps, its bias and its activation while it is in the cache, in
memory order for both directions. Padding on the sides is masked where it lies; only padding
between real tokens, or in front of them with an initial state, is moved out of the way first.

B batch, T tokens, C channels, W width, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.causal_conv1d import Activation, starts_within
from brickwork.kernels.sequences import scan_order, take_tokens

ELEMENTS = 2**17  # of a chunk a thread: it stays in the second-level cache


def causal_conv1d_chunked(
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
    return _forward(x, weight, bias, initial_state, mask, starts, activation == "silu", reverse)


class _Taps:
    """What each tap of a chunk reads: tokens of x, and of the state before them."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        starts: Tensor | None,
        reverse: bool,
    ) -> None:
        self.x, self.T, self.W, self.reverse = x, x.shape[1], weight.shape[1], reverse
        self.dtype = compute_dtype(x, weight, bias, state)
        self.weight = weight.to(self.dtype).mT.contiguous()
        self.bias = x.new_zeros(x.shape[2], dtype=self.dtype) if bias is None else bias
        self.state = x[:, :0] if state is None else state.to(x.dtype).mT
        if reverse:
            self.state = self.state.flip(1)  # in memory order, like x
        self.crossing = [
            None if starts is None else starts_within(starts, k, reverse)[..., None]
            for k in range(self.W)
        ]

    def chunks(self) -> Iterator[slice]:
        Q = max(1, ELEMENTS * torch.get_num_threads() // max(1, self.x.shape[0] * self.x.shape[2]))
        return iter(slice(t, min(t + Q, self.T)) for t in range(0, self.T, Q))

    def reads(self, at: slice) -> Iterator[tuple[int, slice, bool, slice]]:
        """For each tap k and source: k, tokens of the chunk, whether x is read, tokens read."""
        # where the axis of x continues into the state, and the state's first index there
        low, high, origin = (0, self.T, self.T) if self.reverse else (0, self.T, 1 - self.W)
        for k in range(self.W):
            shift = k if self.reverse else -k
            inside = slice(max(at.start, low - shift), min(at.stop, high - shift))
            beyond = slice(inside.stop, at.stop) if self.reverse else slice(at.start, inside.start)
            beyond = slice(max(beyond.start, at.start), min(beyond.stop, at.stop))
            if inside.start < inside.stop:
                yield k, inside, True, slice(inside.start + shift, inside.stop + shift)
            if beyond.start < beyond.stop and self.state.shape[1]:
                first = beyond.start + shift - origin
                yield k, beyond, False, slice(first, first + beyond.stop - beyond.start)

    def keep(self, values: Tensor, k: int, tokens: slice) -> Tensor:
        """`values` of tap k, 0 where a sequence starts in between."""
        crossing = self.crossing[k]
        return values if crossing is None else values.masked_fill(crossing[:, tokens], 0)

    def convolve(self, at: slice, out: Tensor) -> None:
        """The chunk's results before the activation, into `out`."""
        out.copy_(self.bias)
        for k, tokens, inside, source in self.reads(at):
            values = (self.x if inside else self.state)[:, source].to(self.dtype)
            part = out[:, tokens.start - at.start : tokens.stop - at.start]
            part.addcmul_(self.keep(values, k, tokens), self.weight[self.W - 1 - k])


class _Gathered:
    """Padding out of the way: zeros in x where it is, or the real tokens together in scan order."""

    def __init__(
        self,
        x: Tensor,
        state: Tensor | None,
        mask: Tensor | None,
        starts: Tensor | None,
        reverse: bool,
    ) -> None:
        self.mask = mask
        self.order = None
        if mask is not None and (state is not None or not _on_the_sides(mask)):
            self.order = scan_order(mask, reverse=reverse)
            starts = None if starts is None else starts.gather(1, self.order)
            reverse = False
        self.x, self.starts, self.reverse = self.gather(x), starts, reverse

    def gather(self, tensor: Tensor) -> Tensor:
        if self.mask is not None:
            tensor = tensor.masked_fill(~self.mask[..., None], 0)
        return tensor if self.order is None else take_tokens(tensor, self.order)

    def scatter(self, tensor: Tensor) -> Tensor:
        """Back to where the tokens were; may overwrite its argument."""
        if self.order is not None:
            tensor = take_tokens(tensor, self.order.argsort(1))
        return tensor if self.mask is None else tensor.masked_fill_(~self.mask[..., None], 0)


def _on_the_sides(mask: Tensor) -> bool:
    """Whether each row's real tokens stand together."""
    if mask.shape[1] == 0:
        return True
    beginnings = mask & ~pad(mask[:, :-1], (1, 0))
    return bool((beginnings.sum(1) <= 1).all())


@torch.library.custom_op("brickwork::causal_conv1d_chunked", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    reverse: bool,
) -> Tensor:
    tokens = _Gathered(x, initial_state, mask, starts, reverse)
    taps = _Taps(tokens.x, weight, bias, initial_state, tokens.starts, tokens.reverse)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for at in taps.chunks():
        narrow = y[:, at]
        out = narrow if y.dtype == taps.dtype else torch.empty_like(narrow, dtype=taps.dtype)
        taps.convolve(at, out)
        if silu:
            torch.nn.functional.silu(out, inplace=True)
        if out is not narrow:
            narrow.copy_(out)
    return tokens.scatter(y)


@_forward.register_fake
def _(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("brickwork::causal_conv1d_chunked_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    reverse: bool,
) -> list[Tensor]:
    tokens = _Gathered(x, initial_state, mask, starts, reverse)
    taps = _Taps(tokens.x, weight, bias, initial_state, tokens.starts, tokens.reverse)
    dy = tokens.gather(dy)
    dx, dstate = (torch.zeros(t.shape, dtype=taps.dtype, device=x.device) for t in (x, taps.state))
    dweight, dbias = torch.zeros_like(taps.weight), torch.zeros_like(taps.weight[0])
    for at in taps.chunks():
        dout = dy[:, at].to(taps.dtype)
        if silu:
            out = torch.empty_like(dout)
            taps.convolve(at, out)
            dout = torch.ops.aten.silu_backward(dout, out)
        dbias += dout.sum((0, 1))
        for k, here, inside, source in taps.reads(at):
            part = dout[:, here.start - at.start : here.stop - at.start]
            part = taps.keep(part, k, here)
            (dx if inside else dstate)[:, source].addcmul_(part, taps.weight[taps.W - 1 - k])
            values = (taps.x if inside else taps.state)[:, source]
            dweight[taps.W - 1 - k] += (part * values).sum((0, 1))
    grads = [tokens.scatter(dx).to(x.dtype), dweight.mT.to(weight.dtype, copy=True)]
    if bias is not None:
        grads.append(dbias.to(bias.dtype))
    if initial_state is not None:
        dstate = dstate.flip(1) if taps.reverse else dstate
        grads.append(dstate.mT.to(initial_state.dtype, copy=True))
    return [grad.contiguous() for grad in grads]


@_backward.register_fake
def _(dy: Tensor, *arguments: Any) -> list[Tensor]:
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in arguments[:4] if t is not None
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = iter(_backward(dy, *tensors, *ctx.options))
    return tuple(None if t is None else next(found) for t in tensors[:4]) + (None,) * 4


_forward.register_autograd(_differentiate, setup_context=_setup)
