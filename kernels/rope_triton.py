"""`rope` and `rope_qk` in Triton: launches, ops and gradients. Its kernels: `rotation_triton`.

Queries and keys may have any strides; where channels do not lie side by side they are copied first.
Cosines and sines come as float32 tables, which plain operators compute from positions, so that a
compiler computes them once for all layers. The forward pass reads q, k and the table's rows (2·F·4
bytes per token, F half of the rotated channels), and writes as much as q and k and, with weights, 4
bytes per head; the backward pass reads and writes the same but, with weights, reads q, k and the 4
bytes per head too. Weights and the shares of P programs in their gradients, P·D·4 bytes in all,
come to this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from brickwork.kernels.rotation_triton import rotate, rotate_norm_backward
from brickwork.kernels.triton_support import (
    TYPE_NAMES,
    Configuration,
    cdiv,
    lanes,
    launch_options,
    multiprocessors,
    next_power_of_2,
    register,
)
from brickwork.kernels.triton_support import unavailable_here as unavailable_here


def rope_triton(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    cast: str = "once",
) -> tuple[Tensor, Tensor]:
    """q and k (B, T, H, D) turned by angles of which cos and sin (B or 1, T, 1, F) are given in
    float32, normalised first if there are weights; without k, the second result is empty."""
    interleaved, first = layout == "interleaved", cast == "before_weight"
    return _rope(q, k, cos, sin, q_weight, k_weight, eps, interleaved, first)[:2]


class Shape(NamedTuple):
    """Of the tiles: heads at a time, and their channels."""

    heads_q: int
    heads_k: int
    block: int
    warps: int
    registers: int


def tile_shape(
    H: int, G: int, F: int, tail: int, dtype: torch.dtype, interleaved: bool, lanes: int
) -> Shape:
    """8 pairs for each of 32 or 64 threads, as many as the keys have so much for; more heads than
    there are, if it takes them to give each thread 128 bits of every load."""
    block = next_power_of_2(F)
    while tail > 2 * block * (1 + interleaved):
        block *= 2  # threads without pairs, rather than a longer tail in each
    wide = block * (1 + interleaved)
    width = block + cdiv(tail, wide) * wide // 2
    keys = next_power_of_2(max(G or H, 1))
    warps = 2 if keys * width >= 512 and keys * wide * dtype.itemsize >= 1024 else 1
    room = 1 << max(256 * warps // width, 1).bit_length() - 1
    whole = 16 // dtype.itemsize * max(32 * warps, lanes) // wide
    heads_q, heads_k = (max(min(next_power_of_2(max(n, 1)), room), whole) for n in (H, G or H))
    return Shape(heads_q, heads_k, block, warps, 160 if tail else 128)


class _Problem:
    """What the launches of one call have in common."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        interleaved: bool,
        *strided: Tensor | None,
    ) -> None:
        batch, self.T, self.H, D = q.shape
        self.M = batch * self.T
        self.G = 0 if k is None else k.shape[2]
        self.F = cos.shape[-1]
        self.tail = D - 2 * self.F
        sizes = (self.H, self.G, self.F, self.tail)
        self.shape = tile_shape(*sizes, q.dtype, interleaved, lanes())
        self.table = 0 if cos.shape[0] == 1 else self.T
        self.tensors = [t if t is None or t.stride(3) == 1 else t.contiguous() for t in strided]
        strides = [0 if t is None or t.shape[i] == 1 else t.stride(i)
                   for t in self.tensors for i in range(3)]  # fmt: skip
        self.unit = next(u for u in (8, 4, 1) if all(stride % u == 0 for stride in strides))
        self.options = launch_options(self.shape.warps, registers=self.shape.registers)
        self.strides = [stride // self.unit for stride in strides]

    def constants(self, *flags: bool) -> tuple[int, ...]:
        s = self.shape
        sizes = (self.H, self.G, self.F, self.tail, self.unit)
        return (*sizes, s.heads_q, s.heads_k, s.block, *flags)


def _forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
    cast_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k, and the norms' rstd of each; empty where there is no k or no weight."""
    results = _fake_forward(q, k, cos, sin, q_weight)
    if results[0].numel() + results[1].numel():
        weights = [None if w is None else w.contiguous() for w in (q_weight, k_weight)]
        _rotate(q, k, cos, sin, results, weights, eps, interleaved, cast_first, False)
    return results


def _back(
    dq: Tensor, dk: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of q and k without a norm."""
    results = _fake_forward(dq, dk)
    if results[0].numel() + results[1].numel():
        _rotate(dq, dk, cos, sin, results, [None, None], 0.0, interleaved, False, True)
    return results[:2]


def _rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    results: tuple[Tensor, ...],
    weights: list[Tensor | None],
    eps: float,
    *flags: bool,
) -> None:
    problem = _Problem(q, k, cos, flags[0], q, k)
    qo, ko, *rstd = results
    rotate[(problem.M,)](
        *problem.tensors, qo, None if k is None else ko, cos.contiguous(), sin.contiguous(),
        *weights, *rstd, *problem.strides, problem.table, problem.T, eps,
        *problem.constants(*flags), **problem.options,
    )  # fmt: skip


def _backward(
    dq: Tensor,
    dk: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor | None,
    q_rstd: Tensor,
    k_rstd: Tensor,
    interleaved: bool,
    cast_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and their weights with a norm."""
    gq, gk, gqw, gkw = results = _fake_backward(dq, dk, q, k, cos, sin, q_weight, k_weight)
    if gq.numel() + gk.numel() == 0:
        return gq, gk, gqw.zero_(), gkw.zero_()
    problem = _Problem(q, k, cos, interleaved, dq, dk, q, k)
    shape = problem.shape
    resident = 2048 // shape.registers // shape.warps * multiprocessors(q)  # that registers allow
    for_k = min(problem.M, max(resident * problem.G // (problem.H + problem.G), min(problem.G, 1)))
    for_q = min(problem.M, max(resident - for_k, 1))
    shares = torch.empty(for_q + for_k, q.shape[-1], dtype=torch.float32, device=q.device)
    weights = [None if w is None else w.contiguous() for w in (q_weight, k_weight)]
    rotate_norm_backward[(for_q + for_k,)](
        *problem.tensors, gq, None if k is None else gk, cos.contiguous(), sin.contiguous(),
        *weights, q_rstd, k_rstd, shares, *problem.strides, problem.table, problem.T,
        problem.M, for_q, *problem.constants(interleaved, cast_first),
        **problem.options,
    )  # fmt: skip
    pairs = 2 * problem.F
    if interleaved:
        shares[:, :pairs] = rearrange(shares[:, :pairs], "p (two f) -> p (f two)", two=2)
    gqw = shares[:for_q].sum(0).to(q_weight.dtype)
    if k_weight is not None:
        gkw = shares[for_q:].sum(0).to(k_weight.dtype)
    return results[0], results[1], gqw, gkw


def _fake_forward(
    q: Tensor, k: Tensor | None, cos: Any = None, sin: Any = None, weight: Any = None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device, normed = q.device, weight is not None
    k_shape, k_dtype = ((0,), q.dtype) if k is None else (k.shape, k.dtype)
    return (
        torch.empty(q.shape, dtype=q.dtype, device=device),
        torch.empty(k_shape, dtype=k_dtype, device=device),
        torch.empty(q.shape[:3] if normed else (0,), dtype=torch.float32, device=device),
        torch.empty(
            k.shape[:3] if normed and k is not None else (0,), dtype=torch.float32, device=device
        ),
    )


def _fake_backward(
    dq: Tensor, dk: Any, q: Tensor, k: Tensor | None, cos: Any, sin: Any,
    q_weight: Tensor, k_weight: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    none = torch.empty(0, dtype=q_weight.dtype, device=q.device)
    weight = none if k_weight is None else torch.empty_like(k_weight)
    return *_fake_forward(q, k)[:2], torch.empty_like(q_weight), weight


def _fake_back(dq: Tensor, dk: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward(dq, dk)[:2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, cos, sin, q_weight, k_weight, _, ctx.interleaved, ctx.cast_first = inputs
    ctx.normed = q_weight is not None
    kept = (q, k, q_weight, k_weight, *output[2:]) if ctx.normed else ()
    ctx.save_for_backward(cos, sin, *kept)
    ctx.mark_non_differentiable(*output[2:], *((output[1],) if k is None else ()))
    ctx.set_materialize_grads(False)
    ctx.paired = k is not None


def _gradients(ctx: Any, dq: Tensor | None, dk: Tensor | None, *_: None) -> tuple[Any, ...]:
    cos, sin, *kept = ctx.saved_tensors
    none = (None,) * 3
    if ctx.normed:
        q, k, q_weight, k_weight, *rstd = kept
        dq = torch.zeros_like(q) if dq is None else dq
        dk = torch.zeros_like(k) if dk is None and k is not None else dk
        gq, gk, gqw, gkw = _rope_norm_backward(
            dq, dk, q, k, cos, sin, q_weight, k_weight, *rstd, ctx.interleaved, ctx.cast_first
        )
        if k is None:
            gk = gkw = None
        return gq, gk, None, None, gqw, gkw, *none
    if dq is not None and dk is not None:
        gq, gk = _rope_backward(dq, dk, cos, sin, ctx.interleaved)
        return gq, gk, None, None, None, None, *none
    pair = [None if d is None else _rope_backward(d, None, cos, sin, ctx.interleaved)[0]
            for d in (dq, dk if ctx.paired else None)]  # fmt: skip
    return *pair, None, None, None, None, *none


_rope = register(
    "rope_triton", _forward, _fake_forward, gradients=_gradients, setup_context=_setup_context
)
_rope_backward = register("rope_triton_backward", _back, _fake_back)
_rope_norm_backward = register("rope_norm_triton_backward", _backward, _fake_backward)


def configurations() -> Iterator[Configuration]:
    """Heads of common models, partly rotated, and narrow ones."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for normed in (False, True):
        yield from _describe(32, 8, 64, 0, bf16, "half", normed)
        yield from _describe(32, 8, 64, 0, bf16, "interleaved", normed)
        yield from _describe(16, 16, 32, 0, fp32, "half", normed)
        yield from _describe(16, 4, 32, 64, bf16, "half", normed)
        yield from _describe(16, 2, 32, 192, bf16, "half", normed)
        yield from _describe(32, 32, 16, 48, bf16, "interleaved", normed)
        yield from _describe(8, 1, 128, 0, bf16, "interleaved", normed)
    yield from _describe(4, 2, 16, 0, fp32, "interleaved", True)
    yield from _describe(12, 0, 64, 0, bf16, "half", False)


def _describe(
    H: int, G: int, F: int, tail: int, dtype: torch.dtype, layout: str, normed: bool
) -> Iterator[Configuration]:
    interleaved = layout == "interleaved"
    shape, on_amd = (tile_shape(H, G, F, tail, dtype, interleaved, n) for n in (32, 64))
    x, single = "*" + TYPE_NAMES[dtype], "*fp32"
    q_strides = dict.fromkeys(("q_b", "q_t", "q_h", "k_b", "k_t", "k_h"), "i32")
    dq_strides = dict.fromkeys(("dq_b", "dq_t", "dq_h", "dk_b", "dk_t", "dk_h"), "i32")
    tables = {"COS": single, "SIN": single, "QR": single, "KR": single}
    weights = {"QW": x, "KW": x} if normed else {}
    absent = dict.fromkeys((*(() if G else ("K", "KO")), *(() if normed else ("QW", "KW"))))
    names = TYPE_NAMES[dtype]
    name = f"{H}+{G} heads {2 * F}+{tail} {names} {layout}" + " with norm" * normed
    sizes = {"H": H, "G": G, "F": F, "TAIL": tail, "UNIT": 8}
    tiles = {"HEADS_Q": shape.heads_q, "HEADS_K": shape.heads_k, "BLOCK": shape.block}
    constants = {**sizes, **tiles, "CAST_FIRST": False}
    constants["INTERLEAVED"] = interleaved
    pointers = {n: x for n in ("Q", "K", "QO", "KO") if n not in absent} | tables | weights
    # Of tables, of which a token has one row, and of rstd.
    narrow = 8 if normed else 2
    backwards = not normed and layout == "half"
    for back in (False, True) if backwards else (False,):
        yield Configuration(
            rotate,
            f"rope {'backward' if back else 'forward'} {name}",
            {**pointers, **q_strides, "table": "i32", "T": "i32", "eps": "fp32"},
            {**constants, **absent, "BACK": back},
            tuple(pointers),
            num_warps=shape.warps,
            num_stages=1,
            registers=shape.registers,
            launch_warps=True,
            of_64_lanes={"HEADS_Q": on_amd.heads_q, "HEADS_K": on_amd.heads_k},
            wide_loads=True,
            narrow_loads=narrow,
        )
    if normed:
        pointers = dict.fromkeys(("DQ", "DK", "Q", "K", "GQ", "GK"), x) | tables | weights
        pointers["DW"] = single
        yield Configuration(
            rotate_norm_backward,
            f"rope backward {name}",
            {
                **pointers,
                **dq_strides,
                **q_strides,
                "table": "i32",
                "T": "i32",
                "M": "i32",
                "programs": "i32",
            },
            constants,
            tuple(pointers),
            num_warps=shape.warps,
            num_stages=1,
            registers=shape.registers,
            launch_warps=True,
            of_64_lanes={"HEADS_Q": on_amd.heads_q, "HEADS_K": on_amd.heads_k},
            wide_loads=True,
            narrow_loads=narrow,
        )
