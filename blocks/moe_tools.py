"""What trainers, adapters and quantisers ask of a model with a mixture of experts.

L layers, E experts, K chosen for a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brickwork.blocks.moe import MoE
from brickwork.blocks.moe_losses import real_rows
from brickwork.blocks.selection_bias import SelectionBias


@dataclass(frozen=True)
class RouterStatistics:
    """How the routers of L layers spread their tokens; see `router_statistics`.

    `counts` (L, E): how often each expert was chosen. `load` (L, E): its share of the choices.
    `load_entropy` (L): of the load, over ln E, so 1 where all are equal. `router_entropy` (L): mean
    over tokens of the entropy of the softmax of the logits, in nats. `max_violation` (L): largest
    load times E, minus 1. `dropped`: tokens that were not computed: 0, always.
    """

    counts: Tensor
    load: Tensor
    load_entropy: Tensor
    router_entropy: Tensor
    max_violation: Tensor
    dropped: int = 0

    def as_dict(self, prefix: str = "router/") -> dict[str, float]:
        """Plain numbers for a logger: the means over layers, and the worst violation."""
        return {
            f"{prefix}load_entropy": self.load_entropy.mean().item(),
            f"{prefix}router_entropy": self.router_entropy.mean().item(),
            f"{prefix}max_violation": self.max_violation.max().item(),
            f"{prefix}dropped": float(self.dropped),
        }


@torch.no_grad()
def router_statistics(outputs: Any, *, mask: Tensor | None = None) -> RouterStatistics:
    """Count what was chosen, and measure how evenly.

    The maximal violation is `max_e load_e · E - 1` (Wang et al., *Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts*, 2024): 0 at perfect balance, E / K - 1 where all
    tokens choose the same experts. Where no token is real all is 0.

    Arguments:
        outputs: a `MoEOutput`, several, or a model's output whose `router_logits` and `indices`
            are one tensor per layer (`RishOutput`).
        mask: which tokens are real, as in `load_balancing_loss`.

    Returns:
        Tensors without a graph, on the first layer's device; float32 (float64 for float64).

    Raises:
        ValueError: no layer, layers with another E, or a wrong mask.

    >>> moe = MoE(4, hidden_dim=8, num_experts=6, top_k=2)
    >>> found = router_statistics(moe(torch.randn(50, 4)))
    >>> found.counts.sum().item(), sorted(found.as_dict())  # doctest: +NORMALIZE_WHITESPACE
    (100, ['router/dropped', 'router/load_entropy', 'router/max_violation',
           'router/router_entropy'])
    """
    every = [outputs] if hasattr(outputs, "router_logits") else list(outputs)
    layers = [pair for output in every for pair in _pairs(output)]
    counts, entropies = [], []
    for (_, indices), (logits, real) in zip(
        layers, real_rows([logits for logits, _ in layers], mask)
    ):
        top_k, num_experts = indices.shape[-1], logits.shape[-1]
        if indices.shape[:-1].numel() != len(real):
            raise ValueError(
                f"indices must have the leading shape of router_logits, got {tuple(indices.shape)}"
            )
        chosen = indices.reshape(-1).to(logits.device)
        ones = real.long().repeat_interleave(top_k)
        counts.append(ones.new_zeros(num_experts).scatter_add(0, chosen, ones))
        entropy = _entropy(logits.softmax(-1))
        entropies.append(torch.where(real, entropy, 0).sum() / real.sum().clamp(min=1))
    count = torch.stack(counts)
    total = count.sum(-1, keepdim=True)
    router_entropy = torch.stack(entropies)
    load = (count / total.clamp(min=1)).to(router_entropy.dtype)
    num_experts = count.shape[-1]
    even = _entropy(torch.full_like(load, 1 / num_experts)).clamp_min(torch.finfo(load.dtype).tiny)
    load_entropy = _entropy(load) / even if num_experts > 1 else (total[:, 0] > 0).to(load.dtype)
    violation = torch.where(total[:, 0] > 0, load.amax(-1) * num_experts - 1, 0)
    return RouterStatistics(count, load, load_entropy, router_entropy, violation)


class AdapterTargets(NamedTuple):
    """Names for PEFT's `target_modules` and `target_parameters`."""

    modules: list[str]
    parameters: list[str]


def adapter_targets(model: nn.Module) -> AdapterTargets:
    """Where low-rank adapters of `model` belong.

    `modules`: every `nn.Linear` that is neither a router nor a head (an adapter on a router would
    change who computes what). `parameters`: the stacked experts of every `MoE`, which are no
    `nn.Linear`. Names are those of `model.named_modules()` and `model.named_parameters()`.

    >>> adapter_targets(MoE(4, hidden_dim=8, num_experts=6, top_k=2))
    AdapterTargets(modules=[], parameters=['gate_up', 'down'])
    """
    spared = {*_routers(model), *_heads(model)}
    modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in spared
    ]
    expert_parameters = [
        f"{name}.{parameter}" if name else parameter
        for name, module in model.named_modules()
        if isinstance(module, MoE) and module.experts is None
        for parameter in module.expert_parameters
    ]
    return AdapterTargets(modules, expert_parameters)


def quantization_skip(model: nn.Module) -> list[str]:
    """Modules of `model` that a quantiser must leave in high precision, by their names in
    `model.named_modules()`: routers and selection biases, norms, heads (every `nn.Linear` from the
    width of an embedding to its rows), and those that hold nothing but parameters of a Mamba mixer
    that stay in float32. A mixer keeps its other float32 parameters by itself, and its projections
    may be quantised, so it is not listed.

    >>> quantization_skip(MoE(4, hidden_dim=8, num_experts=6, top_k=2))
    ['router']
    """
    wanted = {*_routers(model), *_heads(model), *_float32_owners(model)}
    return [
        name
        for name, module in model.named_modules()
        if name in wanted
        or isinstance(module, SelectionBias)
        or (name and "norm" in type(module).__name__.lower())
    ]


def _pairs(output: Any) -> Iterator[tuple[Tensor, Tensor]]:
    logits, indices = output.router_logits, output.indices
    if isinstance(logits, Tensor):
        yield logits, indices
    else:
        yield from zip(logits, indices)


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)


def _routers(model: nn.Module) -> Iterator[str]:
    """Every router, and every module within it."""
    routers = {
        id(m) for moe in model.modules() if isinstance(moe, MoE) for m in moe.router.modules()
    }
    return (name for name, module in model.named_modules() if id(module) in routers)


def _heads(model: nn.Module) -> Iterator[str]:
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)}
    return (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (module.out_features, module.in_features) in shapes
    )


def _float32_owners(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for parameter in getattr(module, "float32_parameters", ()):
            owner, _, _ = parameter.rpartition(".")
            if owner:
                yield f"{name}.{owner}" if name else owner
