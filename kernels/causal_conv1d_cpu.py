"""`causal_conv1d` compiled for the CPU: `causal_conv1d_cpu.cpp` as a PyTorch op.

One pass over x in either direction, padding and packing included; x is read where it lies, as a
slice of a projection say, as long as its channels are contiguous. Backward computes the results
before the activation again and keeps nothing. Extra memory beyond results and gradients: a few
tens of KiB per thread, two integers a token, and in backward (W + 1) / 256 of x's size.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import cpu_extension
from brickwork.kernels.backend import compute_dtype, why_not_opaque
from brickwork.kernels.causal_conv1d import Activation
from brickwork.kernels.cpu_extension import Array, array

_LIBRARY = "causal_conv1d_cpu"
_BLOCK = 256  # tokens of a task; this and _TILE are fixed, so that sums do not depend on threads
_TILE = 256  # channels of a task


def unavailable_here() -> str | None:
    """Why the compiled convolution cannot run on this machine, or None; builds it if need be."""
    return cpu_extension.unavailable(_LIBRARY)


def why_not(x: Tensor) -> str | None:
    """Why the compiled convolution cannot run now on tensors like x, or None."""
    if x.device.type != "cpu":
        return f"it takes CPU tensors, got {x.device.type}"
    return why_not_opaque() or unavailable_here()


def causal_conv1d_cpu(
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
    dtype = compute_dtype(x, weight, bias, initial_state)
    wide = [None if t is None else t.to(dtype) for t in (x, weight, bias, initial_state)]
    silu = activation == "silu"
    return _ops.causal_conv1d_cpu(*wide, mask, starts, silu, reverse).to(x.dtype)


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
    y = _empty(x.shape, x) if mask is None else _empty(x.shape, x).zero_()
    if y.numel() == 0:
        return y
    x, state = dense(x), _tokens(initial_state)
    conv = conv_of(x, weight, bias, state, mask, starts, silu, reverse)
    conv.y = array(y)
    run("forward", [conv], x.dtype)
    return y


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and initial_state, in this order."""
    grads = _empty_gradients(x, weight)
    dx, dweight, dbias, dinitial = grads
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    if mask is not None:
        dx.zero_()
    x, dy, state = dense(x), dense(dy), _tokens(initial_state)
    conv = conv_of(x, weight, bias, state, mask, starts, silu, reverse)
    sums = set_gradients(conv, dy, dx, dinitial.mT)
    run("backward", [conv], x.dtype)
    copy_sums(sums, dweight, dbias)
    return grads


def _empty(size: Any, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=like.dtype, device=like.device)


def _empty_gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, _, channels), width = x.shape, weight.shape[1]
    return (
        _empty(x.shape, x),
        _empty(weight.shape, x),
        _empty((channels,), x),
        _empty((batch, width - 1, channels), x).mT,
    )


def _fake_forward(x: Tensor, *others: Any) -> Tensor:
    return _empty(x.shape, x)


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(x, weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = _ops.causal_conv1d_cpu_backward(dy, *tensors, ctx.silu, ctx.reverse)
    wanted = [g if t is not None else None for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None)


cpu_extension.register(
    "causal_conv1d", _forward, _fake_forward, _backward, _fake_backward, _setup_context, _gradients
)
_ops = torch.ops.brickwork


_SIZES = "batch tokens channels width block tile threads silu reverse second"
_ARRAYS = "x weight bias mask starts initial scratch y dy dx dinitial sums"


class _Conv(ctypes.Structure):
    """The twin of `struct Conv` in the source."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _SIZES.split()) + tuple(
        (name, Array) for name in _ARRAYS.split()
    )


def dense(tensor: Tensor) -> Tensor:
    """The same, with contiguous channels; no copy where they are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tokens(state: Tensor | None) -> Tensor | None:
    """A state (B, C, W - 1) as tokens (B, W - 1, C)."""
    return None if state is None else state.mT.contiguous()


def conv_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    reverse: bool,
) -> Any:
    """The struct with sizes and inputs, channels contiguous; the tensors must outlive it."""
    conv: Any = _Conv()
    conv.batch, conv.tokens, conv.channels = x.shape
    conv.width = weight.shape[1]
    conv.block = _BLOCK
    conv.tile = min(_TILE, -(-conv.channels // 16) * 16)
    conv.threads = torch.get_num_threads()
    conv.silu, conv.reverse = silu, reverse
    conv.x, conv.weight, conv.bias = map(array, (x, weight, bias))
    conv.mask, conv.starts, conv.initial = map(array, (mask, starts, state))
    return conv


def set_gradients(conv: Any, dy: Tensor, dx: Tensor, dinitial: Tensor | None) -> Tensor:
    """Where backward reads and writes; returns the sums that `copy_sums` takes."""
    blocks = -(-conv.tokens // conv.block)
    sums = _empty((conv.batch * blocks, conv.width + 1, conv.channels), dy)
    conv.dy, conv.dx, conv.dinitial, conv.sums = map(array, (dy, dx, dinitial, sums))
    return sums


def copy_sums(sums: Tensor, dweight: Tensor, dbias: Tensor) -> None:
    """The gradients of weight and bias."""
    dweight.copy_(sums[0, :-1].flip(0).mT)
    dbias.copy_(sums[0, -1])


def run(direction: str, convs: list[Any], dtype: torch.dtype) -> None:
    """Compute the convolutions, two of one x as one."""
    cpu_extension.run(_LIBRARY, "conv", direction, dtype, convs, ctypes.c_int64(len(convs)))
