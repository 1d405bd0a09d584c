"""Experts in Triton: grouped products over tokens sorted by expert, forward and backward.

S tokens, C width, F hidden width, E experts, K chosen; N = S K choices, sorted by expert.

| launch             | computes, for each expert's rows                      | rows of x or dy |
|--------------------|-------------------------------------------------------|-----------------|
| `gate_up_rows`     | gate, up = x Wᵀ; activation = silu(gate) up           | gathered        |
| `rows_by_expert`   | activation downᵀ, or d(gate, up) W                    | sorted already  |
| `activation_grad`  | dy down, and from it d(gate, up), w activation, dw    | gathered        |
| `weight_grad`      | Σ_r d(gate, up)ᵀ x, or Σ_r dyᵀ (w activation)         | gathered        |
| `combine`          | Σ_k over a token's rows, weighted or not, in float32  | sorted already  |

The host never learns how many rows an expert has: it starts N / BM + E row tiles, as many as there
can be, and those without rows end at once. Products are summed in float32. Gate and up are rounded
to the dtype of the products before anything uses them, so that training and inference agree, and
kept for the backward pass, which computes the activation again; the experts' outputs are not kept:
dw = ⟨down dy, activation⟩. Nothing is added atomically: results are deterministic.

On a GPU `auto` takes these kernels and not `torch.nn.functional.grouped_mm` (backend `"grouped"`).
That was *not measured on a GPU*. It rests on what these save - gathered copies of x and dy, passes
over gate and up, and for float32, float16 and older GPUs waiting for the device - against what
vendors' products may gain. `bench/gpu.sh` times both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import experts_triton_launch as launch
from brickwork.kernels.experts import product_dtype
from brickwork.kernels.experts_triton_kernels import (
    activation_grad_kernel,
    combine_kernel,
    gate_up_kernel,
    rows_kernel,
    weight_grad_kernel,
)
from brickwork.kernels.triton_support import (
    TYPE_NAMES,
    Configuration,
    register,
)


def experts_triton(
    x_SC: Tensor, gate_up_EFC: Tensor, down_ECF: Tensor, indices_SK: Tensor, weights_SK: Tensor
) -> Tensor:
    """`experts` by Triton kernels; the arguments are checked already.

    The experts may have any strides; x, the weights and the incoming gradient are copied where they
    are not contiguous.
    """
    dtype = product_dtype(x_SC, gate_up_EFC, down_ECF)
    x, gate_up, down = (t.to(dtype) for t in (x_SC, gate_up_EFC, down_ECF))
    floats = (x, gate_up, down, weights_SK)
    train = torch.is_grad_enabled() and any(t.requires_grad for t in floats)
    return experts_forward(x, gate_up, down, indices_SK.long(), weights_SK, x_SC.dtype, train)[0]


def _forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y (S, C) in `dtype`; with `train` also gate and up (N, 2F) and the order (N)."""
    if 0 in (x.numel(), down.numel(), indices.numel()):
        empty = _fake_forward(x, gate_up, down, indices, weights, dtype, train)
        return empty[0].zero_(), empty[1].zero_(), empty[2].zero_()
    x, gate_up, down = x.contiguous(), launch.near(gate_up), launch.near(down)
    p = launch.plan_of(x, gate_up, down, indices)
    activation, both = launch.gate_up_rows(x, gate_up, p, indices.shape[1], train)
    out = launch.rows_by_expert(activation, down.mT, p)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    launch.combine(out, p.groups.place, weights.contiguous(), y)
    return y, both, p.groups.order if train else indices.new_empty(0)


def _backward(
    grad_y: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    both: Tensor,
    order: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, gate_up, down and weights; those not wanted are empty."""
    grads = _fake_backward(grad_y, x, gate_up, down, indices, weights, both, order, wanted)
    grad_x, grad_gate_up, grad_down, grad_weights = grads
    if 0 in (x.numel(), down.numel(), indices.numel()):
        for grad in grads:
            grad.zero_()
        return grads
    x, gate_up, down = x.contiguous(), launch.near(gate_up), launch.near(down)
    p, K = launch.plan_of(x, gate_up, down, indices, order), indices.shape[1]
    grad_y = grad_y.to(x.dtype).contiguous()
    grad_both, scaled, grad_weight = launch.activation_grad(
        grad_y, down, both, weights.contiguous(), p
    )
    if wanted[0]:
        launch.combine(launch.rows_by_expert(grad_both, gate_up, p), p.groups.place, None, grad_x)
    if wanted[1]:
        launch.weight_grad(grad_both, x, p, K, grad_gate_up, gather_left=False)
    if wanted[2]:
        launch.weight_grad(grad_y, scaled, p, K, grad_down, gather_left=True)
    if wanted[3]:
        grad_weights = grad_weight.view(weights.shape).to(weights.dtype)
    return grad_x, grad_gate_up, grad_down, grad_weights


def _fake_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    N = indices.shape[0] * indices.shape[1] if train else 0
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(N, gate_up.shape[1]),
        indices.new_empty(N),
    )


def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    both: Tensor,
    order: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = zip((x, gate_up, down, weights), wanted)
    grad_x, grad_gate_up, grad_down, grad_weights = (
        torch.empty(t.shape if want else (0,) * t.dim(), dtype=t.dtype, device=t.device)
        for t, want in inputs
    )
    return grad_x, grad_gate_up, grad_down, grad_weights


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.dtype, ctx.train = inputs
    _, both, order = output
    ctx.mark_non_differentiable(both, order)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, both, order)


def _gradients(ctx: Any, grad_y: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if grad_y is None:
        return (None,) * 7
    *inputs, both, order = ctx.saved_tensors
    if not ctx.train:  # the forward pass did not know that a gradient would be asked for
        _, both, order = experts_forward(*inputs, ctx.dtype, True)
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[2], needs[4]]
    found = experts_backward(grad_y, *inputs, both, order, wanted)
    grad_x, grad_gate_up, grad_down, grad_weights = (
        grad if want else None for grad, want in zip(found, wanted)
    )
    return grad_x, grad_gate_up, grad_down, None, grad_weights, None, None


experts_forward = register(
    "experts_triton",
    _forward,
    _fake_forward,
    gradients=_gradients,
    setup_context=_setup_context,
)
experts_backward = register("experts_triton_backward", _backward, _fake_backward)


_DTYPES = (
    (torch.bfloat16, "ieee"),
    (torch.float16, "ieee"),
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
)


def configurations() -> Iterator[Configuration]:
    """What the dispatch above can launch, for compilation ahead of time; of float16, whose programs
    differ from bfloat16's in the names of instructions only, each kernel in its largest tiles."""
    for dtype, how in _DTYPES:
        for wide, C, F in ((True, 2056, 1032), (False, 999, 1001)):
            if dtype == torch.float16 and not wide:
                continue
            means = (96,) if dtype == torch.float16 else (0, 24, 96)
            for BM in sorted({launch.row_block(mean, 1, dtype, wide) for mean in means}):
                for kernel, about, strides in (
                    (gate_up_kernel, "gate_up", (2 * F * C, C, 1)),
                    (rows_kernel, "down", (C * F, 1, F)),
                    (rows_kernel, "gate_up backward", (2 * F * C, C, 1)),
                    (activation_grad_kernel, "activation_grad", (C * F, F, 1)),
                ):
                    if how == "tf32" and not wide and kernel is not gate_up_kernel:
                        continue  # all with the same tiles, masks and products
                    tile = launch.row_tile(kernel.__name__.removesuffix("_kernel"), BM, dtype, wide)
                    yield _configuration(kernel, about, tile, dtype, how, C, F, strides)
            tile = launch.weight_tile(dtype, wide)
            for about in ("gate_up weight_grad", "down weight_grad"):
                yield _configuration(weight_grad_kernel, about, tile, dtype, how, C, F)
            if how == "ieee" and (wide or dtype != torch.float32):
                for about in ("combine weighted", "combine"):
                    yield _configuration(
                        combine_kernel, about, launch.combine_tile(C), dtype, how, C, F
                    )


def _configuration(
    kernel: Any,
    about: str,
    tile: launch.Tile,
    dtype: torch.dtype,
    how: str,
    C: int,
    F: int,
    strides: tuple[int, ...] = (),
) -> Configuration:
    down = about.startswith("down")
    I, J = (F, C) if about == "down" else (C, F) if down else (2 * F, C)
    known: dict[str, Any] = {"E": 64, "K": 8, "C": C, "F": F, "I": I, "J": J, "OE": I * J}
    known |= {"GATHER_LEFT": down, "PRECISION": how, "INTERPRETED": False}
    known |= {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK}
    if about == "combine":
        known["WEIGHTS"] = None
    names = kernel.arg_names
    constants = {n: known[n] for n in names if n in known}
    constants |= dict(zip((n for n in names if n in ("WE", "WF", "WC", "WI", "WJ")), strides))
    types = dict.fromkeys(("ORDER", "ENDS", "EXPERT_OF_TILE", "TILE_ENDS", "PLACE"), "*i64")
    types |= dict.fromkeys(("WEIGHTS", "DWEIGHTS"), "*fp32")
    types |= dict.fromkeys(("tiles", "keep", "S"), "i32")
    own = f"*{TYPE_NAMES[dtype]}"
    signature = {n: types.get(n, own) for n in names if n not in constants}
    matrix = kernel is not combine_kernel and (dtype != torch.float32 or how == "tf32")
    shape = "x".join(str(size) for size in (tile.BM, tile.BN, tile.BK) if size)
    kind = TYPE_NAMES[dtype] if dtype != torch.float32 else f"fp32 {how}"
    return Configuration(
        kernel,
        f"experts {about} {shape} C={C} {kind}",
        signature,
        constants,
        tuple(n for n, kind in signature.items() if kind.startswith("*")),
        tile.warps,
        tile.stages,
        wide_loads=C % 8 == 0,
        narrow_loads=64 if kernel is activation_grad_kernel else 32,  # of rows' places and weights
        matrix=matrix,
    )
