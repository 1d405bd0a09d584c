"""Normalisation blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from brickwork.kernels.add_norm import AddNormOutput, Kind, add_norm
from brickwork.kernels.checks import check_flag, check_integer, check_one_of
from brickwork.kernels.rms_norm import Cast, check_eps, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis with a learned scale.

    `y = x / sqrt(mean(x²) + eps) · weight`, computed in float32, returned in x's dtype.

    Paper: Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019.

    Arguments:
        dim: width C of the last axis.
        eps: added to the mean square.
        cast: `"once"` or `"before_weight"`, see `brickwork.kernels.rms_norm`.

    Called with x (..., C); returns (..., C). Raises ValueError for another width.

    >>> norm = RMSNorm(2, eps=0.0)
    >>> norm(torch.tensor([3.0, 4.0])).detach()
    tensor([0.8485, 1.1314])
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, cast: Cast = "once") -> None:
        super().__init__()
        check_integer("dim", dim, least=1)
        check_eps(eps)
        check_one_of("cast", cast, ("once", "before_weight"))
        self.dim = dim
        self.eps = eps
        self.cast: Cast = cast
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps, cast=self.cast)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, cast={self.cast!r}"


class AddNorm(nn.Module):
    """Residual addition and the normalisation that follows it.

    `s = x + residual; y = norm(s)`; the residual stream s is carried beside the branch, in
    float32 if `residual_in_fp32`, and every block starts with this module (Mamba's layout).

    Papers: Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019; Ba, Kiros and Hinton,
    *Layer Normalization*, 2016.

    Arguments:
        dim: width C of the last axis.
        kind: `"rms"` (no bias) or `"layer"` (with bias).
        eps: added to the mean square or the variance.
        residual_in_fp32: return s in float32 when x is narrower.

    Called with x (..., C) and residual (..., C) or None; returns AddNormOutput(y, residual).
    Raises ValueError for other shapes.

    >>> norm = AddNorm(2, eps=0.0)
    >>> y, residual = norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]))
    >>> residual
    tensor([3., 4.])
    """

    def __init__(
        self, dim: int, *, kind: Kind = "rms", eps: float = 1e-5, residual_in_fp32: bool = True
    ) -> None:
        super().__init__()
        check_integer("dim", dim, least=1)
        check_one_of("kind", kind, ("rms", "layer"))
        check_eps(eps)
        check_flag("residual_in_fp32", residual_in_fp32)
        self.dim = dim
        self.kind: Kind = kind
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if kind == "layer" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one and the shift to zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> AddNormOutput:
        return add_norm(
            x,
            residual,
            self.weight,
            self.bias,
            kind=self.kind,
            eps=self.eps,
            residual_dtype=torch.float32 if self.residual_in_fp32 else x.dtype,
        )

    def extra_repr(self) -> str:
        fp32 = self.residual_in_fp32
        return f"{self.dim}, kind={self.kind!r}, eps={self.eps}, residual_in_fp32={fp32}"
