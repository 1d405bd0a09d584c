"""Both convolutions of a bidirectional mixer in one call of the compiled kernel.

The task of a thread is a block of tokens and a tile of channels in both directions, one after the
other: x, and in backward the sum of its two gradients, is in the cache for the second. Memory as in
`causal_conv1d_cpu`, with one gradient of x instead of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import cpu_extension
from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.bidirectional_conv1d import Filter
from brickwork.kernels.causal_conv1d import Activation
from brickwork.kernels.causal_conv1d_cpu import (
    conv_of,
    copy_sums,
    dense,
    run,
    set_gradients,
    unavailable_here,
)
from brickwork.kernels.cpu_extension import array

__all__ = ["bidirectional_conv1d_cpu", "unavailable_here"]


def bidirectional_conv1d_cpu(
    x: Tensor,
    forward: Filter,
    backward: Filter,
    activation: Activation,
    mask: Tensor | None,
    starts: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """`bidirectional_conv1d` for checked arguments, with the starts of sequences both ways."""
    dtype = compute_dtype(x, *forward, *backward)
    wide = [None if t is None else t.to(dtype) for t in (x, *forward, *backward)]
    y, y_back = _ops.bidirectional_conv1d_cpu(*wide, mask, *starts, activation == "silu")
    return y.to(x.dtype), y_back.to(x.dtype)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_back: Tensor,
    bias_back: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    starts_back: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    results = _fake_forward(x)
    if mask is not None:
        results = results[0].zero_(), results[1].zero_()
    if x.numel() == 0:
        return results
    x = dense(x)
    convs = _both(x, weight, bias, weight_back, bias_back, mask, starts, starts_back, silu)
    for conv, y in zip(convs, results):
        conv.y = array(y)
    run("forward", convs, x.dtype)
    return results


def _backward(
    dy: Tensor,
    dy_back: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_back: Tensor,
    bias_back: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    starts_back: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x and, each way, of weight and bias."""
    grads = dx, dweight, dbias, dweight_back, dbias_back = _fake_backward(dy, dy_back, x, weight)
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    if mask is not None:
        dx.zero_()
    x, dy, dy_back = dense(x), dense(dy), dense(dy_back)
    convs = _both(x, weight, bias, weight_back, bias_back, mask, starts, starts_back, silu)
    sums = [set_gradients(conv, g, dx, None) for conv, g in zip(convs, (dy, dy_back))]
    run("backward", convs, x.dtype)
    copy_sums(sums[0], dweight, dbias)
    copy_sums(sums[1], dweight_back, dbias_back)
    return grads


def _both(x: Tensor, *arguments: Any) -> list[Any]:
    weight, bias, weight_back, bias_back, mask, starts, starts_back, silu = arguments
    convs = [
        conv_of(x, weight, bias, None, mask, starts, silu, False),
        conv_of(x, weight_back, bias_back, None, mask, starts_back, silu, True),
    ]
    convs[1].second = 1
    return convs


def _empty(size: Any, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=like.dtype, device=like.device)


def _fake_forward(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty(x.shape, x), _empty(x.shape, x)


def _fake_backward(
    dy: Tensor, dy_back: Tensor, x: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels = weight.shape[:1]
    return (
        _empty(x.shape, x),
        _empty(weight.shape, x),
        _empty(channels, x),
        _empty(weight.shape, x),
        _empty(channels, x),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dy_back: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    if dy is not None and dy_back is not None:
        grads = _ops.bidirectional_conv1d_cpu_backward(dy, dy_back, *tensors, ctx.silu)
    else:
        grads = _of_one(dy, dy_back, *tensors, ctx.silu)
    wanted = [g if t is not None else None for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None)


def _of_one(dy: Tensor | None, dy_back: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    """The gradients where only one result was used: as of that convolution alone."""
    x, weight, bias, weight_back, bias_back, mask, starts, starts_back, silu = arguments
    single = _ops.causal_conv1d_cpu_backward
    if dy is not None:
        dx, *own, _ = single(dy, x, weight, bias, None, mask, starts, silu, False)
        return dx, *own, None, None
    if dy_back is not None:
        dx, *own, _ = single(
            dy_back, x, weight_back, bias_back, None, mask, starts_back, silu, True
        )
        return dx, None, None, *own
    return None, None, None, None, None


cpu_extension.register(
    "bidirectional_conv1d",
    _forward,
    _fake_forward,
    _backward,
    _fake_backward,
    _setup_context,
    _gradients,
)
_ops = torch.ops.brickwork
