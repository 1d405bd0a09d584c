"""Residual addition and the normalisation that follows it, as one op."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype
from brickwork.kernels.checks import check_floating, check_one_of, check_shapes
from brickwork.kernels.rms_norm import Cast, check_eps

Kind = Literal["rms", "layer"]


class AddNormOutput(NamedTuple):
    """`y` (..., C) in x's dtype, and the new `residual` (..., C) in the residual's dtype."""

    y: Tensor
    residual: Tensor


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Kind = "rms",
    eps: float = 1e-5,
    cast: Cast = "once",
    residual_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> AddNormOutput:
    """Add a branch to the residual stream and normalise the sum.

    `s = x + residual`, computed in float32 and rounded once to `residual_dtype`; then, from the
    rounded s, `y = s / sqrt(mean(s²) + eps) · weight + bias` (`kind="rms"`) or
    `y = (s - mean(s)) / sqrt(var(s) + eps) · weight + bias` (`kind="layer"`).

    Papers: Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019; Ba, Kiros and Hinton,
    *Layer Normalization*, 2016.

    Arguments:
        x: (..., C), the branch's output; its dtype is the dtype of y.
        residual: (..., C) as x, any floating dtype, or None at the first block (s = x).
        weight, bias: (C,), any floating dtype; they never change the dtype of y.
        kind: `"rms"` or `"layer"`.
        eps: added to the mean square or the variance, not negative.
        cast: `"once"` rounds y after weight and bias, `"before_weight"` before and after them.
        residual_dtype: of the returned residual: x's dtype (None) or a wider one. float64 input
            keeps float64.
        backend: see `brickwork.kernels.backend`.

    Returns:
        AddNormOutput(y, residual).

    Raises:
        ValueError: a wrong shape, dtype, `kind`, `cast` or `eps`.
        BackendUnavailable: a backend was named that cannot run here.

    >>> y, s = add_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.ones(2), eps=0.0)
    >>> y, s
    (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    check_floating(x=x, residual=residual, weight=weight, bias=bias)
    check_shapes(x=(x, "... C"), weight=(weight, "C"), bias=(bias, "C"))
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    check_one_of("kind", kind, ("rms", "layer"))
    check_one_of("cast", cast, ("once", "before_weight"))
    check_eps(eps)
    if residual_dtype is None or x.dtype == torch.float64:
        residual_dtype = x.dtype
    check_one_of("residual_dtype", residual_dtype, (x.dtype, torch.float32, torch.float64))
    tensors = (x, residual, weight, bias)
    options: dict[str, Any] = {
        "kind": kind,
        "eps": eps,
        "cast": cast,
        "residual_dtype": residual_dtype,
    }
    chosen = choose(
        "add_norm", backend, triton=lambda: _why_not_triton(*tensors, residual_dtype=residual_dtype)
    )
    if chosen == "triton":
        from brickwork.kernels.add_norm_triton import add_norm_triton

        return AddNormOutput(*add_norm_triton(*tensors, **options))
    return add_norm_reference(*tensors, **options)


def _why_not_triton(*tensors: Tensor | None, residual_dtype: torch.dtype) -> str | None:
    from brickwork.kernels.triton_support import why_not

    if residual_dtype == torch.float64:
        return "it has no float64"
    return why_not(*tensors)


def add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Kind = "rms",
    eps: float = 1e-5,
    cast: Cast = "once",
    residual_dtype: torch.dtype | None = None,
) -> AddNormOutput:
    """The specification of `add_norm`."""
    dtype = compute_dtype(x, residual)
    with autocast_off(x):
        total = x.to(dtype) if residual is None else x.to(dtype) + residual.to(dtype)
        total = total.to(residual_dtype or x.dtype)
        wide = total.to(dtype)
        if kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if cast == "before_weight":
            y = y.to(x.dtype).to(dtype)
        y = y * weight.to(dtype)
        if bias is not None:
            y = y + bias.to(dtype)
        return AddNormOutput(y.to(x.dtype), total)
