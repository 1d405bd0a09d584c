"""The product of tokens and a weight, `x Wᵀ + b`, by the faster of PyTorch's two libraries.

On the CPU PyTorch multiplies float32 matrices by MKL. oneDNN, which it contains too, takes a tenth
less time on processors of AMD from some dozens of rows on; for the gradient of the weight, whose
terms are the tokens, only if it is wide and the tokens are few.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels.backend import preferred
from brickwork.kernels.checks import memory_is_all

ROWS, TERMS = 64, 2**24  # from which on oneDNN is the faster one
_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # private: may go


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x (..., C), weight (R, C), bias (R) or None; returns (..., R).

    >>> linear(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    if not _by_onednn(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        return _Linear.apply(x, weight, bias)
    return _product(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, (..., M, K) by (..., K, N), whose one matrix each goes through `linear`."""
    if a.shape[:-2].numel() != 1 or b.ndim != a.ndim:
        return a @ b
    return linear(a.flatten(0, -2), b.flatten(0, -2).mT).view(*a.shape[:-1], b.shape[-1])


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if not memory_is_all(x, weight, bias):  # first: a size asked for is a guard in compiled code
        return False
    columns = x.shape[-1] if x.ndim else 0
    rows = x.numel() // columns if columns else 0
    return (
        rows >= ROWS
        and rows * weight.numel() >= TERMS
        and x.dtype == weight.dtype == torch.float32
        and weight.ndim == 2
        and weight.shape[1] == columns
        and (weight.is_contiguous() or weight.mT.is_contiguous())  # else a thousand times slower
        and (bias is None or (bias.dtype == torch.float32 and bias.shape == weight.shape[:1]))
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
        and preferred() != "torch"
        and _is_faster_here()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            linear(grad, weight.mT) if of_x else None,
            _sum_of_products(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _sum_of_products(grad: Tensor, x: Tensor) -> Tensor:
    """`gradᵀ x` of grad (T, R) and x (T, C)."""
    (tokens, rows), columns = grad.shape, x.shape[1]
    if rows < columns and tokens <= 2 * columns:
        return linear(grad.mT, x.mT)
    return grad.mT @ x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _onednn is not None
    bias = None if bias is None else bias.contiguous()  # it reads no strides of a bias
    return _onednn.default(x, weight, bias, "none", [], "")


_faster: bool | None = None


def _is_faster_here() -> bool:
    """Whether PyTorch has oneDNN, and the processor is one that MKL was not made for."""
    global _faster
    if _faster is None:
        text = ""
        with contextlib.suppress(OSError):
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        known = _onednn is not None and torch.backends.mkldnn.is_available()
        _faster = known and torch.backends.mkl.is_available() and "AuthenticAMD" in text
    return _faster
