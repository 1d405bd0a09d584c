"""The selective scan compiled for the CPU: `selective_scan_cpu.cpp` as a PyTorch op.

The exponential of a decay, exp(Δ A), has a relative error below (2 + 2 |Δ A|) · 1e-7 in float32; it
is 0 below the normal numbers. Extra memory beyond results and gradients: a few hundred KiB per
thread; if a gradient will be asked for, the state at the start of every chunk of tokens (a quarter
of x's size up to N = 64); in backward each tile's share in the gradients of B and C, for one chunk.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import cpu_extension
from brickwork.kernels.backend import compute_dtype, why_not_opaque
from brickwork.kernels.cpu_extension import Array, array

_LIBRARY = "selective_scan_cpu"
_BLOCK = 4  # as in the source
_TILE = 64  # channels that one thread takes at a time; fixed, so that sums do not depend on threads


def unavailable_here() -> str | None:
    """Why the compiled scan cannot run on this machine, or None; builds it if need be."""
    return cpu_extension.unavailable(_LIBRARY)


def why_not(x: Tensor) -> str | None:
    """Why the compiled scan cannot run now on tensors like x, or None."""
    if x.device.type != "cpu":
        return f"it takes CPU tensors, got {x.device.type}"
    return why_not_opaque() or unavailable_here()


def selective_scan_cpu(
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
) -> tuple[Tensor, Tensor]:
    """`selective_scan` for checked arguments, with B and C (B, T, G, N) and sequence starts."""
    floating = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    dtype = compute_dtype(*floating)
    wide = [None if t is None else t.to(dtype) for t in floating]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wide)
    y, final_state, _ = _ops.selective_scan_cpu(*wide, mask, starts, softplus, reverse, keep)
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
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state and, if `keep`, the states (B, chunks · N, E) where a chunk starts."""
    y, final_state, states = _empty_results(x, A, keep)
    if y.numel() == 0:
        if initial_state is None:
            return y, final_state.zero_(), states
        return y, final_state.copy_(initial_state), states
    scan = scan_of(
        x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts, softplus, reverse
    )
    set_results(scan, y, final_state, states)
    run("forward", [scan], x.dtype)
    return y, final_state, states


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, delta, A, B, C, D, z, delta_bias and initial_state, in this order."""
    grads = _empty_gradients(x, A, B, z)
    dx, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial = grads
    dstate = dinitial.mT
    dstate.zero_() if dfinal is None else dstate.copy_(dfinal.mT)
    if x.numel() == 0:
        for grad in (dA, dB, dC, dD, ddelta_bias):
            grad.zero_()
        return grads
    scan = scan_of(
        x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts, softplus, reverse
    )
    scan.dz = array(None if z is None else dz)
    sums, _shares = set_gradients(scan, dy, states, (dx, ddelta, dB, dC), dstate)
    run("backward", [scan], x.dtype)
    add_rows(sums, dA, dD, ddelta_bias)
    return grads


def _empty_results(x: Tensor, A: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, channels = x.shape
    like: Any = {"dtype": x.dtype, "device": x.device}
    final_state = torch.empty(rows, channels, A.shape[1], **like)
    return torch.empty(x.shape, **like), final_state, empty_states(x, A, keep)


def empty_states(x: Tensor, A: Tensor, keep: bool) -> Tensor:
    """Room for the states where a chunk starts, (B, chunks · N, E), or for none.

    With an axis of chunks alone torch.compile would tell programs with one chunk from others.
    """
    (rows, tokens, channels), state = x.shape, A.shape[1]
    chunks = -(-tokens // _chunk(state)) if keep else 0
    return torch.empty(rows, chunks * state, channels, dtype=x.dtype, device=x.device)


def _empty_gradients(
    x: Tensor, A: Tensor, B: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, channels, state = x.shape[0], x.shape[2], A.shape[1]
    like: Any = {"dtype": x.dtype, "device": x.device}
    return (
        torch.empty(x.shape, **like),
        torch.empty(x.shape, **like),
        torch.empty(channels, state, **like),
        torch.empty(B.shape, **like),
        torch.empty(B.shape, **like),
        torch.empty(channels, **like),
        torch.empty(0 if z is None else x.shape, **like),
        torch.empty(channels, **like),
        torch.empty(rows, state, channels, **like).mT,
    )


def _fake_forward(
    x: Tensor, delta: Tensor, A: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(x, A, others[-1])


def _fake_backward(dy: Any, dfinal: Any, states: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    x, _, A, B, _, _, z, *_ = inputs
    return _empty_gradients(x, A, B, z)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softplus, ctx.reverse, _ = inputs
    ctx.save_for_backward(output[2], *tensors)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Any, ...]:
    states, *tensors = ctx.saved_tensors
    flags = ctx.softplus, ctx.reverse
    if states.numel() == 0:  # the forward pass did not know that a gradient would be asked for
        states = _ops.selective_scan_cpu(*tensors, *flags, True)[2]
    grads = _ops.selective_scan_cpu_backward(dy, dfinal, states, *tensors, *flags)
    wanted = [g if t is not None else None for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None, None)


cpu_extension.register(
    "selective_scan", _forward, _fake_forward, _backward, _fake_backward, _setup_context, _gradients
)
_ops = torch.ops.brickwork


_SIZES = "batch tokens channels groups state chunk tile threads softplus reverse part"
_ARRAYS = (
    "x delta A B C D z delta_bias mask starts initial y final_state states scratch "
    "dy dx ddelta dB dC dz dstate sums shares"
)


class _Scan(ctypes.Structure):
    """The twin of `struct Scan` in the source."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _SIZES.split()) + tuple(
        (name, Array) for name in _ARRAYS.split()
    )


def _chunk(state: int) -> int:
    """Tokens between kept states: the more states, the more tokens, while the cache holds them.

    A multiple of 4, as _BLOCK of them are vectors of at most 16.
    """
    return min(max(64, 4 * state), 256)


def scan_of(
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
) -> Any:
    """The struct with sizes and inputs; the tensors must outlive it."""
    scan: Any = _Scan()
    scan.batch, scan.tokens, scan.channels = x.shape
    scan.groups, scan.state = B.shape[2:]
    scan.chunk = _chunk(scan.state)
    scan.tile = min(_TILE, -(-(scan.channels // scan.groups) // 16) * 16)
    scan.threads = torch.get_num_threads()
    scan.softplus, scan.reverse = softplus, reverse
    scan.x, scan.delta, scan.A, scan.B, scan.C = map(array, (x, delta, A, B, C))
    scan.D, scan.z, scan.delta_bias = map(array, (D, z, delta_bias))
    scan.mask, scan.starts, scan.initial = map(array, (mask, starts, initial_state))
    return scan


def set_results(scan: Any, y: Tensor, final_state: Tensor, states: Tensor) -> None:
    """Where forward writes; states of no chunk are not kept."""
    scan.y, scan.final_state = array(y), array(final_state)
    scan.states = _by_chunks(states, scan)


def _by_chunks(states: Tensor, scan: Any) -> Array:
    return array(states.unflatten(1, (-1, scan.state))) if states.shape[1] else Array()


def set_gradients(
    scan: Any, dy: Tensor | None, states: Tensor, grads: tuple[Tensor, ...], dstate: Tensor
) -> tuple[Tensor, Tensor]:
    """Where backward reads and writes, `grads` being those of x, delta, B and C.

    Returns the sums that `add_rows` takes and the tiles' shares, which must live as long.
    """
    like: Any = {"dtype": states.dtype, "device": states.device}
    tasks = scan.batch * scan.groups * -(-(scan.channels // scan.groups) // scan.tile)
    sums = torch.zeros(scan.batch, scan.state + 2, scan.channels, **like)
    shares = torch.empty(2, tasks, -(-scan.state // _BLOCK), scan.chunk * _BLOCK, **like)
    scan.states = _by_chunks(states, scan)
    scan.dy, scan.dstate, scan.sums = map(array, (dy, dstate, sums))
    scan.dx, scan.ddelta, scan.dB, scan.dC = map(array, grads)
    scan.shares = array(shares)
    return sums, shares


def add_rows(sums: Tensor, dA: Tensor, dD: Tensor, ddelta_bias: Tensor) -> None:
    """Add up the batch rows' gradients of A, D and delta_bias."""
    total = cpu_extension.add_rows(sums)
    dA.copy_(total[:-2].mT)
    dD.copy_(total[-2])
    ddelta_bias.copy_(total[-1])


def run(direction: str, scans: list[Any], dtype: torch.dtype) -> None:
    """Compute the scans, two of the same sizes as one."""
    cpu_extension.run(_LIBRARY, "scan", direction, dtype, scans, ctypes.c_int64(len(scans)))
