"""RMS normalisation over the last axis."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype
from brickwork.kernels.checks import check_floating, check_one_of, check_shapes

Cast = Literal["once", "before_weight"]


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, cast: Cast = "once", backend: str = "auto"
) -> Tensor:
    """Divide each row by its root mean square and scale its columns.

    `y = x / sqrt(mean(x²) + eps) · weight`, statistics in float32 (float64 for float64 input).

    Paper: Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019.

    Arguments:
        x: (..., C), floating point.
        weight: (C,), any floating dtype; it never changes the dtype of the result.
        eps: added to the mean square, not negative.
        cast: where the result takes x's dtype: `"once"`, after the weight, or `"before_weight"`,
            before it and once more after it (Llama's order). Equal for float32.
        backend: see `brickwork.kernels.backend`.

    Returns:
        (..., C) in x's dtype.

    Raises:
        ValueError: a wrong shape, dtype, `eps` or `cast`.
        BackendUnavailable: a backend was named that cannot run here.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([0.8485, 2.2627])
    """
    check_floating(x=x, weight=weight)
    check_shapes(x=(x, "... C"), weight=(weight, "C"))
    check_one_of("cast", cast, ("once", "before_weight"))
    check_eps(eps)
    chosen = choose("rms_norm", backend, triton=lambda: _why_not_triton(x, weight))
    if chosen == "triton":
        from brickwork.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps=eps, cast=cast)
    return rms_norm_reference(x, weight, eps=eps, cast=cast)


def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, cast: Cast = "once"
) -> Tensor:
    """The specification of `rms_norm`."""
    dtype = compute_dtype(x)
    with autocast_off(x):
        wide = x.to(dtype)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if cast == "before_weight":
            y = y.to(x.dtype).to(dtype)
        return (y * weight.to(dtype)).to(x.dtype)


def _why_not_triton(x: Tensor, weight: Tensor) -> str | None:
    from brickwork.kernels.triton_support import why_not

    return why_not(x, weight)


def check_eps(eps: float) -> None:
    """Raise unless `eps` is a finite number that is not negative."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")
