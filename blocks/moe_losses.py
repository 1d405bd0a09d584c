"""The losses that keep a router balanced and its logits small.

E experts, K chosen for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from brickwork.blocks.router import check_top_k, largest
from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.checks import check_floating, check_one_of, values_readable

Balance = Literal["per_layer", "pooled"]


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
    layers = real_rows(router_logits, mask)
    num_experts = layers[0][0].shape[-1]
    check_top_k(top_k, num_experts)
    counts, masses, totals = [], [], []
    for logits, real in layers:
        probabilities = logits.softmax(-1)
        chosen = largest(probabilities, top_k).flatten()
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
    for logits, real in real_rows(router_logits, mask):
        squares = torch.where(real, logits.logsumexp(-1).square(), 0)
        losses.append(squares.sum() / real.sum().clamp(min=1))
    return torch.stack(losses).mean()


def real_rows(
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
