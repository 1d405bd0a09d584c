"""The gated activation of SwiGLU feed-forward layers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype
from brickwork.kernels.checks import check_floating, check_one_of

GateCast = Literal["once", "before_up"]


def swiglu(gate: Tensor, up: Tensor, *, cast: GateCast = "once", backend: str = "auto") -> Tensor:
    """Multiply `up` by the SiLU of `gate`, element by element.

    `y = gate · sigmoid(gate) · up`, computed in float32 (float64 for float64 input).

    Paper: Shazeer, *GLU Variants Improve Transformer*, 2020.

    Arguments:
        gate, up: of one shape (...) and one floating dtype.
        cast: where the result takes their dtype: `"once"`, after the product, or `"before_up"`,
            after the SiLU and once more after the product (the order of transformers and Liger).
            Equal for float32.
        backend: see `brickwork.kernels.backend`.

    Returns:
        (...) in the dtype of `gate` and `up`.

    Raises:
        ValueError: a wrong dtype or `cast`, shapes or dtypes that differ.
        BackendUnavailable: a backend was named that cannot run here.

    >>> swiglu(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([5.0, 2.0, 2.0]))
    tensor([ 0.0000,  1.4621, -0.5379])
    """
    check_floating(gate=gate, up=up)
    for what, of_gate, of_up in (
        ("shape", tuple(gate.shape), tuple(up.shape)),
        ("dtype", gate.dtype, up.dtype),
    ):
        if of_gate != of_up:
            raise ValueError(f"up must have the {what} of gate, {of_gate}, got {of_up}")
    check_one_of("cast", cast, ("once", "before_up"))
    if choose("swiglu", backend, triton=lambda: _why_not_triton(gate, up)) == "triton":
        from brickwork.kernels.swiglu_triton import swiglu_triton

        return swiglu_triton(gate, up, cast=cast)
    return swiglu_reference(gate, up, cast=cast)


def _why_not_triton(*tensors: Tensor) -> str | None:
    from brickwork.kernels.triton_support import why_not

    return why_not(*tensors)


def swiglu_reference(gate: Tensor, up: Tensor, *, cast: GateCast = "once") -> Tensor:
    """The specification of `swiglu`."""
    dtype = compute_dtype(gate)
    with autocast_off(gate):
        activated = torch.nn.functional.silu(gate.to(dtype))
        if cast == "before_up":
            activated = activated.to(gate.dtype).to(dtype)
        return (activated * up.to(dtype)).to(gate.dtype)
