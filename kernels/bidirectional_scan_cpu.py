"""Both directions of a bidirectional scan in one call of the compiled kernel.

The task of a thread is a tile of channels in both directions, one after the other: what they share,
the gate and the sum, is in the cache for the second. Memory as in `selective_scan_cpu`, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.bidirectional_scan import ScanInputs
from brickwork.kernels.cpu_extension import array
from brickwork.kernels.selective_scan_cpu import (
    add_rows,
    empty_states,
    run,
    scan_of,
    set_gradients,
    set_results,
    unavailable_here,
)

__all__ = ["bidirectional_scan_cpu", "unavailable_here"]

EACH = len(ScanInputs._fields)


def bidirectional_scan_cpu(
    forward: ScanInputs,
    backward: ScanInputs,
    *,
    z: Tensor | None,
    softplus: bool,
    mask: Tensor | None,
    starts: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """`bidirectional_scan` for checked arguments, with the starts of sequences both ways."""
    dtype = compute_dtype(*forward, *backward, z)
    tensors: list[Tensor | None] = []
    for side in (forward, backward):
        B, C = (t.unsqueeze(2) if t.dim() == 3 else t for t in (side.B, side.C))
        tensors += [None if t is None else t.to(dtype) for t in side._replace(B=B, C=C)]
    tensors.append(None if z is None else z.to(dtype))
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    y, _, _ = _ops.bidirectional_scan_cpu(*tensors, mask, *starts, softplus, keep)
    return y.to(forward.x.dtype)


class _Both(NamedTuple):
    """The arguments of the ops: the tensors of each direction, and what both share."""

    forward: ScanInputs
    backward: ScanInputs
    z: Tensor | None
    mask: Tensor | None
    starts: tuple[Tensor | None, Tensor | None]
    softplus: bool

    @staticmethod
    def of(arguments: Sequence[Any]) -> _Both:
        sides = ScanInputs(*arguments[:EACH]), ScanInputs(*arguments[EACH : 2 * EACH])
        z, mask, starts, starts_back, softplus = arguments[2 * EACH : 2 * EACH + 5]
        return _Both(*sides, z, mask, (starts, starts_back), softplus)

    def scans(self) -> list[Any]:
        scans = []
        for way, (x, delta, A, B, C, D, bias) in enumerate((self.forward, self.backward)):
            gates = D, self.z, bias, None, self.mask, self.starts[way]
            scan = scan_of(x, delta, A, B, C, *gates, self.softplus, bool(way))
            scan.part = way + 1
            scans.append(scan)
        return scans


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y and, each way, the states where a chunk starts (none if not `keep`)."""
    both = _Both.of(arguments)
    y, *states = results = _empty_results(*arguments)
    if y.numel() == 0:
        return results
    scans = both.scans()
    rows, channels, state = y.shape[0], *both.forward.A.shape
    finals = y.new_empty(2, rows, channels, state)  # nobody asks for them
    for scan, final, kept in zip(scans, finals, states):
        set_results(scan, y, final, kept)
    run("forward", scans, y.dtype)
    return results


def _empty_results(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    keep = arguments[-1]
    (x, _, A, *_), (x_back, _, A_back, *_) = _Both.of(arguments)[:2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, empty_states(x, A, keep), empty_states(x_back, A_back, keep)


def _backward(dy: Tensor, states: Tensor, states_back: Tensor, *arguments: Any) -> list[Tensor]:
    """Gradients of the floating arguments, in their order; empty for those that are absent."""
    both = _Both.of(arguments)
    grads = _empty_gradients(arguments)
    dz = grads[2 * EACH]
    if dy.numel() == 0:
        return [grad.zero_() for grad in grads]
    scans, alive = both.scans(), []
    for way, (scan, kept) in enumerate(zip(scans, (states, states_back))):
        dx, ddelta, dA, dB, dC, _, _ = grads[way * EACH : (way + 1) * EACH]
        dstate = dy.new_zeros(dx.shape[0], *dA.mT.shape)
        alive.append((dstate, *set_gradients(scan, dy, kept, (dx, ddelta, dB, dC), dstate)))
        scan.dz = array(None if both.z is None else dz)
    run("backward", scans, dy.dtype)
    for way, (_, sums, _) in enumerate(alive):
        dA, dD, ddelta_bias = (grads[way * EACH + i] for i in (2, 5, 6))
        add_rows(sums, dA, dD, ddelta_bias)
    return grads


def _empty_gradients(arguments: Sequence[Any]) -> list[Tensor]:
    like = arguments[0]
    per_channel = like.shape[2:]
    grads = []
    for i, tensor in enumerate(arguments[: 2 * EACH + 1]):
        shape = tensor.shape if tensor is not None else (0,) if i == 2 * EACH else per_channel
        grads.append(torch.empty(shape, dtype=like.dtype, device=like.device))
    return grads


def _fake_backward(dy: Any, states: Any, states_back: Any, *arguments: Any) -> list[Tensor]:
    return _empty_gradients(arguments)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softplus, _ = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
    states, tensors = saved[:2], saved[2:]
    if dy is None:
        return (None,) * (len(tensors) + 2)
    if states[0].numel() == 0:  # the forward pass did not know that a gradient would be asked for
        states = _ops.bidirectional_scan_cpu(*tensors, ctx.softplus, True)[1:]
    grads = _ops.bidirectional_scan_cpu_backward(dy, *states, *tensors, ctx.softplus)
    wanted = [g if t is not None else None for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None, None)


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "autograd: the compiled bidirectional_scan is differentiable once; "
        "within `with prefer('torch'):` it is any number of times"
    )


_SIDE = ("x", "delta", "A", "B", "C", "D?", "delta_bias?")
_ARGUMENTS = [*_SIDE, *(f"back_{name}" for name in _SIDE), "z?", "mask?", "starts?", "back_starts?"]
_TENSORS = ", ".join(f"Tensor{'?' * name.endswith('?')} {name.strip('?')}" for name in _ARGUMENTS)
_library = torch.library.Library("brickwork", "FRAGMENT")
for _schema, _run_on_cpu, _fake in (
    (
        f"bidirectional_scan_cpu({_TENSORS}, bool softplus, bool keep) -> (Tensor, Tensor, Tensor)",
        _forward,
        _empty_results,
    ),
    (
        "bidirectional_scan_cpu_backward(Tensor dy, Tensor states, Tensor back_states, "
        f"{_TENSORS}, bool softplus) -> Tensor[]",
        _backward,
        _fake_backward,
    ),
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run_on_cpu, "CPU")
    torch.library.register_fake(f"brickwork::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "brickwork::bidirectional_scan_cpu", _gradients, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("brickwork::bidirectional_scan_cpu_backward", _refuse, lib=_library)
_ops = torch.ops.brickwork
