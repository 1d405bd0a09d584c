"""`experts` compiled for the CPU: `experts_cpu.cpp` as a PyTorch op.

A thread takes some rows of one expert through both products, with the activation in between, and
then others: nobody waits between products, and a weight is read from memory once for up to 252
rows. The exponential in the logistic function of a gate g has a relative error below
(2 + 2 |g|) · 1e-7 in float32. Deterministic, and what a token gets depends neither on the other
tokens nor on the number of threads, to the last bit. Extra memory beyond results and gradients: one
row of C per choice and a few MB per thread; if a gradient will be asked for, gate and up (N, 2F);
in backward 3F more per choice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import cpu_extension
from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.checks import memory_is_all
from brickwork.kernels.cpu_extension import Array, array

_LIBRARY = "experts_cpu"


def unavailable_here() -> str | None:
    """Why the compiled experts cannot run on this machine, or None; builds them if need be."""
    return cpu_extension.unavailable(_LIBRARY)


def experts_cpu(
    x_SC: Tensor, gate_up_EFC: Tensor, down_ECF: Tensor, indices_SK: Tensor, weights_SK: Tensor
) -> Tensor:
    """`experts` for checked arguments."""
    dtype = compute_dtype(x_SC, gate_up_EFC, down_ECF, weights_SK)
    floating = [t.to(dtype) for t in (x_SC, gate_up_EFC, down_ECF, weights_SK)]
    x, gate_up, down, weights = floating
    train = torch.is_grad_enabled() and any(t.requires_grad for t in floating)
    inputs = (x, gate_up, down, indices_SK.long(), weights)
    plain = memory_is_all(*inputs)
    # Nothing to record for a compiler or for autograd: the op's own cost, tens of µs, is saved.
    run = _forward if plain and not train else _ops.experts_cpu
    return run(*inputs, train)[0].to(x_SC.dtype)


def _forward(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """y (S, C) and, if `keep`, gate and up (N, 2F), sorted by expert."""
    y, both = _fake_forward(x, gate_up, down, indices, weights, keep)
    if y.numel() == 0 or indices.numel() == 0:
        return y.zero_(), both
    tensors = _dense(x, gate_up, down, indices, weights)
    rows = x.new_empty(indices.numel(), x.shape[1])
    mixture = _mixture(*tensors)
    mixture.rows, mixture.y = array(rows), array(y)
    mixture.both = array(both if keep else None)
    _run("forward", mixture, x.dtype)
    return y, both


def _backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    both: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, gate_up, down and weights; those not wanted are empty."""
    grads = _fake_backward(dy, x, gate_up, down, indices, weights, both, wanted)
    if x.numel() == 0 or both.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    count, width = indices.numel(), x.shape[1]
    dy, *tensors = _dense(dy, x, gate_up, down, indices, weights)
    mixture = _mixture(*tensors)
    rows = x.new_empty(count if wanted[0] else 0, width)
    padded = cpu_extension.load(_LIBRARY).brickwork_experts_padded(ctypes.byref(mixture))
    dboth = x.new_empty(count if wanted[1] else 0, padded)
    scaled = x.new_empty(count if wanted[2] else 0, padded // 2)
    mixture.dy, mixture.both, mixture.rows = map(array, (dy, both, rows))
    mixture.dboth, mixture.scaled = array(dboth), array(scaled)
    mixture.dx, mixture.dgate_up, mixture.ddown, mixture.dweights = (
        array(grad if want else None) for grad, want in zip(grads, wanted)
    )
    _run("backward", mixture, x.dtype)
    return grads


def _fake_forward(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    count = indices.shape[0] * indices.shape[1] if keep else 0
    return x.new_empty(x.shape), x.new_empty(count, gate_up.shape[1])


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    both: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if wanted[0] else (0, x.shape[1])),
        x.new_empty(gate_up.shape if wanted[1] else (0, 0, 0)),
        x.new_empty(down.shape if wanted[2] else (0, 0, 0)),
        x.new_empty(weights.shape if wanted[3] else (0, weights.shape[1])),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    *tensors, both = ctx.saved_tensors
    if both.shape[0] == 0:  # the forward pass did not know that a gradient would be asked for
        both = _ops.experts_cpu(*tensors, True)[1]
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[2], needs[4]]
    found = _ops.experts_cpu_backward(dy, *tensors, both, wanted)
    dx, dgate_up, ddown, dweights = (grad if want else None for grad, want in zip(found, wanted))
    return dx, dgate_up, ddown, None, dweights, None


cpu_extension.register(
    "experts", _forward, _fake_forward, _backward, _fake_backward, _setup_context, _gradients
)
_ops = torch.ops.brickwork


_SIZES = "tokens width hidden experts chosen threads"
_ARRAYS = (
    "x gate_up down indices weights scratch rows both y dy dboth scaled dx dgate_up ddown dweights"
)


class _Mixture(ctypes.Structure):
    """The twin of `struct Mixture` in the source."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _SIZES.split()) + tuple(
        (name, Array) for name in _ARRAYS.split()
    )


def _dense(*tensors: Tensor) -> list[Tensor]:
    """The same, the last axis contiguous, a matrix of weights or indices wholly so."""
    *matrices, indices, weights = tensors
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in matrices]
    return [*rows, indices.contiguous(), weights.contiguous()]


def _mixture(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Any:
    """The struct with sizes and inputs; the tensors must outlive it."""
    mixture: Any = _Mixture()
    mixture.tokens, mixture.chosen = indices.shape
    mixture.experts, mixture.width, mixture.hidden = down.shape
    mixture.threads = torch.get_num_threads()
    mixture.x, mixture.gate_up, mixture.down = map(array, (x, gate_up, down))
    mixture.indices, mixture.weights = array(indices), array(weights)
    return mixture


def _run(direction: str, mixture: Any, dtype: torch.dtype) -> None:
    given = _LIBRARY, "experts", direction, dtype, [mixture]
    if not cpu_extension.run(*given, returns=ctypes.c_bool):
        raise ValueError(f"indices must be in [0, {mixture.experts}), the experts")
