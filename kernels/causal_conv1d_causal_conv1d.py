"""The convolution of the causal-conv1d package, for what it computes exactly.

It takes CUDA tensors, channels last, with strides and channels that are multiples of 8, a width of
2 to 4, offsets below 2³¹ and no mask; it reads rightwards only, so `reverse` flips copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brickwork.kernels.backend import unavailable, why_not_opaque

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
) -> str | None:
    """Why the package cannot run these checked arguments, or None."""
    if x.device.type != "cuda":
        return f"it takes CUDA tensors, got {x.device.type}"
    floats = [t.dtype for t in (x, weight, bias, initial_state) if t is not None]
    if any(dtype not in _DTYPES for dtype in floats):
        return f"it takes dtypes of {_DTYPES}, got {floats}"
    if not 2 <= weight.shape[1] <= 4:
        return f"it takes widths of 2 to 4, got {weight.shape[1]}"
    if mask is not None:
        return "it knows no mask"
    if x.numel() == 0:
        return "it takes no empty tensors"
    row, token, channel = x.stride()
    if channel != 1 or row % 8 or token % 8 or x.shape[2] % 8:
        return (
            "it takes channels last with channels and strides that are multiples of 8, "
            f"got {x.shape[2]} channels and strides {x.stride()}"
        )
    if x.numel() >= 2**31 or (x.shape[0] - 1) * row + (x.shape[1] - 1) * token >= 2**31:
        return f"its offsets are below 2^31, and x has shape {tuple(x.shape)}"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    return why_not_opaque() or unavailable("causal_conv1d")


def causal_conv1d_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
    activation: str | None,
    reverse: bool,
) -> Tensor:
    """y of `causal_conv1d` for arguments that `why_not` passes, with sequence starts."""
    from causal_conv1d import causal_conv1d_fn

    def rightwards(tensor: Tensor) -> Tensor:
        return tensor.flip(1) if reverse else tensor

    # runs, not the caller's ids: the package looks for equal ids, wherever they are
    runs = None if starts is None else rightwards(starts).cumsum(1, dtype=torch.int32)
    before = None if initial_state is None else initial_state.to(x.dtype).mT.contiguous().mT
    y = causal_conv1d_fn(
        rightwards(x).mT,
        weight.float(),
        None if bias is None else bias.float(),
        seq_idx=runs,
        initial_states=before,
        activation=activation,
    )
    return rightwards(_ContiguousGradient.apply(y.mT))


class _ContiguousGradient(torch.autograd.Function):
    """The identity; the package's backward has the same demands on strides as its forward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.contiguous()
