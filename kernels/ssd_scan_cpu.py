"""The scan of Mamba-2 compiled for the CPU: `ssd_scan_cpu.cpp` as a PyTorch op.

The exponential of a decay, exp(a), has a relative error below (2 + 2 |a|) · 1e-7 in float32; it is
0 below the normal numbers. Deterministic, whatever the number of threads. Extra memory beyond
results and gradients: about a MB per thread; if a gradient will be asked for, the state at the
start of every chunk of Q tokens, N / Q times x's size; in backward one state's gradient, and each
tile's share in the gradients of B and C, for one chunk.

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
    dtype = compute_dtype(*floating)
    wide = [None if t is None else t.to(dtype) for t in floating]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wide)
    flags = softplus, reverse, chunk_size
    y, final_state, _ = _ops.ssd_scan_cpu(*wide, mask, starts, *flags, keep)
    return y.to(x.dtype), final_state


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
    if initial_state is not None and initial_state.stride(-1) != 1:
        initial_state = initial_state.contiguous()
    results = _empty_results(x, B, chunk_size, keep)
    y, final_state, states = results
    if y.numel() == 0:
        final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        return results
    scan = _scan(
        *(x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts),
        *(softplus, reverse, chunk_size),
    )
    scan.y, scan.final_state = array(y), array(final_state)
    scan.states = array(states if keep else None)
    cpu_extension.run(_LIBRARY, "ssd", "forward", x.dtype, [scan])
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
    grads = _empty_gradients(x, delta, A, B, D, z, initial_state)
    dx, ddelta, dA, dB, dC, dD, dz, dbias, _ = grads
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        return _passed_on(grads, dfinal)
    scan = _scan(
        *(x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts),
        *(softplus, reverse, chunk_size),
    )
    rows, heads, width = x.shape[0], *x.shape[2:]
    padded = cpu_extension.load(_LIBRARY).brickwork_ssd_padded(ctypes.byref(scan))
    dstate = x.new_zeros(rows, heads, scan.state, padded)
    if dfinal is not None:
        dstate[..., :width] = dfinal.mT
    sums = x.new_zeros(rows, heads, width + 2)
    tasks = rows * scan.groups * -(-(heads // scan.groups) // scan.tile)
    shares = x.new_empty(2, tasks, scan.chunk, scan.state)
    scan.states, scan.dy, scan.dstate = array(states), array(dy), array(dstate)
    scan.dx, scan.ddelta, scan.dB, scan.dC = map(array, (dx, ddelta, dB, dC))
    scan.dz = array(None if z is None else dz)
    scan.sums, scan.shares = array(sums), array(shares)
    cpu_extension.run(_LIBRARY, "ssd", "backward", x.dtype, [scan])
    for row in sums[1:]:  # one after the other: the order of a sum must not depend on threads
        sums[0] += row
    skips = sums[0, :, :width]
    dD.copy_(skips if dD.dim() == 2 else skips.sum(-1))
    dA.copy_(sums[0, :, -2])
    dbias.copy_(sums[0, :, -1])
    return _passed_on(grads, dstate[..., :width].mT)


def _passed_on(grads: Any, dstate: Tensor | None) -> Any:
    """The gradients, the last of them filled with what arrives in front of the first token."""
    if grads[-1].numel() and dstate is not None:
        grads[-1].copy_(dstate)
    return grads


def _empty_results(
    x: Tensor, B: Tensor, chunk_size: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With an axis of chunks alone torch.compile would tell programs with one from others."""
    (rows, tokens, heads, width), state = x.shape, B.shape[3]
    chunks = -(-tokens // chunk_size) if keep else 0
    like: Any = {"dtype": x.dtype, "device": x.device}
    return (
        torch.empty(x.shape, **like),
        torch.empty(rows, heads, width, state, **like),
        torch.empty(rows, heads, chunks * state, width, **like),
    )


def _empty_gradients(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of what is absent, gradients that nobody asks for: of D one, of z and the state none."""
    like: Any = {"dtype": x.dtype, "device": x.device}
    shapes = (
        *(x.shape, delta.shape, A.shape, B.shape, B.shape),
        A.shape if D is None else D.shape,
        (0,) if z is None else x.shape,
        A.shape,
        (0,) if initial_state is None else initial_state.shape,
    )
    dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial = (torch.empty(s, **like) for s in shapes)
    return dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial


def _fake_forward(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, *others: Any) -> Any:
    return _empty_results(x, B, *others[-2:])


def _fake_backward(dy: Any, dfinal: Any, states: Tensor, *inputs: Any) -> Any:
    x, delta, A, B, _, D, z, _, initial_state, *_ = inputs
    return _empty_gradients(x, delta, A, B, D, z, initial_state)


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
) -> Any:
    """The struct with sizes and inputs; the tensors must outlive it."""
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
