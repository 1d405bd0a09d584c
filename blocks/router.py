"""Routers: the map from tokens to expert logits, and the rule that makes choices of them.

C width, E experts, K chosen for a token, G groups of experts, M of them that a token may use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from brickwork.kernels.backend import autocast_off, compute_dtype
from brickwork.kernels.checks import check_integer


class RoutingRule(Protocol):
    """What `MoE` makes of router logits; a router names its own as the attribute `rule`.

    `MoE` keeps the rule itself, so that the router may be replaced by an adapter or a quantised
    layer around it. A rule holds no tensors.
    """

    @property
    def scale(self) -> float:
        """Factor on the weights."""

    def scores(self, logits: Tensor) -> Tensor:
        """Affinities (..., E), at least 0, in float32 or float64; the weights are made of these."""

    def choose(self, preferences: Tensor, top_k: int) -> Tensor:
        """Indices (..., K) of the experts to take; preferences are scores plus selection bias."""

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ValueError if K of E experts cannot always be chosen."""


@dataclass(frozen=True)
class SoftmaxRule:
    """`softmax(logits)` over all experts, of which the K largest are chosen.

    >>> SoftmaxRule().scores(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    scale: float = 1.0

    def scores(self, logits: Tensor) -> Tensor:
        return softmax(logits)

    def choose(self, preferences: Tensor, top_k: int) -> Tensor:
        return largest(preferences, top_k)

    def check(self, num_experts: int, top_k: int) -> None:
        pass


@dataclass(frozen=True)
class SigmoidRule:
    """`sigmoid(logits)`; the K largest within the best groups are chosen (see `SigmoidRouter`)."""

    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def scores(self, logits: Tensor) -> Tensor:
        return logits.to(compute_dtype(logits)).sigmoid()

    def choose(self, preferences: Tensor, top_k: int) -> Tensor:
        if self.top_groups < self.num_groups:
            grouped = preferences.unflatten(-1, (self.num_groups, -1))
            best = max(1, top_k // self.top_groups)
            ranks = grouped.sort(dim=-1, descending=True).values[..., :best].sum(-1)
            allowed = torch.zeros_like(ranks, dtype=torch.bool)
            allowed = allowed.scatter(-1, largest(ranks, self.top_groups), True)
            preferences = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return largest(preferences, top_k)

    def check(self, num_experts: int, top_k: int) -> None:
        if num_experts % self.num_groups:
            raise ValueError(
                f"num_groups must divide the number of experts, {num_experts}, "
                f"got {self.num_groups}"
            )
        within = num_experts // self.num_groups * self.top_groups
        if top_k > within:
            raise ValueError(
                f"top_k must be at most the number of experts in top_groups = {self.top_groups} "
                f"groups, {within}, got {top_k}"
            )


class Router(nn.Linear):
    """The linear map from tokens to expert logits, `x Wᵀ`, in float32 (float64 for float64)
    whatever the dtype of x, of the weight, or of autocast. Its rule is the softmax.

    >>> Router(4, 8, bias=False)(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype
    torch.float32
    """

    rule: RoutingRule = SoftmaxRule()

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input, self.weight)
        with autocast_off(input):
            bias = None if self.bias is None else self.bias.to(dtype)
            return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


class SigmoidRouter(Router):
    """A router that scores every expert by itself, as DeepSeek-V3's: `s = sigmoid(x Wᵀ)`.

    The experts stand in G equal groups. A group's rank is the sum of its ⌊K / M⌋ (at least 1)
    largest preferences; of the M groups of highest rank the K experts of largest preference are
    chosen, where the preference is s plus the selection bias that `MoE(selection_bias=True)` keeps.
    The weights are made of s alone: `s_e / Σ s` over the chosen with `MoE(normalize=True)`, else
    `s_e`, both times `scale`.

    Paper: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, equations 12 to 16 and section 2.1.2
    on choosing nodes first (there M nodes).

    Arguments:
        dim: width C of the tokens.
        num_experts: E.
        num_groups: G, which divides E.
        top_groups: M, at most G; None for all.
        scale: factor on the weights.
        bias: give the linear map a bias, which also counts in the weights.

    Called with x (..., C); returns logits (..., E). Raises ValueError for sizes that do not fit,
    also to K when `MoE` takes it.

    >>> from brickwork.blocks import MoE
    >>> router = SigmoidRouter(4, num_experts=6, num_groups=3, top_groups=1)
    >>> moe = MoE(4, hidden_dim=8, num_experts=6, top_k=2, normalize=True, router=router)
    >>> groups = moe(torch.randn(5, 4)).indices // 2
    >>> bool((groups[:, 0] == groups[:, 1]).all())
    True
    """

    def __init__(
        self,
        dim: int,
        *,
        num_experts: int,
        num_groups: int = 1,
        top_groups: int | None = None,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        check_integer("dim", dim, least=1)
        check_integer("num_experts", num_experts, least=1)
        check_integer("num_groups", num_groups, least=1)
        top_groups = num_groups if top_groups is None else top_groups
        check_integer("top_groups", top_groups, least=1)
        if top_groups > num_groups:
            raise ValueError(
                f"top_groups must be at most num_groups, {num_groups}, got {top_groups}"
            )
        if (
            isinstance(scale, bool)
            or not isinstance(scale, (int, float))
            or not 0 < scale < math.inf
        ):
            raise ValueError(f"scale must be a finite number above 0, got {scale!r}")
        super().__init__(dim, num_experts, bias=bias)
        self.rule = SigmoidRule(num_groups, top_groups, float(scale))
        self.rule.check(num_experts, 1)

    def extra_repr(self) -> str:
        rule = self.rule
        return f"{super().extra_repr()}, {rule}"


def softmax(logits: Tensor) -> Tensor:
    """Probabilities over all experts, in float32 or float64 (autocast leaves a softmax alone)."""
    return logits.to(compute_dtype(logits)).softmax(-1)


def largest(values: Tensor, count: int) -> Tensor:
    """Indices (..., count) of the largest values, equal ones in the order of their index:
    `torch.topk` leaves the order of equals open; ONNX's operator of that name does not, and ONNX
    has no stable sort."""
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return values.topk(count, dim=-1).indices
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise unless K experts can be chosen of E."""
    check_integer("top_k", top_k, least=1)
    if top_k > num_experts:
        raise ValueError(f"top_k must be at most the number of experts, {num_experts}, got {top_k}")
