"""More cases of bench/gpu.py, for comparison only: every op's options together, at odd sizes."""

from __future__ import annotations

from typing import Any

import torch
from gpu_cases import TINY, Case, Run, made, normal
from torch import Tensor

from brickwork.kernels.add_norm import add_norm, add_norm_reference
from brickwork.kernels.causal_conv1d import causal_conv1d, causal_conv1d_reference
from brickwork.kernels.rope import rope, rope_reference
from brickwork.kernels.selective_scan import selective_scan, selective_scan_reference
from brickwork.kernels.ssd_scan import ssd_scan, ssd_scan_reference


def option_cases(size: int) -> list[Case]:
    """The options of the norms, of rope, and of what runs along a sequence."""
    tiny = size == TINY
    B, T = (1, 5) if tiny else (2, 301)
    E, N, W = (3, 2, 3) if tiny else (130, 16, 4)
    H, P, S, G = (2, 3, 4, 2) if tiny else (6, 48, 80, 3)
    wide: Any = {"dtype": torch.float32}

    def decays(*shape: int) -> Any:
        return lambda device: -torch.rand(shape, device=device) * 3

    return [
        Case(
            "add_norm",
            f"layer, bias, residual in float32, {B * T} rows of {E}",
            made(normal(B * T, E), normal(B * T, E, **wide), normal(E, **wide), normal(E, **wide)),
            4,
            lambda backend: _layer(add_norm, backend=backend),
            _layer(add_norm_reference),
        ),
        Case(
            "rope",
            f"interleaved, partial, {B} x {T} tokens, {H} heads of {2 * W}",
            made(normal(B, T, H, 2 * W)),
            1,
            lambda backend: _rotate(rope, 2 * (W - 1), backend=backend),
            _rotate(rope_reference, 2 * (W - 1)),
        ),
        Case(
            "causal_conv1d",
            f"every option, reversed, {B} x {T} tokens of {E}",
            made(normal(B, T, E), normal(E, W), normal(E), normal(B, E, W - 1)),
            4,
            lambda backend: _conv(causal_conv1d, backend=backend),
            _conv(causal_conv1d_reference),
        ),
        Case(
            "selective_scan",
            f"every option, reversed, {B} x {T} tokens of {E}, {N} states",
            made(
                *(normal(B, T, E), normal(B, T, E, shift=-1), decays(E, N)),
                *(normal(B, T, N), normal(B, T, N), normal(E, **wide), normal(B, T, E)),
                *(normal(E, **wide), normal(B, E, N, **wide)),
            ),
            9,
            lambda backend: _scan(selective_scan, backend=backend),
            _scan(selective_scan_reference),
        ),
        Case(
            "ssd_scan",
            f"every option, reversed, {B} x {T} tokens, {H} heads of {P}, {G} groups, {S} states",
            made(
                *(normal(B, T, H, P), normal(B, T, H, shift=-1), decays(H)),
                *(normal(B, T, G, S), normal(B, T, G, S), normal(H, P, **wide)),
                *(normal(B, T, H, P), normal(H, **wide), normal(B, H, P, S, **wide)),
            ),
            9,
            lambda backend: _scan(ssd_scan, backend=backend),
            _scan(ssd_scan_reference),
        ),
    ]


def _layer(function: Run, **options: Any) -> Run:
    def run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
        given = {"kind": "layer", "residual_dtype": residual.dtype, **options}
        return function(x, residual, weight, bias, **given)

    return run


def _rotate(function: Run, rotary_dim: int, **options: Any) -> Run:
    def run(x: Tensor) -> Any:
        at = torch.arange(rotary_dim // 2, device=x.device)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) * 3
        given = {"inv_freq": 100.0 ** (-at / rotary_dim * 2), "layout": "interleaved", **options}
        return function(x, positions, rotary_dim=rotary_dim, **given)

    return run


def _padded_and_packed(x: Tensor) -> dict[str, Tensor]:
    """Some tokens of padding, and sequences of seven tokens."""
    at = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    return {"mask": at % 5 != 3, "seq_ids": at // 7}


def _conv(function: Run, **options: Any) -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        given = {"activation": "silu", "reverse": True, "initial_state": state, **options}
        return function(x, weight, bias, **_padded_and_packed(x), **given)

    return run


def _scan(function: Run, **options: Any) -> Run:
    def run(*tensors: Tensor) -> Any:
        given = dict(zip(("D", "z", "delta_bias", "initial_state"), tensors[5:]))
        options.update(softplus=True, reverse=True, **_padded_and_packed(tensors[0]))
        return function(*tensors[:5], **given, **options)

    return run
