"""The sparse mixture-of-experts block.

C width, F hidden width of an expert, E experts, K chosen for a token.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brickwork.blocks import moe_layout
from brickwork.blocks.router import Router, RoutingRule, SoftmaxRule, check_top_k
from brickwork.blocks.selection_bias import SelectionBias, update_balance
from brickwork.blocks.swiglu import SwiGLU
from brickwork.kernels.checks import check_flag, check_integer, values_readable
from brickwork.kernels.experts import check_expert_indices, experts


class MoEOutput(NamedTuple):
    """`y` (..., C) in x's dtype, and how it was routed: the raw `router_logits` (..., E), the
    chosen experts' `indices` (..., K) and their `weights` (..., K)."""

    y: Tensor
    router_logits: Tensor
    indices: Tensor
    weights: Tensor


class MoE(nn.Module):
    """Sparse mixture of SwiGLU experts: every token goes to the K experts that its router prefers.

    `p = softmax(router(x))` over all experts; `y = Σ_k p_k · down_k(silu(gate_k x) · up_k x)` over
    the K largest p, plus `shared(x)` if there is one. Logits, p and choice are float32 with
    autocast off, so that a narrower dtype of the experts does not change the choice; equal
    preferences go to the lowest index. No token is dropped.

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
        router: a module called with x (..., C) that returns logits (..., E); its attribute `rule`,
            if it has one, says what p is and how experts are chosen (`SigmoidRouter`), else the
            softmax does. Default: `Router`, a linear map without bias.
        shared: a module that every token goes through, (..., C) to (..., C), `SwiGLU` say.
        selection_bias: balance the experts by a bias on the choice (`SelectionBias`); a training
            loop then calls `update_balance`.

    Called with x (..., C). To replay choices made before (recomputation, reinforcement learning):
    `routing`, expert indices (..., K); their weights come from the present p. `mask` (...), 1 or
    True for real tokens, keeps padding out of the counts of `selection_bias`; it changes nothing
    else. Returns MoEOutput(y, router_logits, indices, weights). Raises ValueError for other shapes
    or dtypes and for expert indices out of range.

    Parameters: `router.weight` (E, C), `gate_up` (E, 2F, C) with the gate's rows first, and `down`
    (E, C, F). The last two are no `nn.Linear`: adapters name them as target parameters
    (`adapter_targets`). After `unstack()` they are `experts.{e}.gate_up.weight` (2F, C) and
    `experts.{e}.down.weight` (C, F) of one `SwiGLU` each. `selection_bias.bias` (E) and `shared.*`
    as asked for. A router and a shared part that are passed in keep their parameters.

    >>> moe = MoE(4, hidden_dim=8, num_experts=6, top_k=2)
    >>> out = moe(torch.randn(2, 3, 4))
    >>> out.y.shape, out.router_logits.shape, out.indices.shape
    (torch.Size([2, 3, 4]), torch.Size([2, 3, 6]), torch.Size([2, 3, 2]))
    >>> again = moe(torch.randn(2, 3, 4), routing=out.indices)
    >>> torch.equal(again.indices, out.indices)
    True
    """

    expert_parameters = ("gate_up", "down")
    gate_up: nn.Parameter | None  # None after unstack()
    down: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        *,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        normalize: bool = False,
        router: nn.Module | None = None,
        shared: nn.Module | None = None,
        selection_bias: bool = False,
    ) -> None:
        super().__init__()
        check_integer("dim", dim, least=1)
        check_integer("hidden_dim", hidden_dim, least=1)
        check_integer("num_experts", num_experts, least=1)
        check_top_k(top_k, num_experts)
        check_flag("normalize", normalize)
        check_flag("selection_bias", selection_bias)
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
        self.router = Router(dim, num_experts, bias=False) if router is None else router
        # Kept here, for an adapter may take the router's place.
        self.rule: RoutingRule = getattr(self.router, "rule", SoftmaxRule())
        self.rule.check(num_experts, top_k)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.experts: nn.ModuleList | None = None
        self.selection_bias = SelectionBias(num_experts) if selection_bias else None
        self.shared = shared
        self._reset_parts([self.router] if router is None else [])

    @classmethod
    def from_dense(cls, dense: SwiGLU, *, num_experts: int, top_k: int, **options: Any) -> MoE:
        """A MoE whose experts are copies of `dense`: its output is the dense one, to rounding,
        whatever the router says, until training makes the copies differ.

        Paper: Komatsuzaki et al., *Sparse Upcycling: Training Mixture-of-Experts from Dense
        Checkpoints*, 2023.

        Arguments:
            dense: of its dtype and device the MoE will be; left as it is.
            num_experts, top_k: E and K.
            options: as of `MoE`. `normalize` must be True, which is the default here: the K weights
                then sum to 1 (times the router's scale, by which `down` is divided). A router or a
                `selection_bias` may be given; `shared` may not.

        Raises:
            ValueError: `dense` has biases, or an option that would change the output.

        >>> dense, x = SwiGLU(4, hidden_dim=8), torch.randn(5, 4)
        >>> moe = MoE.from_dense(dense, num_experts=6, top_k=2)
        >>> torch.allclose(moe(x).y, dense(x), atol=1e-6)
        True
        """
        return moe_layout.from_dense(cls, dense, num_experts, top_k, options)

    def reset_parameters(self) -> None:
        """Draw router, experts and shared part as `nn.Linear` would, U(±1/√columns), or by their
        own rule; set the selection bias to 0."""
        self._reset_parts([self.router, self.selection_bias, self.shared, *(self.experts or ())])

    def _reset_parts(self, parts: list[nn.Module | None]) -> None:
        for part in parts:
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
        for weight in (self.gate_up, self.down):
            if weight is not None:
                bound = 1 / math.sqrt(weight.shape[-1])
                nn.init.uniform_(weight, -bound, bound)

    def forward(
        self, x: Tensor, *, routing: Tensor | None = None, mask: Tensor | None = None
    ) -> MoEOutput:
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have shape (..., {self.dim}), got {tuple(x.shape)}")
        leading = x.shape[:-1]
        router_logits = self.router(x)
        if router_logits.shape != (*leading, self.num_experts):
            raise ValueError(
                f"router must return logits {(*leading, self.num_experts)} for x {tuple(x.shape)}, "
                f"got {tuple(router_logits.shape)}"
            )
        scores = self.rule.scores(router_logits)
        if routing is None:
            bias = self.selection_bias
            preferences = scores if bias is None else bias(scores)
            indices = self.rule.choose(preferences, self.top_k)
        else:
            if routing.shape != (*leading, self.top_k):
                raise ValueError(
                    f"routing must have x's leading shape and top_k = {self.top_k} columns, "
                    f"{(*leading, self.top_k)}, got {tuple(routing.shape)}"
                )
            check_expert_indices("routing", routing, self.num_experts)
            indices = routing.long()
        _check_mask(mask, leading)
        if self.selection_bias is not None and self.training:
            self.selection_bias.count(indices, mask)
        weights = scores.gather(-1, indices)
        if self.normalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.clamp_min(torch.finfo(total.dtype).tiny)
        if self.rule.scale != 1:
            weights = weights * self.rule.scale
        flat = (t.reshape(-1, t.shape[-1]) for t in (x, indices, weights))
        y = self._run_experts(*flat).reshape(x.shape)
        if self.shared is not None:
            also = self.shared(x)
            if also.shape != x.shape:
                raise ValueError(
                    f"shared must return shape {tuple(x.shape)}, got {tuple(also.shape)}"
                )
            y = y + also.to(y.dtype)
        return MoEOutput(y, router_logits, indices, weights)

    def _run_experts(self, x_SC: Tensor, indices_SK: Tensor, weights_SK: Tensor) -> Tensor:
        if self.experts is not None:
            return moe_layout.run_modules(self.experts, x_SC, indices_SK, weights_SK)
        assert self.gate_up is not None
        assert self.down is not None
        return experts(x_SC, self.gate_up, self.down, indices_SK, weights_SK)

    def unstack(self) -> MoE:
        """Give each expert a `SwiGLU` of its own, in `experts`, in the place of `gate_up` and
        `down`: for adapters and quantisers that only know `nn.Linear`. Same values, slower: the
        experts run one after another. Optimisers must be made anew. Returns self.

        >>> moe = MoE(4, hidden_dim=8, num_experts=2, top_k=1).unstack()
        >>> list(moe.state_dict())  # doctest: +NORMALIZE_WHITESPACE
        ['router.weight', 'experts.0.gate_up.weight', 'experts.0.down.weight',
         'experts.1.gate_up.weight', 'experts.1.down.weight']
        >>> list(moe.restack().state_dict())
        ['gate_up', 'down', 'router.weight']
        """
        moe_layout.unstack(self)
        return self

    def restack(self) -> MoE:
        """Undo `unstack`, exactly; adapters must be merged and weights dequantised. Returns self.

        Raises ValueError for an expert that is no plain `SwiGLU` any more.
        """
        moe_layout.restack(self)
        return self

    def update_balance(self, *, rate: float) -> None:
        """`brickwork.blocks.update_balance` of this block alone."""
        update_balance(self, rate=rate)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, normalize={self.normalize}"
        )


def _check_mask(mask: Tensor | None, leading: torch.Size) -> None:
    if mask is None:
        return
    if mask.shape != leading:
        raise ValueError(
            f"mask must have x's leading shape {tuple(leading)}, got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and values_readable(mask) and not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask must hold only 0 and 1 (or False and True)")
