"""Balance without an auxiliary loss: a bias that moves the choice of experts, never their weights.

E experts, K chosen for a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from brickwork.kernels.checks import check_integer


class SelectionBias(nn.Module):
    """What is added to an expert's score when experts are chosen, and how often each was.

    `MoE(selection_bias=True)` adds `bias` (E) to the scores before the choice, and in training
    counts how often every expert is chosen; weights never see it, and it gets no gradient. A
    training loop calls `update_balance(model, rate=...)` after each step of the optimiser:
    `bias_e += rate · (d_e - mean d)` with `d_e = sign(mean count - count_e)`. The update is
    centred, so that the biases keep their sum.

    `bias` is a parameter without gradient, in the state dict, and stays float32 whatever the model
    is cast to. `counts` (E), int64, is neither parameter nor buffer: what a process has counted
    since the last update is its own. A forward that activation checkpointing runs again counts
    once; exported programs do not count.

    Called with scores (..., E); returns the preferences (..., E) that experts are chosen by.

    Paper: Wang et al., *Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts*, 2024.

    >>> balance = SelectionBias(4)
    >>> balance.count(torch.tensor([[0, 1], [0, 1], [0, 2]]))
    >>> balance.counts.tolist()
    [3, 2, 1, 0]
    >>> update_balance(balance, rate=0.25)
    >>> balance.bias.tolist()
    [-0.25, -0.25, 0.25, 0.25]
    """

    float32_parameters = ("bias",)
    counts: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        check_integer("num_experts", num_experts, least=1)
        bias = torch.zeros(num_experts, dtype=torch.float32)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.counts = torch.zeros_like(self.bias, dtype=torch.int64)

    def reset_parameters(self) -> None:
        """Bias 0, nothing counted."""
        nn.init.zeros_(self.bias)
        self.counts = torch.zeros_like(self.bias, dtype=torch.int64)

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.bias.detach()

    def count(self, indices: Tensor, mask: Tensor | None = None) -> None:
        """Count the choices (..., K) of the tokens where `mask` (...) is not 0."""
        if self.counts.device != self.bias.device:  # loaded into a model made on the meta device
            self.counts = torch.zeros_like(self.bias, dtype=torch.int64)
        if not (torch.compiler.is_exporting() or torch.jit.is_tracing()):
            _count(self.counts, indices.detach(), None if mask is None else mask.detach())

    def update(self, counts: Tensor, *, rate: float) -> None:
        """One step towards balance from these counts (E), and begin to count anew."""
        counts = counts.to(self.bias.device)
        direction = torch.sign(counts.sum() - counts * len(counts)).to(self.bias.dtype)
        with torch.no_grad():
            self.bias.add_(direction - direction.mean(), alpha=rate)
        self.counts = torch.zeros_like(self.counts)

    def extra_repr(self) -> str:
        return str(len(self.bias))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelectionBias:
        def kept(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if not out.is_floating_point() or out.dtype == torch.float32:
                return out
            return tensor.to(out.device, torch.float32)

        super()._apply(kept, recurse)
        if self.counts.device != self.bias.device:
            empty = self.counts.is_meta or self.bias.is_meta
            counts = torch.zeros_like(self.bias, dtype=torch.int64)
            self.counts = counts if empty else counts.copy_(self.counts)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        bias = state_dict.get(f"{prefix}bias")
        if bias is not None:
            state_dict[f"{prefix}bias"] = bias.float()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@torch.no_grad()
def update_balance(
    model: nn.Module, *, rate: float, group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Move every selection bias in `model` one step towards balance, from what was counted since
    the last call; with torch.distributed, from the sum over the processes of `group`.

    Call it in every process, after the optimiser's step, also where micro-batches are accumulated.
    Wang et al. take a rate of 1e-3 for scores in (0, 1).

    Arguments:
        model: any module; `MoE(selection_bias=True)` blocks within it are found.
        rate: of the update, a finite number of at least 0.
        group: the processes that see different tokens; default: all.

    Raises:
        ValueError: no selection bias in `model`, or a wrong rate.

    >>> from brickwork.blocks import MoE
    >>> moe = MoE(4, hidden_dim=8, num_experts=6, top_k=2, selection_bias=True)
    >>> _ = moe(torch.randn(5, 4))
    >>> update_balance(moe, rate=1e-3)
    """
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise ValueError(f"rate must be a finite number of at least 0, got {rate!r}")
    parts = [module for module in model.modules() if isinstance(module, SelectionBias)]
    if not parts:
        raise ValueError("model must hold a MoE(selection_bias=True), got none")
    counts = torch.cat([part.counts.to(parts[0].bias.device) for part in parts])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts, group=group)
    for part, share in zip(parts, counts.split([len(part.bias) for part in parts])):
        part.update(share, rate=rate)


@torch.library.custom_op("brickwork::count_choices", mutates_args=("counts",))
def _count(counts: Tensor, indices: Tensor, mask: Tensor | None) -> None:
    """Add to `counts` (E); an op of its own, so that a compiled program, too, asks at run time
    whether it is being run again by a backward pass."""
    if torch._C._current_graph_task_id() != -1:
        return
    ones = torch.ones_like(indices, dtype=counts.dtype)
    if mask is not None:
        ones = ones * (mask != 0).unsqueeze(-1)
    counts.scatter_add_(0, indices.reshape(-1), ones.reshape(-1))


@_count.register_fake
def _(counts: Tensor, indices: Tensor, mask: Tensor | None) -> None:
    return None
