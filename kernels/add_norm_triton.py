"""`add_norm` in Triton: launches, op and gradient; the kernels are in `norm_triton`.

Rows may have any stride; where the last axis has another stride than 1, or leading axes do not
flatten to one, the tensor is copied first. With M rows and N columns, b bytes per element of x and
y and r of the residual and the sum, the forward pass reads M·N·(b + r) and writes M·N·(b + r) bytes
and the statistics, 4·M each. The backward pass reads M·N·(b + 2r) and the statistics and writes
M·N·b, or M·N·(b + r) where x and the residual differ in dtype. Without a residual the forward pass
reads M·N·b. Weights and the shares of P programs, P·N·4 each, come to this.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels.norm_triton import (
    Shape,
    backward_shape,
    forward_shape,
    norm_backward,
    norm_backward_tiled,
    norm_forward,
    norm_forward_tiled,
)
from brickwork.kernels.triton_support import (
    TYPE_NAMES,
    Configuration,
    cdiv,
    launch_options,
    multiprocessors,
    register,
)
from brickwork.kernels.triton_support import unavailable_here as unavailable_here


def add_norm_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    cast: str,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """`add_norm` for checked arguments: y and the sum; without `residual_dtype` the sum is x, and
    the second result is empty."""
    first = cast == "before_weight"
    y, s, _, _ = _add_norm(x, residual, weight, bias, eps, kind == "layer", first, residual_dtype)
    return y, s


def _rows(t: Tensor | None, columns: int) -> Tensor | None:
    """(M, N) with columns side by side: a view where strides allow it, else a copy."""
    if t is None:
        return None
    flat = t.reshape(t.numel() // columns, columns)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _strides(*tensors: Tensor | None) -> tuple[int, list[int]]:
    """The largest of 8, 4, 1 that divides every row stride, and the strides in it."""
    strides = [0 if t is None else t.stride(0) for t in tensors]
    unit = next(u for u in (8, 4, 1) if all(stride % u == 0 for stride in strides))
    return unit, [stride // unit for stride in strides]


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    cast_first: bool,
    sum_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the rounded sum (empty without `sum_dtype`), rstd and (if `centred`) mean, in float32."""
    y, s, rstd, mean = results = _empty_results(x, centred, sum_dtype)
    if x.numel() == 0:
        return results
    N = x.shape[-1]
    x_MN, r_MN = _rows(x, N), _rows(residual, N)
    assert x_MN is not None
    unit, (x_stride, r_stride) = _strides(x_MN, r_MN)
    wide = 4 in (x.element_size(), s.element_size())
    shape = forward_shape(N, narrow=not (wide or centred))
    sums = s if sum_dtype is not None else None
    parameters = weight.contiguous(), None if bias is None else bias.contiguous()
    pointers = (x_MN, r_MN, *parameters, y, sums, rstd, mean)
    flags = {"CENTRED": centred, "CAST_FIRST": cast_first}
    M = x_MN.shape[0]
    if shape.whole:
        norm_forward[(cdiv(M, shape.rows),)](
            *pointers, x_stride, r_stride, M, eps, N, unit, shape.rows, shape.block,
            **flags, **launch_options(shape.warps, registers=shape.registers),
        )  # fmt: skip
    else:
        norm_forward_tiled[(M,)](
            *pointers, x_stride, r_stride, eps, N, unit, shape.block,
            **flags, **launch_options(shape.warps, registers=shape.registers),
        )  # fmt: skip
    return results


def _backward(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    residual_dtype: torch.dtype | None,
    centred: bool,
    cast_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx in dy's dtype, the same in `residual_dtype` (empty if None), and the gradients of weight
    and bias (empty without)."""
    N = dy.shape[-1]
    dx, dr = _empty_dx(dy, residual_dtype)
    if dy.numel() == 0:
        none = weight.new_empty(0)
        return dx, dr, torch.zeros_like(weight), none if bias is None else torch.zeros_like(bias)
    dy_MN, ds_MN, s_MN = _rows(dy, N), _rows(ds, N), _rows(s, N)
    assert dy_MN is not None
    unit, strides = _strides(dy_MN, ds_MN, s_MN)
    M = dy_MN.shape[0]
    shape = backward_shape(N, s.element_size())
    resident = 16 // shape.warps * multiprocessors(dy)  # all that registers have room for
    programs = min(cdiv(M, shape.rows), resident)
    dw = torch.empty(programs, N, dtype=torch.float32, device=dy.device)
    db = None if bias is None else torch.empty_like(dw)
    kernel = norm_backward if shape.whole else norm_backward_tiled
    kernel[(programs,)](
        dy_MN, ds_MN, s_MN, weight.contiguous(), rstd, mean,
        dx, None if residual_dtype is None else dr, dw, db,
        *strides, M, N, unit, shape.rows, shape.block, centred, cast_first,
        **launch_options(shape.warps, registers=shape.registers),
    )  # fmt: skip
    none = dw.new_empty(0, dtype=weight.dtype)
    db_N = none if bias is None or db is None else db.sum(0).to(bias.dtype)
    return dx, dr, dw.sum(0).to(weight.dtype), db_N


def _empty_results(
    x: Tensor, centred: bool, sum_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device, rows = x.device, x.shape[:-1]
    return (
        torch.empty(x.shape, dtype=x.dtype, device=device),
        torch.empty(x.shape if sum_dtype else (0,), dtype=sum_dtype or x.dtype, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows if centred else (0,), dtype=torch.float32, device=device),
    )


def _empty_dx(dy: Tensor, residual_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    other = dy.shape if residual_dtype else (0,)
    return (
        torch.empty(dy.shape, dtype=dy.dtype, device=dy.device),
        torch.empty(other, dtype=residual_dtype or dy.dtype, device=dy.device),
    )


def _fake_forward(
    x: Tensor, residual: Any, weight: Any, bias: Any, eps: Any, centred: bool, cast_first: Any,
    sum_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _empty_results(x, centred, sum_dtype)


def _fake_backward(
    dy: Tensor, ds: Any, s: Any, weight: Tensor, bias: Tensor | None, rstd: Any, mean: Any,
    residual_dtype: torch.dtype | None, *flags: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, dr = _empty_dx(dy, residual_dtype)
    db = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return dx, dr, torch.empty_like(weight), db


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, ctx.centred, ctx.cast_first, sum_dtype = inputs
    _, s, rstd, mean = output
    ctx.x_dtype = x.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x if sum_dtype is None else s, weight, bias, rstd, mean)
    ctx.mark_non_differentiable(rstd, mean, *((s,) if sum_dtype is None else ()))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, ds: Tensor | None, *_: None) -> tuple[Any, ...]:
    s, weight, bias, rstd, mean = ctx.saved_tensors
    if dy is None:  # nothing came through the norm
        dr = None if ds is None or ctx.residual_dtype is None else ds.to(ctx.residual_dtype)
        return None if ds is None else ds.to(ctx.x_dtype), dr, *[None] * 6
    other = None if ctx.residual_dtype in (None, dy.dtype) else ctx.residual_dtype
    dx, dr, dw, db = _add_norm_backward(
        dy, ds, s, weight, bias, rstd, mean, other, ctx.centred, ctx.cast_first
    )
    if other is None:
        dr = None if ctx.residual_dtype is None else dx
    return dx, dr, dw, None if bias is None else db, None, None, None, None


_add_norm = register(
    "add_norm_triton", _forward, _fake_forward, gradients=_gradients, setup_context=_setup_context
)
_add_norm_backward = register("add_norm_triton_backward", _backward, _fake_backward)


COLUMNS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
ENDS = (64, 1024, 8192, 16384, 32768, 65536)


def configurations() -> Iterator[Configuration]:
    """Every shape of tiles with all that registers can be asked to hold, and with less of it the
    shapes at both ends, as a thread has 16 values in all between; float16 is like bfloat16."""
    bf16, fp32 = torch.bfloat16, torch.float32
    yield from distinct(
        describe("add_norm", columns, bf16, residual=fp32, centred=True) for columns in COLUMNS
    )
    yield from distinct(describe("add_norm", columns, bf16, residual=bf16) for columns in ENDS)
    columns_of_fp32 = (512, 8192, 16384, 65536)
    yield from distinct(
        describe("add_norm", columns, fp32, residual=fp32) for columns in columns_of_fp32
    )
    for columns in (4096, 16384):
        yield from describe("add_norm", columns, bf16, residual=fp32)


def distinct(described: Iterable[Iterator[Configuration]]) -> Iterator[Configuration]:
    """All but those whose row has more tiles than another's: a loop goes through them."""
    seen = set()
    for found in itertools.chain.from_iterable(described):
        tiled = found.kernel in (norm_forward_tiled, norm_backward_tiled)
        constants = {name: value for name, value in found.constants.items() if name != "N"}
        what = (found.kernel.__name__, *constants.items())
        if not tiled or what not in seen:
            yield found
        seen.add(what)


def describe(
    op: str,
    columns: int,
    x: torch.dtype,
    *,
    residual: torch.dtype | None = None,
    centred: bool = False,
    cast_first: bool = False,
) -> Iterator[Configuration]:
    """The forward and the backward kernel for rows of `columns`; weights in x's dtype."""
    flags = {"N": columns, "UNIT": 8, "CENTRED": centred, "CAST_FIRST": cast_first}
    bias = x if centred else None
    s, other = residual or x, None if residual == x else residual
    name = f"{columns} {TYPE_NAMES[x]}" + (f" + {TYPE_NAMES[residual]}" if residual else "")
    name += " layer" * centred + " before_weight" * cast_first
    shape = forward_shape(columns, narrow=not (4 in (x.itemsize, s.itemsize) or centred))
    dtypes = {"X": x, "R": residual, "W": x, "B": bias, "Y": x, "S": residual}
    yield _describe(
        f"{op} forward {name}",
        norm_forward if shape.whole else norm_forward_tiled,
        {**dtypes, "RSTD": torch.float32, "MEAN": torch.float32},
        {"x_stride": "i32", "r_stride": "i32", "M": "i32", "eps": "fp32"},
        {**flags, "ROWS": shape.rows, "BLOCK": shape.block},
        shape,
        narrow_loads=(1 + centred) * (shape.rows > 1),  # weight and bias are narrower than 4 warps
    )
    shape = backward_shape(columns, s.itemsize)
    dtypes = {"DY": x, "DS": residual, "S": s, "W": x, "DX": x, "DR": other}
    single = dict.fromkeys(("RSTD", "MEAN", "DW"), torch.float32)
    rows = 1 if shape.rows == 1 else 2  # of one thread
    yield _describe(
        f"{op} backward {name}",
        norm_backward if shape.whole else norm_backward_tiled,
        {**dtypes, **single, "DB": torch.float32 if centred else None},
        {"dy_stride": "i32", "ds_stride": "i32", "s_stride": "i32", "M": "i32"},
        {**flags, "ROWS": shape.rows, "BLOCK": shape.block},
        shape,
        narrow_loads=rows * (1 + centred) + (shape.rows > 2),  # statistics, and the weight
    )


def _describe(
    name: str,
    kernel: Any,
    dtypes: dict[str, torch.dtype | None],
    numbers: dict[str, str],
    constants: dict[str, Any],
    shape: Shape,
    narrow_loads: int,
) -> Configuration:
    given = {pointer: "*" + TYPE_NAMES[dtype] for pointer, dtype in dtypes.items() if dtype}
    missing = dict.fromkeys(pointer for pointer, dtype in dtypes.items() if not dtype)
    names = kernel.arg_names
    return Configuration(
        kernel,
        name,
        {**given, **{n: kind for n, kind in numbers.items() if n in names}},
        {**missing, **{n: value for n, value in constants.items() if n in names}},
        tuple(given),
        num_warps=shape.warps,
        num_stages=1,
        registers=shape.registers,
        launch_warps=True,
        wide_loads=True,
        narrow_loads=narrow_loads,
    )
