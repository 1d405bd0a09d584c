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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brickwork.kernels.backend import triton_interprets
from brickwork.kernels.experts import product_dtype
from brickwork.kernels.experts_grouped import Groups, sort_by_expert
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
    cdiv,
    next_power_of_2,
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
    x, gate_up, down = x.contiguous(), _near(gate_up), _near(down)
    p = _plan(x, gate_up, down, indices)
    activation, both = gate_up_rows(x, gate_up, p, indices.shape[1], train)
    out = rows_by_expert(activation, down.mT, p)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    combine(out, p.groups.place, weights.contiguous(), y)
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
    x, gate_up, down = x.contiguous(), _near(gate_up), _near(down)
    p, K = _plan(x, gate_up, down, indices, order), indices.shape[1]
    grad_y = grad_y.to(x.dtype).contiguous()
    grad_both, scaled, grad_weight = activation_grad(grad_y, down, both, weights.contiguous(), p)
    if wanted[0]:
        combine(rows_by_expert(grad_both, gate_up, p), p.groups.place, None, grad_x)
    if wanted[1]:
        weight_grad(grad_both, x, p, K, grad_gate_up, gather_left=False)
    if wanted[2]:
        weight_grad(grad_y, scaled, p, K, grad_down, gather_left=True)
    if wanted[3]:
        grad_weights = grad_weight.view(weights.shape).to(weights.dtype)
    return grad_x, grad_gate_up, grad_down, grad_weights


def _plan(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, order: Tensor | None = None
) -> Plan:
    wide = is_wide(x, gate_up, down)
    BM = row_block(indices.numel(), len(down), x.dtype, wide)
    return plan(indices, len(down), BM, wide, order)


def _near(weight: Tensor) -> Tensor:
    """Copied if offsets within a tile would not fit into 32 bits."""
    return weight if sum(weight.stride()[1:]) < 2**24 else weight.contiguous()


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
            for BM in sorted({row_block(mean, 1, dtype, wide) for mean in means}):
                for kernel, about, strides in (
                    (gate_up_kernel, "gate_up", (2 * F * C, C, 1)),
                    (rows_kernel, "down", (C * F, 1, F)),
                    (rows_kernel, "gate_up backward", (2 * F * C, C, 1)),
                    (activation_grad_kernel, "activation_grad", (C * F, F, 1)),
                ):
                    if how == "tf32" and not wide and kernel is not gate_up_kernel:
                        continue  # all with the same tiles, masks and products
                    tile = row_tile(kernel.__name__.removesuffix("_kernel"), BM, dtype, wide)
                    yield _configuration(kernel, about, tile, dtype, how, C, F, strides)
            tile = weight_tile(dtype, wide)
            for about in ("gate_up weight_grad", "down weight_grad"):
                yield _configuration(weight_grad_kernel, about, tile, dtype, how, C, F)
            if how == "ieee" and (wide or dtype != torch.float32):
                for about in ("combine weighted", "combine"):
                    yield _configuration(combine_kernel, about, combine_tile(C), dtype, how, C, F)


def _configuration(
    kernel: Any,
    about: str,
    tile: Tile,
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
    wide = C % 8 == 0 and how != "tf32"  # TF32 has to turn operands around, number by number
    return Configuration(
        kernel,
        f"experts {about} {shape} C={C} {kind}",
        signature,
        constants,
        tuple(n for n, kind in signature.items() if kind.startswith("*")),
        tile.warps,
        tile.stages,
        wide_loads=wide,
        narrow_loads=64 if kernel is activation_grad_kernel else 32,  # of rows' places and weights
        matrix=matrix,
    )
