"""The selective scan of the mamba-ssm package, for what it computes exactly.

It takes CUDA tensors of one dtype, at most 256 states, offsets below 2³¹, and neither mask, packed
sequences nor an initial state; it scans rightwards only, so `reverse` flips copies. It has no
gradient of the last state: when that is asked for, the states are computed again in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from brickwork.kernels.backend import unavailable, why_not_opaque
from brickwork.kernels.selective_scan_chunked import selective_scan_chunked

_PACKAGE_CHUNK = 2048  # tokens between the states that the package keeps
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    mask: Tensor | None,
    seq_ids: Tensor | None,
    initial_state: Tensor | None,
) -> str | None:
    """Why the package cannot run these checked arguments, or None."""
    if x.device.type != "cuda":
        return f"it takes CUDA tensors, got {x.device.type}"
    streams = [t.dtype for t in (x, delta, B, C, z) if t is not None]
    if len(set(streams)) > 1 or x.dtype not in _DTYPES:
        return f"x, delta, B, C and z must share one dtype of {_DTYPES}, got {streams}"
    if any(t is not None and t.dtype == torch.float64 for t in (A, D, delta_bias)):
        return "it computes in float32, and A, D or delta_bias is float64"
    for name, given in (("mask", mask), ("seq_ids", seq_ids), ("initial_state", initial_state)):
        if given is not None:
            return f"it knows no {name}"
    (batch, tokens, channels), states = x.shape, A.shape[1]
    if not 1 <= states <= 256:
        return f"it takes 1 to 256 states, got {states}"
    kept = batch * channels * -(-tokens // _PACKAGE_CHUNK) * 2 * states
    if max(x.numel(), B.numel(), kept) >= 2**31:
        return f"its offsets are below 2^31, and x has shape {tuple(x.shape)}"
    if x.numel() == 0:
        return "it takes no empty tensors"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    return why_not_opaque() or unavailable("mamba_ssm")


def selective_scan_mamba_ssm(
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
    mask: None,
    starts: None,
    initial_state: None,
) -> tuple[Tensor, Tensor]:
    """`selective_scan` for arguments that `why_not` passes, with B and C (B, T, G, N)."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def rightwards(tensor: Tensor) -> Tensor:
        return tensor.flip(1) if reverse else tensor

    y, last = selective_scan_fn(
        rightwards(x).mT,
        rightwards(delta).mT,
        A.float(),
        rearrange(rightwards(B), "b t g n -> b g n t"),
        rearrange(rightwards(C), "b t g n -> b g n t"),
        None if D is None else D.float(),
        None if z is None else rightwards(z).mT,
        None if delta_bias is None else delta_bias.float(),
        softplus,
        return_last_state=True,
    )
    final_state = _LastState.apply(last.detach(), x, delta, A, B, delta_bias, softplus, reverse)
    return rightwards(y.mT), final_state


class _LastState(torch.autograd.Function):
    """The last state as it is; its gradient from a scan in PyTorch."""

    @staticmethod
    def forward(ctx: Any, last: Tensor, *inputs: Any) -> Tensor:
        *tensors, ctx.softplus, ctx.reverse = inputs
        ctx.save_for_backward(*tensors)
        return last.float().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlast: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        again: list[Any] = [None if t is None else t.detach().requires_grad_() for t in saved]
        x, delta, A, B, bias = again
        absent: dict[str, Any] = dict.fromkeys(("D", "z", "mask", "starts", "initial_state"))
        with torch.enable_grad():
            _, state = selective_scan_chunked(
                x,
                delta,
                A,
                B,
                B.detach(),
                delta_bias=bias,
                softplus=ctx.softplus,
                reverse=ctx.reverse,
                **absent,
            )
        found = iter(torch.autograd.grad(state, [t for t in again if t is not None], dlast))
        grads = [None if t is None else next(found) for t in again]
        return (None, *grads, None, None)
