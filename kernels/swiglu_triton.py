"""`swiglu` in Triton; its backward pass keeps gate and up only, and computes the rest again.

Rows may have any stride, as the halves of one product have; where the last axis has another stride
than 1, or leading axes do not flatten to one, the tensor is copied first. With S elements of b
bytes the forward pass reads 2·S·b bytes and writes S·b, the backward pass reads 3·S·b and writes
2·S·b.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from brickwork.kernels.triton_support import (
    TYPE_NAMES,
    Configuration,
    cdiv,
    launch_options,
    next_power_of_2,
    register,
)
from brickwork.kernels.triton_support import unavailable_here as unavailable_here

_LOG2_E = tl.constexpr(1.4426950408889634)


def swiglu_triton(gate: Tensor, up: Tensor, *, cast: str) -> Tensor:
    """`swiglu` for checked arguments."""
    return _swiglu(gate, up, cast == "before_up")


@triton.jit
def _tile(M, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    return rows, columns, mask


@triton.jit(do_not_specialize=("gate_stride", "up_stride", "M"))
def swiglu_forward(
    GATE, UP, Y, gate_stride, up_stride, M,
    N: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """A tile of rows and columns; strides are in units of UNIT elements, a divisor of each."""
    rows, columns, mask = _tile(M, N, ROWS, BLOCK)
    gate_at = GATE + (rows * gate_stride * UNIT)[:, None] + columns[None, :]
    up_at = UP + (rows * up_stride * UNIT)[:, None] + columns[None, :]
    gate = tl.load(gate_at, mask, other=0.0).to(tl.float32)
    up = tl.load(up_at, mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-gate * _LOG2_E))
    if CAST_FIRST:
        y = y.to(Y.dtype.element_ty).to(tl.float32)
    y_at = Y + (rows * N)[:, None] + columns[None, :]
    tl.store(y_at, (y * up).to(Y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=("dy_stride", "gate_stride", "up_stride", "M"))
def swiglu_backward(
    DY, GATE, UP, DGATE, DUP, dy_stride, gate_stride, up_stride, M,
    N: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """The same tile of both gradients."""
    rows, columns, mask = _tile(M, N, ROWS, BLOCK)
    dy_at = DY + (rows * dy_stride * UNIT)[:, None] + columns[None, :]
    gate_at = GATE + (rows * gate_stride * UNIT)[:, None] + columns[None, :]
    up_at = UP + (rows * up_stride * UNIT)[:, None] + columns[None, :]
    dy = tl.load(dy_at, mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_at, mask, other=0.0).to(tl.float32)
    up = tl.load(up_at, mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp2(-gate * _LOG2_E))
    activated = gate * sigmoid
    if CAST_FIRST:
        activated = activated.to(DUP.dtype.element_ty).to(tl.float32)
    at = (rows * N)[:, None] + columns[None, :]
    tl.store(DUP + at, (dy * activated).to(DUP.dtype.element_ty), mask)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(DGATE + at, dgate.to(DGATE.dtype.element_ty), mask)


class Shape(NamedTuple):
    """Of the tiles of a launch."""

    rows: int
    block: int
    warps: int


def tile_shape(columns: int) -> Shape:
    """2,048 elements, 16 for each of 128 threads."""
    block = min(max(next_power_of_2(columns), 16), 1024)
    return Shape(2048 // block, block, 4)


def _forward(gate: Tensor, up: Tensor, cast_first: bool) -> Tensor:
    y = _fake_forward(gate)
    if y.numel():
        _launch(swiglu_forward, [gate, up], [y], cast_first)
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor, cast_first: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _fake_backward(dy)
    if dgate.numel():
        _launch(swiglu_backward, [dy, gate, up], [dgate, dup], cast_first)
    return dgate, dup


def _launch(kernel: Any, inputs: list[Tensor], outputs: list[Tensor], cast_first: bool) -> None:
    N = inputs[0].shape[-1] if inputs[0].ndim else 1
    rows = [_rows(t, N) for t in inputs]
    strides = [t.stride(0) for t in rows]
    unit = next(u for u in (8, 4, 1) if all(stride % u == 0 for stride in strides))
    M, shape = rows[0].shape[0], tile_shape(N)
    kernel[(cdiv(M, shape.rows), cdiv(N, shape.block))](
        *rows, *outputs, *(stride // unit for stride in strides), M,
        N, unit, shape.rows, shape.block, cast_first, **launch_options(shape.warps),
    )  # fmt: skip


def _rows(t: Tensor, columns: int) -> Tensor:
    """(M, N) with columns side by side: a view where strides allow it, else a copy."""
    flat = t.reshape(t.numel() // columns, columns)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _fake_forward(gate: Tensor, *_: Any) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _fake_backward(dy: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward(dy), _fake_forward(dy)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.cast_first = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return *_swiglu_backward(dy, *ctx.saved_tensors, ctx.cast_first), None


_swiglu = register(
    "swiglu_triton", _forward, _fake_forward, gradients=_gradients, setup_context=_setup_context
)
_swiglu_backward = register("swiglu_triton_backward", _backward, _fake_backward)


def configurations() -> Iterator[Configuration]:
    """Every shape of tiles, and its ends in float32; float16 has the width of bfloat16."""
    strides = {"gate_stride": "i32", "up_stride": "i32", "M": "i32"}
    sizes_of = {torch.bfloat16: (16, 128, 512, 14336), torch.float32: (16, 14336)}
    for dtype, columns_of in sizes_of.items():
        for columns in columns_of:
            shape = tile_shape(columns)
            x, name = "*" + TYPE_NAMES[dtype], f"{columns} {TYPE_NAMES[dtype]}"
            sizes = {"N": columns, "UNIT": 8, "ROWS": shape.rows, "BLOCK": shape.block}
            for kernel, direction, pointers, numbers in (
                (swiglu_forward, "forward", ("GATE", "UP", "Y"), strides),
                (
                    swiglu_backward,
                    "backward",
                    ("DY", "GATE", "UP", "DGATE", "DUP"),
                    {"dy_stride": "i32", **strides},
                ),
            ):
                yield Configuration(
                    kernel,
                    f"swiglu {direction} {name}",
                    {**dict.fromkeys(pointers, x), **numbers},
                    {**sizes, "CAST_FIRST": dtype == torch.bfloat16},
                    pointers,
                    num_warps=shape.warps,
                    num_stages=1,
                    launch_warps=True,
                    wide_loads=True,
                )
