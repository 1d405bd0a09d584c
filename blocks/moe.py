"""The sparse mixture-of-experts block and the losses that keep its router balanced.

C width, F hidden width of an expert, E experts, K chosen for a token.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from brickwork.kernels.backend import autocast_off, compute_dtype
from brickwork.kernels.checks import (
    check_flag,
    check_floating,
    check_integer,
    check_one_of,
    values_readable,
)
from brickwork.kernels.experts import check_expert_indices, experts

Balance = Literal["per_layer", "pooled"]


class MoEOutput(NamedTuple):
    """`y` (..., C) in x's dtype, and how it was routed: the raw `router_logits` (..., E), the
    chosen experts' `indices` (..., K) and their `weights` (..., K)."""

    y: Tensor
    router_logits: Tensor
    indices: Tensor
    weights: Tensor


class Router(nn.Linear):
    """The linear map from tokens to expert logits, `x Wᵀ`, in float32 (float64 for float64)
    whatever the dtype of x, of the weight, or of autocast.

    >>> Router(4, 8, bias=False)(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype
    torch.float32
    """

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input, self.weight)
        with autocast_off(input):
            bias = None if self.bias is None else self.bias.to(dtype)
            return nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


class MoE(nn.Module):
    """Sparse mixture of SwiGLU experts: every token goes to the K experts that its router prefers.

    `p = softmax(router(x))` over all experts; `y = Σ_k p_k · down_k(silu(gate_k x) · up_k x)` over
    the K largest p. Logits, softmax and choice are float32 with autocast off, so that a narrower
    dtype of the experts does not change the choice; equal probabilities go to the lowest index.
    No token is dropped.

    Papers: Shazeer et al., *Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer*, 2017; Muennighoff et al., *OLMoE: Open Mixture-of-Experts Language
    Models*, 2024.

    Arguments:
        dim: width C of input and output.
        hidden_dim: width F of one expert.
        num_experts: E.
        top_k: K, at most E.
        normalize: divide the K chosen p by their sum. With `top_k=1` every weight is then 1 and
            the router learns from the balancing losses only, which is warned about.

    Called with x (..., C) and, to replay choices made before (recomputation, reinforcement
    learning), `routing`, expert indices (..., K): their weights come from the present p. Returns
    MoEOutput(y, router_logits, indices, weights). Raises ValueError for other shapes or dtypes and
    for expert indices out of range.

    Parameters: `router.weight` (E, C), `gate_up` (E, 2F, C) with the gate's rows first, and `down`
    (E, C, F). The last two are no `nn.Linear`: adapters name them as target parameters
    (`MoE.expert_parameters`).

    >>> moe = MoE(4, hidden_dim=8, num_experts=6, top_k=2)
    >>> out = moe(torch.randn(2, 3, 4))
    >>> out.y.shape, out.router_logits.shape, out.indices.shape
    (torch.Size([2, 3, 4]), torch.Size([2, 3, 6]), torch.Size([2, 3, 2]))
    >>> again = moe(torch.randn(2, 3, 4), routing=out.indices)
    >>> torch.equal(again.indices, out.indices)
    True
    """

    expert_parameters = ("gate_up", "down")

    def __init__(
        self, dim: int, *, hidden_dim: int, num_experts: int, top_k: int, normalize: bool = False
    ) -> None:
        super().__init__()
        check_integer("dim", dim, least=1)
        check_integer("hidden_dim", hidden_dim, least=1)
        check_integer("num_experts", num_experts, least=1)
        _check_top_k(top_k, num_experts)
        check_flag("normalize", normalize)
        if normalize and top_k == 1 and num_experts > 1:
            warnings.warn(
                "normalize with top_k = 1 makes every weight 1: the router gets no gradient from y",
                stacklevel=2,
            )
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.router = Router(dim, num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the router and each expert as `nn.Linear` would: U(±1/√columns)."""
        self.router.reset_parameters()
        for weight in (self.gate_up, self.down):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, *, routing: Tensor | None = None) -> MoEOutput:
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have shape (..., {self.dim}), got {tuple(x.shape)}")
        leading = x.shape[:-1]
        router_logits = self.router(x)
        probabilities = _softmax(router_logits)
        if routing is None:
            indices = _top_k(probabilities, self.top_k)
        else:
            if routing.shape != (*leading, self.top_k):
                raise ValueError(
                    f"routing must have x's leading shape and top_k = {self.top_k} columns, "
                    f"{(*leading, self.top_k)}, got {tuple(routing.shape)}"
                )
            check_expert_indices("routing", routing, self.num_experts)
            indices = routing.long()
        weights = probabilities.gather(-1, indices)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        y = experts(
            x.reshape(-1, self.dim),
            self.gate_up,
            self.down,
            indices.reshape(-1, self.top_k),
            weights.reshape(-1, self.top_k),
        )
        return MoEOutput(y.reshape(x.shape), router_logits, indices, weights)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, normalize={self.normalize}"
        )


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor],
    *,
    top_k: int,
    mask: Tensor | None = None,
    balance: Balance = "per_layer",
) -> Tensor:
    """How unevenly a router spreads its tokens: K at perfect balance, E if one expert gets all.

    `E Σ_e f_e P_e`, where f_e counts how often e is among the K choices of a token and P_e is its
    mean probability (the softmax over all experts), both over the real tokens. f_e carries no
    gradient. `"per_layer"` takes the mean of the layers' losses; `"pooled"` takes f and P over the
    tokens of all layers first, as transformers and the original RishAI do, which hides layers that
    collapse in opposite ways.

    Paper: Fedus, Zoph and Shazeer, *Switch Transformers: Scaling to Trillion Parameter Models with
    Simple and Efficient Sparsity*, 2022, equations 4 to 6 (there for K = 1).

    Arguments:
        router_logits: raw logits, not probabilities, (..., E), or one such tensor for each layer.
        top_k: K, at most E.
        mask: which tokens are real, bool or any dtype that holds only 0 and 1; of the logits'
            leading shape, or (B, T) for logits (B·T, E).
        balance: `"per_layer"` or `"pooled"`; equal for one layer.

    Returns:
        A float32 scalar (float64 for float64); 0, with a graph, where no token is real.

    Raises:
        ValueError: no layer, a wrong shape, dtype, mask value, `top_k` or `balance`.

    >>> load_balancing_loss(torch.zeros(3, 8), top_k=2)
    tensor(2.)
    """
    check_one_of("balance", balance, ("per_layer", "pooled"))
    layers = _real_rows(router_logits, mask)
    num_experts = layers[0][0].shape[-1]
    _check_top_k(top_k, num_experts)
    counts, masses, totals = [], [], []
    for logits, real in layers:
        probabilities = logits.softmax(-1)
        chosen = _top_k(probabilities, top_k).flatten()
        ones = real.long().repeat_interleave(top_k)
        counts.append(ones.new_zeros(num_experts).scatter_add(0, chosen, ones))
        masses.append(torch.where(real[:, None], probabilities, 0).sum(0))
        totals.append(real.sum())
    if balance == "pooled":
        counts, masses, totals = ([torch.stack(t).sum(0)] for t in (counts, masses, totals))
    losses = []
    for count, mass, total in zip(counts, masses, totals):
        rows = total.clamp(min=1).to(mass.dtype)
        losses.append(num_experts * (count / rows * (mass / rows)).sum())
    return torch.stack(losses).mean()


def router_z_loss(
    router_logits: Tensor | Sequence[Tensor], *, mask: Tensor | None = None
) -> Tensor:
    """The mean over real tokens of `logsumexp(logits)²`, which keeps router logits small.

    Paper: Zoph et al., *ST-MoE: Designing Stable and Transferable Sparse Expert Models*, 2022,
    equation 5.

    Arguments:
        router_logits, mask: as for `load_balancing_loss`; the mean of the layers' losses.

    Returns:
        A float32 scalar (float64 for float64); 0, with a graph, where no token is real.

    Raises:
        ValueError: no layer, a wrong shape, dtype or mask value.

    >>> router_z_loss(torch.zeros(3, 8)).round(decimals=4)  # (ln 8)²
    tensor(4.3241)
    """
    losses = []
    for logits, real in _real_rows(router_logits, mask):
        squares = torch.where(real, logits.logsumexp(-1).square(), 0)
        losses.append(squares.sum() / real.sum().clamp(min=1))
    return torch.stack(losses).mean()


def _real_rows(
    router_logits: Tensor | Sequence[Tensor], mask: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """For each layer the logits (R, E) in the compute dtype, 0 in rows that are not real, and which
    rows are real (R,); all on the first layer's device."""
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    if not layers:
        raise ValueError("router_logits must hold at least one layer, got none")
    if mask is not None and values_readable(mask) and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask must hold only 0 and 1 (or False and True)")
    found = []
    for layer in layers:
        check_floating(router_logits=layer)
        if layer.ndim == 0 or layer.shape[-1:] != layers[0].shape[-1:]:
            raise ValueError(
                f"router_logits must have shape (..., E) with one E, got {tuple(layer.shape)} "
                f"beside {tuple(layers[0].shape)}"
            )
        logits = layer.reshape(-1, layer.shape[-1]).to(layers[0].device, compute_dtype(layer))
        if mask is None:
            real = logits.new_ones(len(logits), dtype=torch.bool)
        else:
            flat = layer.ndim == 2 and mask.ndim == 2 and mask.numel() == len(layer)
            if mask.shape != layer.shape[:-1] and not flat:
                raise ValueError(
                    f"mask must have the leading shape of router_logits, {tuple(layer.shape[:-1])},"
                    f" or (B, T) with B T rows of logits, got {tuple(mask.shape)}"
                )
            real = mask.reshape(-1).to(logits.device) != 0
        found.append((torch.where(real[:, None], logits, 0), real))
    return found


def _softmax(logits: Tensor) -> Tensor:
    """Probabilities over all experts, in float32 or float64 (autocast leaves a softmax alone)."""
    return logits.to(compute_dtype(logits)).softmax(-1)


def _top_k(probabilities: Tensor, top_k: int) -> Tensor:
    """Indices (..., K) of the largest probabilities, equal ones in the order of their index:
    `torch.topk` leaves the order of equals open."""
    return probabilities.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def _check_top_k(top_k: int, num_experts: int) -> None:
    check_integer("top_k", top_k, least=1)
    if top_k > num_experts:
        raise ValueError(f"top_k must be at most the number of experts, {num_experts}, got {top_k}")
