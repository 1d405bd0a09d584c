"""How the kernels of `experts_triton` are launched: tiles, the plan of their rows, grids.

S tokens, C width, F hidden width, E experts, K chosen; N = S K choices, sorted by expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brickwork.kernels.backend import triton_interprets
from brickwork.kernels.experts_grouped import Groups, sort_by_expert
from brickwork.kernels.experts_triton_kernels import (
    activation_grad_kernel,
    combine_kernel,
    gate_up_kernel,
    rows_kernel,
    weight_grad_kernel,
)
from brickwork.kernels.triton_support import cdiv, next_power_of_2


class Tile(NamedTuple):
    """A program's share of a product: BM by BN results, summed over BK terms at a time."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The choices, sorted, and their tiles of BM rows: tile t belongs to expert `expert_of_tile[t]`
    (E: to none), and expert e has the tiles before `tile_ends[e]`. `wide`: see `is_wide`."""

    groups: Groups
    BM: int
    wide: bool
    tiles: int
    expert_of_tile: Tensor
    tile_ends: Tensor


def plan(
    indices_SK: Tensor, num_experts: int, BM: int, wide: bool, order: Tensor | None = None
) -> Plan:
    """Sort the choices and lay out the row tiles; nothing is read on the host."""
    groups = sort_by_expert(indices_SK, num_experts, order)
    tile_ends = (groups.counts + (BM - 1)).div_(BM, rounding_mode="floor").cumsum_(0)
    # Σ_e ceil(n_e / BM) is never more.
    tiles = indices_SK.numel() // BM + min(num_experts, indices_SK.numel())
    every = torch.arange(tiles, device=indices_SK.device)
    expert_of_tile = torch.searchsorted(tile_ends, every, right=True)
    return Plan(groups, BM, wide, tiles, expert_of_tile, tile_ends)


def gate_up_rows(x: Tensor, gate_up: Tensor, p: Plan, K: int, keep: bool) -> tuple[Tensor, Tensor]:
    """The activations (N, F), sorted, and with `keep` gate and up (N, 2F).

    Bytes, of b-byte numbers: at least the x and experts used once; loaded by programs, with
    f = ⌈F / BN⌉ and R row tiles, `b C (f N + 2 F R)`. Stored: `b N F`, with `keep` `3 b N F`.
    """
    (E, twice, C), N = gate_up.shape, len(p.groups.order)
    F = twice // 2
    activation, both = _empty(x, N, F), _empty(x, N if keep else 0, twice)
    tile = row_tile("gate_up", p.BM, x.dtype, p.wide)
    gate_up_kernel[(p.tiles * cdiv(F, tile.BN),)](
        x, gate_up, p.groups.order, p.groups.ends, p.expert_of_tile, p.tile_ends, activation, both,
        p.tiles, int(keep), E, K, C, F, *gate_up.stride(), **_options(tile, x.dtype),
    )  # fmt: skip
    return activation, both


def rows_by_expert(rows: Tensor, weight: Tensor, p: Plan) -> Tensor:
    """Each expert's sorted rows (N, I) times its matrix in `weight` (E, I, J): (N, J).

    Bytes: at least rows and the experts used once; loaded, with j = ⌈J / BN⌉ and R row tiles,
    `b I (j N + J R)`. Stored: `b N J`.
    """
    E, I, J = weight.shape
    out = _empty(rows, len(rows), J)
    tile = row_tile("rows", p.BM, rows.dtype, p.wide)
    rows_kernel[(p.tiles * cdiv(J, tile.BN),)](
        rows, weight, p.groups.ends, p.expert_of_tile, p.tile_ends, out, p.tiles,
        E, I, J, *weight.stride(), **_options(tile, rows.dtype),
    )  # fmt: skip
    return out


def activation_grad(
    grad_y: Tensor, down: Tensor, both: Tensor, weights: Tensor, p: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of gate and up (N, 2F), the weighted activations (N, F), both sorted, and the
    gradient of the weights (N), in the order of the choices, float32.

    Bytes: at least grad_y, the experts used and gate and up once; loaded, with f = ⌈F / BN⌉ and R
    row tiles, `b C (f N + F R) + 2 b N F`. Stored: `3 b N F + 4 f N`.
    """
    (E, C, F), N = down.shape, len(both)
    tile = row_tile("activation_grad", p.BM, down.dtype, p.wide)
    columns = cdiv(F, tile.BN)
    grad_both, scaled = _empty(both, N, 2 * F), _empty(both, N, F)
    parts = torch.empty(N, columns, dtype=torch.float32, device=both.device)
    activation_grad_kernel[(p.tiles * columns,)](
        grad_y, down, both, weights, p.groups.order, p.groups.ends, p.expert_of_tile, p.tile_ends,
        grad_both, scaled, parts, p.tiles, E, weights.shape[1], C, F, *down.stride(),
        **_options(tile, down.dtype),
    )  # fmt: skip
    return grad_both, scaled, parts.sum(1)


def weight_grad(
    left: Tensor, right: Tensor, p: Plan, K: int, out: Tensor, *, gather_left: bool
) -> None:
    """Fill `out` (E, I, J) with `Σ_r left_r ⊗ right_r` over each expert's rows, and with 0 for an
    expert without; one side's rows are the tokens' (S, ·), the other's sorted already (N, ·).

    Bytes: at least left and right once; loaded `b N (⌈J / BN⌉ I + ⌈I / BM⌉ J)`. Stored: `b E I J`.
    """
    E, I, J = out.shape
    tile = weight_tile(left.dtype, p.wide)
    weight_grad_kernel[(E * cdiv(I, tile.BM) * cdiv(J, tile.BN),)](
        left, right, p.groups.order, p.groups.ends, out, K, I, J, out.stride(0), gather_left,
        **_options(tile, left.dtype),
    )  # fmt: skip


def combine(rows: Tensor, place: Tensor, weights: Tensor | None, out: Tensor) -> Tensor:
    """`out` (S, C), filled with `Σ_k w_sk rows[place_sk]`, summed in float32; without weights they
    are 1.

    Bytes: `b N C` loaded and the S C of `out` stored, nothing twice, besides places and weights.
    """
    (S, K), C = place.shape, rows.shape[1]
    tile = combine_tile(C)
    combine_kernel[(cdiv(S, tile.BM), cdiv(C, tile.BN))](
        rows, place, weights, out, S, K, C, tile.BM, tile.BN, num_warps=tile.warps
    )
    return out


def is_wide(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether all rows hold multiples of 8 numbers and begin at multiples of 16 bytes, so that they
    are loaded 16 bytes at a time."""
    return all(
        t.data_ptr() % 16 == 0 and all(s == 1 or s % 8 == 0 for s in (*t.stride(), t.shape[-1]))
        for t in (x, gate_up, down)
    )


def row_block(choices: int, num_experts: int, dtype: torch.dtype, wide: bool) -> int:
    """How many rows a tile has, by how many an expert has on average."""
    mean = choices // num_experts
    if not wide:
        return 32
    if mean < 24:
        return 16
    return 64 if mean < 96 or dtype == torch.float32 else 128


def row_tile(kernel: str, BM: int, dtype: torch.dtype, wide: bool) -> Tile:
    """The tile of a product over rows: the largest that spills on no chip, in 64 KiB of shared
    memory on AMD and 99 KiB on NVIDIA."""
    BN = 128 if kernel == "rows" and wide else 64
    if kernel == "activation_grad" and dtype == torch.float32:
        return Tile(BM, BN, 16, 8, 2)
    if not wide:
        return Tile(BM, BN, 64 // dtype.itemsize, 8 if kernel == "activation_grad" else 4, 2)
    return Tile(BM, BN, 128 // dtype.itemsize, 8 if BM == 128 else 4, 3)


def weight_tile(dtype: torch.dtype, wide: bool) -> Tile:
    """The tile of a weight gradient."""
    if not wide:
        return Tile(64, 64, 16, 8, 2)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    return Tile(128, 128, 64, 8, 3)


def combine_tile(C: int) -> Tile:
    """Tokens and columns of a program that adds up rows: 4096 numbers."""
    BN = min(1024, next_power_of_2(C))
    return Tile(4096 // BN, BN, 0, 4, 1)


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: exactly, unless PyTorch may use TF32 for its own products."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.version.hip is None
    return "tf32" if dtype == torch.float32 and tf32 else "ieee"


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


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def plan_of(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, order: Tensor | None = None
) -> Plan:
    wide = is_wide(x, gate_up, down)
    BM = row_block(indices.numel(), len(down), x.dtype, wide)
    return plan(indices, len(down), BM, wide, order)


def near(weight: Tensor) -> Tensor:
    """Copied if offsets within a tile would not fit into 32 bits."""
    return weight if sum(weight.stride()[1:]) < 2**24 else weight.contiguous()
