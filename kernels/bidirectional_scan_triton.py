"""Both directions of a bidirectional scan by the kernels of `selective_scan_triton`, in one launch
for each of their passes.

The rows of the scan from the right come after those of the scan from the left, and their programs
walk the other way: a launch has twice the programs, so that half as many rows and channels fill a
GPU without cutting the tokens into segments. Nothing of the two is shared but the gate, which each
reads at its own time.

Bytes: those of `selective_scan_triton`, twice, and the sums of both results (three values for each
channel and token) and of both gradients of z. Directions whose tensors are not of the same shapes
and dtypes are scanned one after the other.

B batch, T tokens, E channels, N state, G groups of B and C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import selective_scan_triton_launch as launch
from brickwork.kernels import triton_support
from brickwork.kernels.bidirectional_scan import ScanInputs
from brickwork.kernels.selective_scan import selective_scan
from brickwork.kernels.sequences import sequence_starts
from brickwork.kernels.triton_support import cdiv, unavailable_here

__all__ = ["bidirectional_scan_triton", "unavailable_here"]

EACH = len(ScanInputs._fields)


def bidirectional_scan_triton(
    forward: ScanInputs,
    backward: ScanInputs,
    *,
    z: Tensor | None,
    softplus: bool,
    mask: Tensor | None,
    seq_ids: Tensor | None,
) -> Tensor:
    """`bidirectional_scan` for checked arguments."""
    if not _alike(forward, backward):
        options: dict[str, Any] = {"z": z, "softplus": softplus, "mask": mask, "seq_ids": seq_ids}
        y = _one_way(forward, reverse=False, **options)
        return y + _one_way(backward, reverse=True, **options).to(y.dtype)
    tensors: list[Tensor | None] = []
    for side in (forward, backward):
        B, C = (t.unsqueeze(2) if t.dim() == 3 else t for t in (side.B, side.C))
        tensors += side._replace(B=B, C=C)
    tensors.append(z)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    flags = [
        launch.flags_of(mask, sequence_starts(seq_ids, mask, reverse=reverse))
        for reverse in (False, True)
    ]
    both = None if flags[0] is None else torch.cat([f for f in flags if f is not None])
    return _forward_op(*tensors, both, softplus, keep)[0]


def _alike(one: ScanInputs, other: ScanInputs) -> bool:
    return all(
        (a is None) == (b is None)
        and (a is None or b is None or (a.shape == b.shape and a.dtype == b.dtype))
        for a, b in zip(one, other)
    )


def _one_way(inputs: ScanInputs, **options: Any) -> Tensor:
    given = {"D": inputs.D, "delta_bias": inputs.delta_bias, **options}
    return selective_scan(*inputs[:5], **given, backend="triton").y


def _forward(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    delta_bias: Tensor | None, x_2: Tensor, delta_2: Tensor, A_2: Tensor, B_2: Tensor, C_2: Tensor,
    D_2: Tensor | None, delta_bias_2: Tensor | None, z: Tensor | None, flags: Tensor | None,
    softplus: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and, if `keep`, the states (2 B, chunks · N, E) in front of the chunks, each way."""
    y, states = _empty_results(x, A, keep)
    if y.numel() == 0:
        return y, states
    sides = [
        ScanInputs(x, delta, A, B, C, D, delta_bias),
        ScanInputs(x_2, delta_2, A_2, B_2, C_2, D_2, delta_bias_2),
    ]
    ways = x.new_empty(2, *x.shape)
    scans = launch.Scans(sides, z, flags, softplus, reverse=False)
    scans.forward(None, ways, states if keep else None)
    return torch.add(*ways, out=y), states


def _backward(
    dy: Tensor, states: Tensor, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None, delta_bias: Tensor | None, x_2: Tensor, delta_2: Tensor, A_2: Tensor,
    B_2: Tensor, C_2: Tensor, D_2: Tensor | None, delta_bias_2: Tensor | None, z: Tensor | None,
    flags: Tensor | None, softplus: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, delta, A, B, C, D and delta_bias, (2, ...) for both ways, and of z."""
    first = ScanInputs(x, delta, A, B, C, D, delta_bias)
    last = ScanInputs(x_2, delta_2, A_2, B_2, C_2, D_2, delta_bias_2)
    grads = _empty_gradients(first, z)
    dx, ddelta, dA, dB, dC, dD, dbias, dz = grads
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    scans = launch.Scans([first, last], z, flags, softplus, reverse=False)
    gates = None if z is None else z.new_empty(2, *z.shape)
    sums = scans.backward(dy, None, states, launch.Into(dx, ddelta, gates))
    for grad, found in ((dA, sums.A), (dB, sums.B), (dC, sums.C), (dD, sums.D), (dbias, sums.bias)):
        grad.copy_(found)
    if gates is not None:
        torch.add(*gates, out=dz)
    return grads


def _empty_results(x: Tensor, A: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    (rows, tokens, channels), state = x.shape, A.shape[1]
    chunks = cdiv(tokens, launch.chunk_of(state)) if keep else 0
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, y.new_empty((2 * rows, chunks * state, channels), dtype=torch.float32)


def _empty_gradients(
    side: ScanInputs, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for each gradient in its tensor's dtype; but for z's also where there is no tensor."""
    x, channels = side.x, side.x.shape[2]

    def pair(like: Tensor | None) -> Tensor:
        if like is None:
            return torch.empty(2, channels, dtype=torch.float32, device=x.device)
        return torch.empty((2, *like.shape), dtype=like.dtype, device=x.device)

    dx, ddelta, dA, dB, dC, dD, dbias = (pair(t) for t in side)
    dz = x.new_empty(0) if z is None else torch.empty(z.shape, dtype=z.dtype, device=x.device)
    return dx, ddelta, dA, dB, dC, dD, dbias, dz


def _fake_forward(x: Tensor, delta: Tensor, A: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(x, A, others[-1])


def _fake_backward(dy: Any, states: Any, *inputs: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(ScanInputs(*inputs[:EACH]), inputs[2 * EACH])


def _setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.softplus, _ = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    states, *tensors = ctx.saved_tensors
    if states.numel() == 0:  # the forward pass did not know that a gradient would be asked for
        states = _forward_op(*tensors, ctx.softplus, True)[1]
    *pairs, dz = _backward_op(dy, states, *tensors, ctx.softplus)
    grads = [pair[way] for way in (0, 1) for pair in pairs] + [dz]
    wanted = [g if t is not None else None for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None)


_forward_op = triton_support.register(
    "bidirectional_scan_triton",
    _forward,
    _fake_forward,
    gradients=_gradients,
    setup_context=_setup_context,
)
_backward_op = triton_support.register(
    "bidirectional_scan_triton_backward", _backward, _fake_backward
)
