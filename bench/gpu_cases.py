"""What bench/gpu.py runs: for every op its sizes, the bytes or operations they need, and peers.

Bytes are the fewest that must move: each input read once, each result and gradient written once.
Peers compute the same from the same tensors; one whose package is not here is reported, not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu_peers import (
    expert_loop,
    fla_norm,
    grouped_experts,
    liger_add_norm,
    liger_cross_entropy,
    liger_rms_norm,
    liger_swiglu,
    quack_norm,
    vendor_conv,
    vendor_scan,
    vendor_ssd,
)
from torch import Tensor

from brickwork.kernels.add_norm import add_norm, add_norm_reference
from brickwork.kernels.causal_conv1d import causal_conv1d, causal_conv1d_reference
from brickwork.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from brickwork.kernels.experts import experts, experts_reference
from brickwork.kernels.rms_norm import rms_norm, rms_norm_reference
from brickwork.kernels.rope_qk import rope_qk, rope_qk_reference
from brickwork.kernels.selective_scan import selective_scan, selective_scan_reference
from brickwork.kernels.ssd_scan import ssd_scan, ssd_scan_reference
from brickwork.kernels.swiglu import swiglu, swiglu_reference

Run = Callable[..., Any]
HALF = torch.bfloat16


class Case(NamedTuple):
    """One op at one size.

    `ours(backend)` and `reference` take `tensors`; `floats` counts how many of these, from the
    first, have gradients. `moved` are the bytes of forward and of backward, or `operations` the
    floating-point operations. `loops`: the reference runs token by token, and is not timed.
    `whole`: gradients may be computed on the way forward, so the second time, with its bytes or
    operations, is of both ways together.
    """

    op: str
    size: str
    make: Callable[[torch.device], list[Tensor]]
    floats: int
    ours: Callable[[str], Run]
    reference: Run
    backends: tuple[str, ...] = ("triton",)
    moved: tuple[int, int] | None = None
    operations: tuple[int, int] | None = None
    peers: dict[str, Callable[[], Run]] = {}  # noqa: RUF012
    loops: bool = False
    whole: bool = False


TINY, CHECKED, TIMED = range(3)  # sizes: for the interpreter, for comparisons, for the clock


def outputs(result: Any) -> list[Tensor]:
    """The tensors of an op that gives one or several."""
    return [result] if isinstance(result, Tensor) else [t for t in result if t is not None]


def normal(*size: int, dtype: torch.dtype = HALF, shift: float = 0.0) -> Callable[..., Tensor]:
    """A maker of random tensors on a device."""
    return lambda device: (torch.randn(size, device=device) + shift).to(dtype)


def made(*makers: Callable[..., Tensor]) -> Callable[[torch.device], list[Tensor]]:
    return lambda device: [make(device) for make in makers]


def norm_cases(size: int) -> list[Case]:
    cases = []
    shapes = (
        ((4, 40),),
        ((65, 1000), (130, 4096), (33, 16384), (9, 40000)),
        ((8192, 4096), (8192, 8192), (4096, 16384)),
    )
    for rows, columns in shapes[size]:
        b = rows * columns * HALF.itemsize
        cases.append(
            Case(
                "add_norm",
                f"{rows} rows of {columns}",
                made(normal(rows, columns), normal(rows, columns), normal(columns)),
                3,
                lambda backend: (
                    lambda x, r, w: add_norm(x, r, w, residual_dtype=x.dtype, backend=backend)
                ),
                lambda x, r, w: add_norm_reference(x, r, w, residual_dtype=x.dtype),
                moved=(4 * b, 4 * b),
                peers={"Liger": liger_add_norm, "quack": quack_norm("rmsnorm", add=True)},
            )
        )
        cases.append(
            Case(
                "rms_norm",
                f"{rows} rows of {columns}",
                made(normal(rows, columns), normal(columns)),
                2,
                lambda backend: lambda x, w: rms_norm(x, w, backend=backend),
                rms_norm_reference,
                moved=(2 * b, 3 * b),
                peers={"Liger": liger_rms_norm, "quack": quack_norm("rmsnorm"), "fla": fla_norm},
            )
        )
    heads, width = ((6, 16), (1001, 128), (27030 * 24, 128))[size]
    b = heads * width * HALF.itemsize
    cases.append(
        Case(
            "rms_norm",
            f"QK-norm, {heads} heads of {width}",
            made(normal(heads, width), normal(width)),
            2,
            lambda backend: lambda x, w: rms_norm(x, w, backend=backend),
            rms_norm_reference,
            moved=(2 * b, 3 * b),
            peers={"Liger": liger_rms_norm, "quack": quack_norm("rmsnorm"), "fla": fla_norm},
        )
    )
    return cases


def elementwise_cases(size: int) -> list[Case]:
    B, T, H, G, D = ((1, 5, 2, 1, 8), (2, 300, 6, 2, 96), (4, 4096, 32, 8, 128))[size]
    inv_freq = 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    positions = torch.arange(T)[None]

    def rotate(function: Run, **options: Any) -> Run:
        def run(q: Tensor, k: Tensor) -> Any:
            given = {"inv_freq": inv_freq.float().to(q.device), "layout": "half", **options}
            return function(q, k, positions.to(q.device), **given)

        return run

    qk = 2 * B * T * (H + G) * D * HALF.itemsize
    rows, hidden = ((5, 24), (77, 5000), (8192, 14336))[size]
    gated = rows * hidden * HALF.itemsize
    return [
        Case(
            "rope_qk",
            f"{B} x {T} tokens, {H} + {G} heads of {D}",
            made(normal(B, T, H, D), normal(B, T, G, D)),
            2,
            lambda backend: rotate(rope_qk, backend=backend),
            rotate(rope_qk_reference),
            moved=(qk, qk),
        ),
        Case(
            "swiglu",
            f"{rows} rows of {hidden}",
            made(normal(rows, hidden), normal(rows, hidden)),
            2,
            lambda backend: lambda gate, up: swiglu(gate, up, backend=backend),
            swiglu_reference,
            moved=(3 * gated, 5 * gated),
            peers={"Liger": liger_swiglu},
        ),
    ]


def scan_cases(size: int) -> list[Case]:
    B, T, E, N, W = ((1, 6, 8, 4, 4), (2, 333, 200, 16, 4), (8, 2048, 3072, 16, 4))[size]
    H, P, S = ((2, 8, 16), (6, 64, 128), (48, 64, 128))[size]
    each, pair = B * T * E * HALF.itemsize, B * T * N * HALF.itemsize
    heads, states = B * T * H * P * HALF.itemsize, B * T * S * HALF.itemsize
    return [
        Case(
            "causal_conv1d",
            f"{B} x {T} tokens of {E}, width {W}",
            made(normal(B, T, E), normal(E, W), normal(E)),
            3,
            lambda backend: (
                lambda x, w, b: causal_conv1d(x, w, b, activation="silu", backend=backend).y
            ),
            lambda x, w, b: causal_conv1d_reference(x, w, b, activation="silu").y,
            moved=(2 * each, 3 * each),
            peers={"causal-conv1d": vendor_conv},
        ),
        Case(
            "selective_scan",
            f"{B} x {T} tokens of {E}, {N} states",
            lambda device: [
                *made(normal(B, T, E), normal(B, T, E, shift=-3))(device),
                -torch.rand(E, N, device=device) * 3,
                *made(normal(B, T, N), normal(B, T, N), normal(E, dtype=torch.float32))(device),
                *made(normal(B, T, E))(device),
            ],
            7,
            lambda backend: (
                lambda x, d, A, b, c, D, z: (
                    selective_scan(x, d, A, b, c, D=D, z=z, softplus=True, backend=backend).y
                )
            ),
            lambda x, d, A, b, c, D, z: (
                selective_scan_reference(x, d, A, b, c, D=D, z=z, softplus=True).y
            ),
            moved=(4 * each + 2 * pair, 7 * each + 4 * pair),
            peers={"mamba-ssm": vendor_scan},
            loops=True,
        ),
        Case(
            "ssd_scan",
            f"{B} x {T} tokens, {H} heads of {P}, {S} states",
            lambda device: [
                *made(normal(B, T, H, P), normal(B, T, H, shift=-3))(device),
                -torch.rand(H, device=device) * 3,
                *made(normal(B, T, 1, S), normal(B, T, 1, S))(device),
                *made(normal(H, dtype=torch.float32))(device),
            ],
            6,
            lambda backend: (
                lambda x, d, A, b, c, D: (
                    ssd_scan(x, d, A, b, c, D=D, softplus=True, backend=backend).y
                )
            ),
            lambda x, d, A, b, c, D: ssd_scan_reference(x, d, A, b, c, D=D, softplus=True).y,
            moved=(2 * heads + 2 * states, 3 * heads + 4 * states),
            backends=("triton", "chunked"),
            peers={"mamba-ssm": vendor_ssd},
            loops=True,
        ),
    ]


def product_cases(size: int) -> list[Case]:
    S, C, hidden, E, K = ((7, 16, 16, 3, 2), (500, 256, 192, 8, 2), (8192, 2048, 768, 128, 8))[size]
    T, V = ((6, 50), (300, 5000), (4096, 100352))[size]

    def routed(device: torch.device) -> list[Tensor]:
        gate_up = torch.randn(E, 2 * hidden, C, device=device) / C**0.5
        down = torch.randn(E, C, hidden, device=device) / hidden**0.5
        weights = torch.rand(S, K, device=device)
        indices = torch.rand(S, E, device=device).topk(K).indices
        tokens = torch.randn(S, C, device=device)
        return [*(t.to(HALF) for t in (tokens, gate_up, down)), weights, indices]

    def ours(backend: str) -> Run:
        return lambda x, gate_up, down, w, i: experts(x, gate_up, down, i, w, backend=backend)

    operations = 6 * S * K * C * hidden
    head = 2 * T * C * V
    return [
        Case(
            "experts",
            f"{S} tokens of {C}, {E} experts of {hidden}, top {K}",
            routed,
            4,
            ours,
            lambda x, gate_up, down, w, i: experts_reference(x, gate_up, down, i, w),
            backends=("triton", "grouped"),
            operations=(operations, 2 * operations),
            peers={"loop over experts": lambda: expert_loop, "transformers": grouped_experts},
            loops=True,
        ),
        Case(
            "cross_entropy",
            f"{T} tokens of {C}, vocabulary {V}",
            lambda device: [
                *made(normal(T, C), normal(V, C))(device),
                torch.randint(0, V, (T,), device=device),
            ],
            2,
            lambda backend: lambda x, w, labels: cross_entropy(x, w, labels, backend=backend),
            cross_entropy_reference,
            backends=("chunked",),
            operations=(head, 3 * head),
            whole=True,
            peers={"Liger": liger_cross_entropy},
        ),
    ]


def cases(size: int) -> list[Case]:
    """All of them at one of the sizes."""
    return [
        *norm_cases(size),
        *elementwise_cases(size),
        *scan_cases(size),
        *product_cases(size),
    ]
