"""Experts in Triton: grouped products over tokens sorted by expert, forward and backward.

S tokens, C width, F hidden width, E experts, K chosen; N = S K choices, sorted by expert.

Three products read tiles of rows of one expert, and one sums over an expert's rows:

| kernel             | computes, for the rows r of each expert                | rows of x or dy |
|--------------------|--------------------------------------------------------|-----------------|
| `_gate_up`         | gate, up = x Wᵀ; activation = silu(gate) up            | gathered        |
| `_rows`            | activation downᵀ, or d(gate, up) W                     | sorted already  |
| `_activation_grad` | dy down, and from it d(gate, up), w activation, dw     | gathered        |
| `_weight_grad`     | Σ_r d(gate, up)ᵀ x, or Σ_r dyᵀ (w activation)          | gathered        |
| `_combine`         | Σ_k of a token's rows, weighted or not, in float32     | sorted already  |

The host never learns how many rows an expert has: it starts `N / BM + E` row tiles, as many as
there can be, and those without rows end at once. Gate and up are rounded to the dtype of the
products before anything uses them, so that training and inference agree, and kept for the backward
pass, which computes the activation again; the experts' outputs are not kept. Nothing is added
atomically: results are deterministic.

`auto` prefers these kernels on a GPU to `torch.nn.functional.grouped_mm` (`"grouped"`). That was
not measured on a GPU: it rests on what is not done here (no gathered copy of x and dy, no pass over
gate and up, no host synchronisation for float32 and float16). `bench/gpu.sh` times both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from brickwork.kernels.backend import triton_interprets
from brickwork.kernels.experts_grouped import Groups, product_dtype, sort_by_expert
from brickwork.kernels.triton_support import (
    TYPE_NAMES,
    Configuration,
    cdiv,
    next_power_of_2,
    register,
    why_not,
)


class Tile(NamedTuple):
    """A program's share of a product: BM rows of BN columns, summed over BK terms at a time."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


# ---------------------------------------------------------------------------------------- kernels


@triton.jit
def _dot(a, b, sums, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter cannot multiply bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, columns, E: tl.constexpr, BM: tl.constexpr):
    """This program's expert (E: none), its rows, which of them there are, and its column tile.

    Eight row tiles go through all column tiles together, so that both operands are read again while
    they are in the cache.
    """
    program = tl.program_id(0)
    first = program // (8 * columns) * 8
    height = tl.minimum(tiles - first, 8)
    tile = first + program % (8 * columns) % height
    column = program % (8 * columns) // height
    e = tl.load(EXPERT_OF_TILE + tile)
    there = e < E
    before = there & (e > 0)
    start = tl.load(ENDS + e - 1, before, other=0)
    end = tl.load(ENDS + e, there, other=0)
    rows = start + (tile - tl.load(TILE_ENDS + e - 1, before, other=0)) * BM + tl.arange(0, BM)
    return e, rows, rows < end, column.to(tl.int64)


# The products over rows have the weights' rows on the first axis and the tokens' on the second: the
# matrix units want at least 64 on the first, and an expert may have few tokens.


@triton.jit(do_not_specialize=["tiles", "keep"])
def _gate_up(
    X, GATE_UP, ORDER, ENDS, EXPERT_OF_TILE, TILE_ENDS, ACTIVATION, BOTH, tiles, keep,
    E: tl.constexpr, K: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    WE: tl.constexpr, WF: tl.constexpr, WC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    e, rows, mine, column = _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, tl.cdiv(F, BN), E, BM)
    if e >= E:
        return
    token = tl.load(ORDER + rows, mine, other=0) // K
    f = column * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    a = GATE_UP + e * WE + f[:, None] * WF + c[None, :].to(tl.int64) * WC
    b = X + token[None, :] * C + c[:, None]
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for at in range(0, C, BK):
        inside = c < C - at
        real = (f < F)[:, None] & inside[None, :]
        x = tl.load(b, inside[:, None] & mine[None, :], other=0.0)
        gate = _dot(tl.load(a, real, other=0.0), x, gate, PRECISION, INTERPRETED)
        up = _dot(tl.load(a + F * WF, real, other=0.0), x, up, PRECISION, INTERPRETED)
        a += BK * WC
        b += BK
    kept = BOTH.dtype.element_ty
    gate = gate.to(kept)
    up = up.to(kept)
    real = (f < F)[:, None] & mine[None, :]
    if keep:
        both = BOTH + rows[None, :] * (2 * F) + f[:, None]
        tl.store(both, gate, real)
        tl.store(both + F, up, real)
    gate = gate.to(tl.float32)
    activation = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(ACTIVATION + rows[None, :] * F + f[:, None], activation.to(kept), real)


@triton.jit(do_not_specialize=["tiles"])
def _rows(
    A, W, ENDS, EXPERT_OF_TILE, TILE_ENDS, OUT, tiles,
    E: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    WE: tl.constexpr, WI: tl.constexpr, WJ: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    e, rows, mine, column = _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, tl.cdiv(J, BN), E, BM)
    if e >= E:
        return
    j = column * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    a = W + e * WE + j[:, None] * WJ + i[None, :].to(tl.int64) * WI
    b = A + rows[None, :] * I + i[:, None]
    sums = tl.zeros((BN, BM), tl.float32)
    for at in range(0, I, BK):
        inside = i < I - at
        left = tl.load(a, (j < J)[:, None] & inside[None, :], other=0.0)
        right = tl.load(b, inside[:, None] & mine[None, :], other=0.0)
        sums = _dot(left, right, sums, PRECISION, INTERPRETED)
        a += BK * WI
        b += BK
    out = OUT + rows[None, :] * J + j[:, None]
    tl.store(out, sums.to(OUT.dtype.element_ty), (j < J)[:, None] & mine[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _activation_grad(
    DY, DOWN, BOTH, WEIGHTS, ORDER, ENDS, EXPERT_OF_TILE, TILE_ENDS, DBOTH, SCALED, DWEIGHTS, tiles,
    E: tl.constexpr, K: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    WE: tl.constexpr, WC: tl.constexpr, WF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(F, BN)
    e, rows, mine, column = _row_tile(EXPERT_OF_TILE, TILE_ENDS, ENDS, tiles, columns, E, BM)
    if e >= E:
        return
    choice = tl.load(ORDER + rows, mine, other=0)
    f = column * BN + tl.arange(0, BN)
    c = tl.arange(0, BK)
    a = DOWN + e * WE + f[:, None] * WF + c[None, :].to(tl.int64) * WC
    b = DY + (choice // K)[None, :] * C + c[:, None]
    grad = tl.zeros((BN, BM), tl.float32)
    for at in range(0, C, BK):
        inside = c < C - at
        left = tl.load(a, (f < F)[:, None] & inside[None, :], other=0.0)
        right = tl.load(b, inside[:, None] & mine[None, :], other=0.0)
        grad = _dot(left, right, grad, PRECISION, INTERPRETED)
        a += BK * WC
        b += BK
    dtype = BOTH.dtype.element_ty
    real = (f < F)[:, None] & mine[None, :]
    at = rows[None, :] * (2 * F) + f[:, None]
    gate = tl.load(BOTH + at, real, other=0.0).to(tl.float32)
    up = tl.load(BOTH + at + F, real, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHTS + choice, mine, other=0.0).to(tl.float32)[None, :]
    chance = tl.sigmoid(gate)
    silu = gate * chance
    activation = silu * up
    tl.store(SCALED + rows[None, :] * F + f[:, None], (weight * activation).to(dtype), real)
    tl.store(DWEIGHTS + choice * columns + column, tl.sum(grad * activation, 0), mine)
    grad *= weight
    tl.store(DBOTH + at, (grad * up * (chance + silu * (1.0 - chance))).to(dtype), real)
    tl.store(DBOTH + at + F, (grad * silu).to(dtype), real)


@triton.jit
def _weight_grad(
    LEFT, RIGHT, ORDER, ENDS, OUT,
    K: tl.constexpr, I: tl.constexpr, J: tl.constexpr, OE: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (J + BN - 1) // BN
    tiles: tl.constexpr = (I + BM - 1) // BM * columns
    program = tl.program_id(0)
    e = (program // tiles).to(tl.int64)
    i = (program % tiles // columns).to(tl.int64) * BM + tl.arange(0, BM)
    j = (program % columns).to(tl.int64) * BN + tl.arange(0, BN)
    start = tl.load(ENDS + e - 1, e > 0, other=0)
    end = tl.load(ENDS + e)
    sums = tl.zeros((BM, BN), tl.float32)
    for at in range(start, end, BK):
        rows = at + tl.arange(0, BK)
        mine = rows < end
        token = tl.load(ORDER + rows, mine, other=0) // K
        if GATHER_LEFT:
            left_rows = token
            right_rows = rows
        else:
            left_rows = rows
            right_rows = token
        left = tl.load(
            LEFT + left_rows[None, :] * I + i[:, None], mine[None, :] & (i < I)[:, None], other=0.0
        )
        right = tl.load(
            RIGHT + right_rows[:, None] * J + j[None, :],
            mine[:, None] & (j < J)[None, :],
            other=0.0,
        )
        sums = _dot(left, right, sums, PRECISION, INTERPRETED)
    out = OUT + e * OE + i[:, None] * J + j[None, :]
    tl.store(out, sums.to(OUT.dtype.element_ty), (i < I)[:, None] & (j < J)[None, :])


@triton.jit(do_not_specialize=["S"])
def _combine(
    ROWS, PLACE, WEIGHTS, OUT, S,
    K: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    c = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    real = (s < S)[:, None] & (c < C)[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(K):
        place = tl.load(PLACE + s * K + k, s < S, other=0)
        rows = tl.load(ROWS + place[:, None] * C + c[None, :], real, other=0.0).to(tl.float32)
        if WEIGHTS is not None:
            rows *= tl.load(WEIGHTS + s * K + k, s < S, other=0.0).to(tl.float32)[:, None]
        sums += rows
    tl.store(OUT + s[:, None] * C + c[None, :], sums.to(OUT.dtype.element_ty), real)


# --------------------------------------------------------------------------------------- launches


def why_not_experts(*tensors: Tensor) -> str | None:
    """Why these kernels cannot run now on the floating arguments of `experts`, or None."""
    return why_not(*tensors)


def experts_triton(
    x_SC: Tensor, gate_up_EFC: Tensor, down_ECF: Tensor, indices_SK: Tensor, weights_SK: Tensor
) -> Tensor:
    """`experts` by Triton kernels; the arguments are checked already.

    The experts' weights may have any strides; other arguments are copied where they are not
    contiguous.
    """
    dtype = product_dtype(x_SC, gate_up_EFC, down_ECF)
    x, gate_up, down = (t.to(dtype) for t in (x_SC, gate_up_EFC, down_ECF))
    floats = (x, gate_up, down, weights_SK)
    train = torch.is_grad_enabled() and any(t.requires_grad for t in floats)
    y, _, _ = experts_forward(x, gate_up, down, indices_SK.long(), weights_SK, x_SC.dtype, train)
    return y


class Plan(NamedTuple):
    """The choices, sorted, and their tiles of BM rows: tile t belongs to expert `expert_of_tile[t]`
    (E: to none), and expert e has the tiles before `tile_ends[e]`."""

    groups: Groups
    BM: int
    tiles: int
    expert_of_tile: Tensor
    tile_ends: Tensor


def plan(indices_SK: Tensor, num_experts: int, BM: int, order: Tensor | None = None) -> Plan:
    """Sort the choices and lay out the row tiles; nothing is read on the host."""
    groups = sort_by_expert(indices_SK, num_experts, order)
    tile_ends = (groups.counts + (BM - 1)).div_(BM, rounding_mode="floor").cumsum_(0)
    # Σ_e ceil(n_e / BM) is never more.
    tiles = indices_SK.numel() // BM + min(num_experts, indices_SK.numel())
    every = torch.arange(tiles, device=indices_SK.device)
    return Plan(groups, BM, tiles, torch.searchsorted(tile_ends, every, right=True), tile_ends)


def gate_up_rows(x: Tensor, gate_up: Tensor, p: Plan, K: int, keep: bool) -> tuple[Tensor, Tensor]:
    """The activations (N, F), sorted, and with `keep` gate and up (N, 2F)."""
    (E, twice, C), N = gate_up.shape, len(p.groups.order)
    F = twice // 2
    activation, both = x.new_empty(N, F), x.new_empty(N if keep else 0, twice)
    tile = row_tile("gate_up", p.BM, x.dtype)
    _gate_up[(p.tiles * cdiv(F, tile.BN),)](
        x, gate_up, p.groups.order, p.groups.ends, p.expert_of_tile, p.tile_ends, activation, both,
        p.tiles, int(keep), E, K, C, F, *gate_up.stride(), **_options(tile, x.dtype),
    )  # fmt: skip
    return activation, both


def rows_by_expert(rows: Tensor, weight: Tensor, p: Plan) -> Tensor:
    """Each expert's sorted rows (N, I) times its matrix in `weight` (E, I, J): (N, J)."""
    E, I, J = weight.shape
    out = rows.new_empty(len(rows), J)
    tile = row_tile("rows", p.BM, rows.dtype)
    _rows[(p.tiles * cdiv(J, tile.BN),)](
        rows, weight, p.groups.ends, p.expert_of_tile, p.tile_ends, out, p.tiles,
        E, I, J, *weight.stride(), **_options(tile, rows.dtype),
    )  # fmt: skip
    return out


def activation_grad(
    grad_y: Tensor, down: Tensor, both: Tensor, weights: Tensor, p: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of gate and up (N, 2F), the weighted activations (N, F), both sorted, and the
    gradient of the weights (N), in the order of the choices, float32."""
    (E, C, F), N = down.shape, len(both)
    tile = row_tile("activation_grad", p.BM, down.dtype)
    columns = cdiv(F, tile.BN)
    grad_both, scaled = torch.empty_like(both), both.new_empty(N, F)
    parts = both.new_empty(N, columns, dtype=torch.float32)
    _activation_grad[(p.tiles * columns,)](
        grad_y, down, both, weights, p.groups.order, p.groups.ends, p.expert_of_tile, p.tile_ends,
        grad_both, scaled, parts, p.tiles, E, weights.shape[1], C, F, *down.stride(),
        **_options(tile, down.dtype),
    )  # fmt: skip
    return grad_both, scaled, parts.sum(1)


def weight_grad(
    left: Tensor, right: Tensor, groups: Groups, K: int, out: Tensor, *, gather_left: bool
) -> Tensor:
    """Fill `out` (E, I, J) with `Σ_r left_r ⊗ right_r` over each expert's rows, and 0 for experts
    without; the rows of one side are the tokens' (S, ·), of the other sorted already (N, ·)."""
    E, I, J = out.shape
    tile = weight_tile(left.dtype)
    _weight_grad[(E * cdiv(I, tile.BM) * cdiv(J, tile.BN),)](
        left, right, groups.order, groups.ends, out, K, I, J, out.stride(0), gather_left,
        **_options(tile, left.dtype),
    )  # fmt: skip
    return out


def combine(rows: Tensor, place: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`Σ_k w_sk rows[place_sk]` (S, C) in `dtype`, summed in float32."""
    (S, K), C = place.shape, rows.shape[1]
    out = rows.new_empty(S, C, dtype=dtype)
    BM, BN, warps = combine_tile(C)
    _combine[(cdiv(S, BM), cdiv(C, BN))](
        rows, place, weights, out, S, K, C, BM, BN, num_warps=warps
    )
    return out


def _options(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "BM": tile.BM,
        "BN": tile.BN,
        "BK": tile.BK,
        "PRECISION": precision(dtype),
        "INTERPRETED": triton_interprets(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: exactly, unless PyTorch may use TF32 for its own products."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.version.hip is None
    return "tf32" if dtype == torch.float32 and tf32 else "ieee"


def row_block(choices: int, num_experts: int, dtype: torch.dtype) -> int:
    """How many rows a tile has, by how many an expert has on average."""
    mean = choices // num_experts
    if mean < 32:
        return 16
    return 64 if mean < 96 or dtype == torch.float32 else 128


def row_tile(kernel: str, BM: int, dtype: torch.dtype) -> Tile:
    """The tile of a product over rows; a row of BK terms is 128 bytes."""
    BN = 128 if kernel == "rows" else 64
    return Tile(BM, BN, 128 // dtype.itemsize, 8 if BM == 128 else 4, 3)


def weight_tile(dtype: torch.dtype) -> Tile:
    """The tile of a weight gradient."""
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    return Tile(128, 128, 64, 8, 3)


def combine_tile(C: int) -> tuple[int, int, int]:
    """Tokens, columns and warps of a program that adds up rows: 4096 numbers."""
    BN = min(1024, next_power_of_2(C))
    return 4096 // BN, BN, 4


# -------------------------------------------------------------------------------------------- ops


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
    y, both, order = _fake_forward(x, gate_up, down, indices, weights, dtype, train)
    if _nothing_to_do(x, down, indices):
        return y.zero_(), both.zero_(), order.zero_()
    p = plan(indices, len(down), row_block(indices.numel(), len(down), x.dtype))
    activation, both = gate_up_rows(x.contiguous(), gate_up, p, indices.shape[1], train)
    out = rows_by_expert(activation, down.mT, p)
    y = combine(out, p.groups.place, weights.contiguous(), dtype)
    return y, both, p.groups.order if train else order


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
    if _nothing_to_do(x, down, indices):
        for grad in grads:
            grad.zero_()
        return grads
    p = plan(indices, len(down), row_block(indices.numel(), len(down), x.dtype), order)
    x, grad_y, K = x.contiguous(), grad_y.to(x.dtype).contiguous(), indices.shape[1]
    grad_both, scaled, grad_weight = activation_grad(grad_y, down, both, weights.contiguous(), p)
    if wanted[0]:
        grad_x = combine(rows_by_expert(grad_both, gate_up, p), p.groups.place, None, x.dtype)
    if wanted[1]:
        weight_grad(grad_both, x, p.groups, K, grad_gate_up, gather_left=False)
    if wanted[2]:
        weight_grad(grad_y, scaled, p.groups, K, grad_down, gather_left=True)
    if wanted[3]:
        grad_weights = grad_weight.view(weights.shape).to(weights.dtype)
    return grad_x, grad_gate_up, grad_down, grad_weights


def _nothing_to_do(x: Tensor, down: Tensor, indices: Tensor) -> bool:
    return 0 in (x.numel(), down.numel(), indices.numel())


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
    inputs = (x, gate_up, down, weights)
    shapes = [t.shape if want else (0,) * t.dim() for t, want in zip(inputs, wanted)]
    grad_x, grad_gate_up, grad_down, grad_weights = map(Tensor.new_empty, inputs, shapes)
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


# ------------------------------------------------------------------------------------------ checks


def configurations() -> Iterator[Configuration]:
    """What the dispatch above can launch, for compilation ahead of time."""
    for dtype, how in _DTYPES:
        for BM in sorted({row_block(mean, 1, dtype) for mean in (1, 32, 96)}):
            for kernel, about, sizes in _PRODUCTS_OVER_ROWS:
                tile = row_tile(kernel.__name__.strip("_"), BM, dtype)
                yield _configuration(kernel, about, tile, dtype, how, sizes)
        tile = weight_tile(dtype)
        for gather_left, about in ((False, " of gate and up"), (True, " of down")):
            sizes = {"I": 2048, "J": 1024, "OE": 2048 * 1024, "GATHER_LEFT": gather_left}
            yield _configuration(_weight_grad, about, tile, dtype, how, sizes)
        if how == "ieee":
            BM, BN, warps = combine_tile(2048)
            tile = Tile(BM, BN, 0, warps, 3)
            yield _configuration(_combine, " weighted", tile, dtype, how, {})
            yield _configuration(_combine, "", tile, dtype, how, {"WEIGHTS": None})


_DTYPES = (
    (torch.bfloat16, "ieee"),
    (torch.float16, "ieee"),
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
)
_SIZES = {"E": 64, "K": 8, "C": 2048, "F": 1024}
_DOWN = {"I": 1024, "J": 2048, "WE": 2048 * 1024, "WI": 1, "WJ": 1024}
_GATE_UP = {"I": 2048, "J": 2048, "WE": 2048 * 2048, "WI": 2048, "WJ": 1}
_PRODUCTS_OVER_ROWS: tuple[tuple[Any, str, dict[str, Any]], ...] = (
    (_gate_up, "", {"WE": 2048 * 2048, "WF": 2048, "WC": 1}),
    (_rows, " times down", _DOWN),
    (_rows, " times gate and up", _GATE_UP),
    (_activation_grad, "", {"WE": 2048 * 1024, "WC": 1024, "WF": 1}),
)
_TYPES = dict.fromkeys(("ORDER", "ENDS", "EXPERT_OF_TILE", "TILE_ENDS", "PLACE"), "*i64")
_TYPES |= dict.fromkeys(("WEIGHTS", "DWEIGHTS"), "*fp32")
_TYPES |= dict.fromkeys(("tiles", "keep", "S"), "i32")


def _configuration(
    kernel: Any, about: str, tile: Tile, dtype: torch.dtype, how: str, sizes: dict[str, Any]
) -> Configuration:
    constants = {**_SIZES, **sizes, "BM": tile.BM, "BN": tile.BN, "BK": tile.BK}
    constants |= {"PRECISION": how, "INTERPRETED": False}
    names = kernel.arg_names
    constants = {n: constants[n] for n in names if n in constants}
    signature = {n: _TYPES.get(n, f"*{TYPE_NAMES[dtype]}") for n in names if n not in constants}
    kind = TYPE_NAMES[dtype] if dtype != torch.float32 else how
    shape = "x".join(str(size) for size in (tile.BM, tile.BN, tile.BK) if size)
    product = kernel is not _combine
    return Configuration(
        kernel,
        f"experts {kernel.__name__.strip('_')}{about} {shape} {kind}",
        signature,
        constants,
        tuple(n for n, t in signature.items() if t.startswith("*")),
        tile.warps,
        tile.stages,
        matrix=product and (dtype != torch.float32 or how == "tf32"),
    )
