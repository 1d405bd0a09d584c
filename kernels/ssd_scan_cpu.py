"""The scan of Mamba-2 compiled for the CPU: `ssd_scan_cpu.cpp` as a PyTorch op.

The exponential of a decay, exp(a), has a relative error below (2 + 2 |a|) · 1e-7 in float32; it is
0 below the normal numbers. Deterministic, whatever the number of threads. No number of a packed
sequence meets one of another, so that NaN stays in its sequence.

Extra memory beyond results and gradients: half a MB per thread, and for chunks longer than the
default 64 tokens 7 Q² numbers; if a gradient will be asked for, the state at the start of every
chunk, max(N / Q, N / T) times x's size; in backward the gradient of one state, and each tile's
share in the gradients of B and C, for one chunk. Inputs of half precision are widened for the time
of a call, not until backward.

H heads of width P, N state, Q tokens of a chunk.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import cpu_extension
from brickwork.kernels.backend import compute_dtype, why_not_opaque
from brickwork.kernels.cpu_extension import Array, array

_LIBRARY = "ssd_scan_cpu"
_TILE = 4  # heads that one thread takes at a time; fixed, so that sums do not depend on threads


def unavailable_here() -> str | None:
    """Why the compiled scan cannot run on this machine, or None; builds it if need be."""
    return cpu_extension.unavailable(_LIBRARY)


def why_not(x: Tensor, B: Tensor) -> str | None:
    """Why the compiled scan cannot run now on tensors like x and B, or None."""
    if x.device.type != "cpu":
        return f"it takes CPU tensors, got {x.device.type}"
    if B.shape[-1] == 0:
        return "it takes a state of at least 1"
    return why_not_opaque() or unavailable_here()


def ssd_scan_cpu(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    softplus: bool,
    reverse: bool,
    mask: Tensor | None,
    starts: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """`ssd_scan` for checked arguments, with sequence starts."""
    floating = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floating)
    flags = softplus, reverse, chunk_size
    y, final_state, _ = _ops.ssd_scan_cpu(*floating, mask, starts, *flags, keep)
    return y, final_state


def _forward(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    softplus: bool,
    reverse: bool,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state and, if `keep`, the states (B, H, chunks · N, P) where a chunk starts."""
    floating = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    results = _empty_results(floating, chunk_size, keep)
    y, final_state, states = results
    if y.numel() == 0:
        final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        return results
    wide = _widened(floating)
    if initial_state is not None and wide[8].stride(-1) != 1:
        wide[8] = wide[8].contiguous()
    scan = _scan(wide, mask, starts, softplus, reverse, chunk_size)
    wide_y = y if y.dtype == final_state.dtype else y.to(final_state.dtype)
    scan.y, scan.final_state = array(wide_y), array(final_state)
    scan.states = array(states if keep else None)
    cpu_extension.run(_LIBRARY, "ssd", "forward", final_state.dtype, [scan])
    if wide_y is not y:
        y.copy_(wide_y)
    return results


def _backward(
    dy: Tensor | None,
    dfinal: Tensor | None,
    states: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    softplus: bool,
    reverse: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, delta, A, B, C, D, z, delta_bias and initial_state, in this order."""
    floating = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    grads = _empty_gradients(floating)
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        if initial_state is not None and dfinal is not None:
            grads[-1].copy_(dfinal)
        return grads
    dtype = states.dtype
    wide = _widened(floating)
    scan = _scan(wide, mask, starts, softplus, reverse, chunk_size)
    of_tokens = [grads[i].to(dtype) for i in (0, 1, 3, 4, 6)]  # the same where they are wide
    dy = None if dy is None else dy.to(dtype)
    (rows, _, heads, width), state = x.shape, B.shape[3]
    dstate = states.new_zeros(rows, heads, state, width)
    if dfinal is not None:
        dstate.copy_(dfinal.mT)
    sums = states.new_zeros(rows, heads, width + 2, dtype=torch.float64)
    tasks = rows * scan.groups * -(-(heads // scan.groups) // scan.tile)
    shares = states.new_empty(2, tasks, scan.chunk, state)
    scan.states, scan.dy, scan.dstate = array(states), array(dy), array(dstate)
    scan.dx, scan.ddelta, scan.dB, scan.dC, scan.dz = map(array, of_tokens)
    scan.sums, scan.shares = array(sums), array(shares)
    cpu_extension.run(_LIBRARY, "ssd", "backward", dtype, [scan])
    total = cpu_extension.add_rows(sums)
    dD = total[:, :width]
    per_head = (total[:, -2], dD if D is None or D.dim() == 2 else dD.sum(-1), total[:, -1])
    for grad, found in zip(grads, _in_order(of_tokens, per_head, dstate.mT)):
        if grad.numel() and grad is not found:
            grad.copy_(found)
    return grads


def _in_order(of_tokens: Any, per_head: Any, dinitial: Tensor) -> tuple[Tensor, ...]:
    (dx, ddelta, dB, dC, dz), (dA, dD, dbias) = of_tokens, per_head
    return dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial


def _widened(floating: tuple[Tensor | None, ...]) -> list[Any]:
    dtype = compute_dtype(*floating)
    return [None if t is None else t.to(dtype) for t in floating]


def _empty_results(floating: Any, chunk_size: int, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """With an axis of chunks alone torch.compile would tell programs with one from others."""
    x, state = floating[0], floating[3].shape[3]
    rows, tokens, heads, width = x.shape
    chunks = -(-tokens // chunk_size) if keep else 0
    dtype = compute_dtype(*floating)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(rows, heads, width, state, dtype=dtype, device=x.device),
        torch.empty(rows, heads, chunks * state, width, dtype=dtype, device=x.device),
    )


def _empty_gradients(
    floating: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Contiguous; without numbers for what is absent."""
    like = floating[0]
    dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial = (
        like.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in floating
    )
    return dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial


def _fake_forward(*arguments: Any) -> Any:
    return _empty_results(arguments[:9], *arguments[-2:])


def _fake_backward(dy: Any, dfinal: Any, states: Tensor, *inputs: Any) -> Any:
    return _empty_gradients(inputs[:9])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softplus, ctx.reverse, ctx.chunk_size, _ = inputs
    ctx.save_for_backward(output[2], *tensors)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Any, ...]:
    states, *tensors = ctx.saved_tensors
    flags = ctx.softplus, ctx.reverse, ctx.chunk_size
    if states.numel() == 0:  # the forward pass did not know that a gradient would be asked for
        states = _ops.ssd_scan_cpu(*tensors, *flags, True)[2]
    grads = _ops.ssd_scan_cpu_backward(dy, dfinal, states, *tensors, *flags)
    wanted = [g if t is not None else None for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None, None, None)


cpu_extension.register(
    "ssd_scan", _forward, _fake_forward, _backward, _fake_backward, _setup_context, _gradients
)
_ops = torch.ops.brickwork


_SIZES = "batch tokens heads width groups state chunk tile threads softplus reverse"
_ARRAYS = (
    "x delta A B C D z delta_bias mask starts initial y final_state states scratch "
    "dy dx ddelta dB dC dz dstate sums shares"
)


class _Scan(ctypes.Structure):
    """The twin of `struct Scan` in the source."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _SIZES.split()) + tuple(
        (name, Array) for name in _ARRAYS.split()
    )


def _scan(
    wide: list[Any],
    mask: Tensor | None,
    starts: Tensor | None,
    softplus: bool,
    reverse: bool,
    chunk_size: int,
) -> Any:
    """The struct with sizes and inputs, widened; the tensors must outlive it."""
    x, delta, A, B, C, D, z, delta_bias, initial_state = wide
    scan: Any = _Scan()
    scan.batch, scan.tokens, scan.heads, scan.width = x.shape
    scan.groups, scan.state = B.shape[2:]
    scan.chunk = min(chunk_size, scan.tokens)
    scan.tile = min(_TILE, scan.heads // scan.groups)
    scan.threads = torch.get_num_threads()
    scan.softplus, scan.reverse = softplus, reverse
    scan.x, scan.delta, scan.A, scan.B, scan.C = map(array, (x, delta, A, B, C))
    if D is not None:
        scan.D = array(D if D.dim() == 2 else D[:, None].expand(-1, scan.width))
    scan.z, scan.delta_bias = array(z), array(delta_bias)
    scan.mask, scan.starts, scan.initial = map(array, (mask, starts, initial_state))
    return scan
