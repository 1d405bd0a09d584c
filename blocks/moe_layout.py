"""The experts of a `MoE` as stacked parameters or as modules of their own, and from a dense layer.

S tokens, C width, F hidden width, E experts, K chosen for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from brickwork.blocks.linear import Linear
from brickwork.blocks.swiglu import SwiGLU
from brickwork.kernels.checks import values_readable

if TYPE_CHECKING:
    from brickwork.blocks.moe import MoE


def from_dense(
    cls: type[MoE], dense: SwiGLU, num_experts: int, top_k: int, options: dict[str, Any]
) -> MoE:
    """See `MoE.from_dense`."""
    gate_up, down = _weights("dense", dense)
    if options.get("normalize", True) is not True:
        raise ValueError(
            "normalize must be True, so that the weights of equal experts sum to 1, "
            f"got {options['normalize']!r}"
        )
    if options.get("shared") is not None:
        raise ValueError("shared must be None: it would be added to the dense output")
    sizes: dict[str, Any] = {
        "hidden_dim": dense.hidden_dim,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    with down.device:
        moe = cls(dense.dim, **sizes, **{**options, "normalize": True})
    moe.to(device=down.device, dtype=down.dtype)
    stacked = (gate_up, down / moe.rule.scale if moe.rule.scale != 1 else down)
    for name, weight in zip(moe.expert_parameters, stacked):
        copies = weight.detach().expand(num_experts, -1, -1).clone()
        setattr(moe, name, nn.Parameter(copies))
    return moe.train(dense.training)


def unstack(moe: MoE) -> None:
    """See `MoE.unstack`."""
    if moe.experts is not None:
        raise ValueError("unstack was called before: the experts are modules already")
    assert moe.gate_up is not None
    assert moe.down is not None
    modules = []
    for gate_up, down in zip(moe.gate_up, moe.down):
        with torch.device("meta"):
            module = SwiGLU(moe.dim, hidden_dim=moe.hidden_dim)
        for layer, weight, whole in (
            (module.gate_up, gate_up, moe.gate_up),
            (module.down, down, moe.down),
        ):
            layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=whole.requires_grad)
        modules.append(module)
    moe.gate_up = moe.down = None
    moe.experts = nn.ModuleList(modules).train(moe.training)


def restack(moe: MoE) -> None:
    """See `MoE.restack`."""
    if moe.experts is None:
        raise ValueError("restack must follow unstack: the experts are stacked already")
    pairs = [_weights(f"experts.{e}", module) for e, module in enumerate(moe.experts)]
    stacked = []
    for weights in zip(*pairs):
        trained = {weight.requires_grad for weight in weights}
        if len(trained) > 1:
            raise ValueError("requires_grad must be the same in all experts")
        whole = torch.stack([weight.detach() for weight in weights])
        stacked.append(nn.Parameter(whole, requires_grad=trained.pop()))
    moe.experts = None
    moe.gate_up, moe.down = stacked


def run_modules(
    modules: Sequence[nn.Module] | nn.ModuleList,
    x_SC: Tensor,
    indices_SK: Tensor,
    weights_SK: Tensor,
) -> Tensor:
    """`brickwork.kernels.experts.experts` with a module per expert. Each is called once, also with
    no token at all, so that all its parameters get gradients."""
    if not values_readable(indices_SK):  # a traced or exported program must serve every routing
        y = weights_SK.new_zeros(x_SC.shape)
        for e, module in enumerate(modules):
            chosen = indices_SK == e
            mine = chosen.any(-1, keepdim=True)
            weight = torch.where(chosen, weights_SK, 0).sum(-1, keepdim=True)
            y = y + weight * torch.where(mine, module(torch.where(mine, x_SC, 0)), 0)
        return y.to(x_SC.dtype)
    choices = indices_SK.reshape(-1)
    order = choices.argsort(stable=True)
    counts = torch.bincount(choices, minlength=len(modules)).tolist()
    rows = x_SC.index_select(0, order // indices_SK.shape[1]).split(counts)
    out = torch.cat([module(mine) for module, mine in zip(modules, rows)])
    each = out.index_select(0, order.argsort()).unflatten(0, indices_SK.shape)
    return (weights_SK.unsqueeze(-1) * each.to(weights_SK.dtype)).sum(1).to(x_SC.dtype)


def _weights(name: str, module: nn.Module) -> tuple[Tensor, Tensor]:
    """The weights (2F, C) and (C, F) of a plain SwiGLU."""
    layers = [getattr(module, part, None) for part in ("gate_up", "down")]
    if type(module) is not SwiGLU or any(
        type(layer) not in (nn.Linear, Linear) for layer in layers
    ):
        kinds = ", ".join(type(part).__name__ for part in (module, *layers))
        raise ValueError(f"{name} must be a SwiGLU of two nn.Linear, got {kinds}")
    if module.gate_up.bias is not None or module.down.bias is not None:
        raise ValueError(f"{name} must have no biases: the experts have none")
    return module.gate_up.weight, module.down.weight
