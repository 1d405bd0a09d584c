"""Our experts under transformers' mixture-of-experts models."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations import moe

from brickwork.kernels.experts import experts

IMPLEMENTATION = "brickwork"


def register_experts() -> None:
    """Make `experts_implementation="brickwork"` one of those of transformers' models.

    Then `AutoModelForCausalLM.from_pretrained(..., experts_implementation="brickwork")`, or
    `model.set_experts_implementation("brickwork")`, sends tokens through
    `brickwork.kernels.experts`: values and gradients of `"eager"`. It takes experts of one kind,
    `down(silu(gate(x)) * up(x))` without biases (Mixtral, OLMoE, Qwen3-MoE, FlexOlmo and more), and
    raises ValueError, in the forward, for others.

    >>> register_experts()
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> config = MixtralConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1,
    ...     intermediate_size=8, num_attention_heads=2, num_key_value_heads=2,
    ...     num_local_experts=4, experts_implementation="brickwork")
    >>> MixtralForCausalLM(config).config._experts_implementation
    'brickwork'
    """
    moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls in the place of the forward of `self`, a model's experts: tokens
    (S, C), the experts chosen (S, K) and their weights (S, K)."""
    if reason := _why_not(self):
        raise ValueError(
            f'experts_implementation="{IMPLEMENTATION}" cannot run {type(self).__name__}: {reason}'
        )
    return experts(hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights)


def _why_not(module: Any) -> str | None:
    """What makes these experts other than ours, or None."""
    differences = {
        "it has no gate": not module.has_gate,
        "gate and up are interleaved": not module.is_concatenated,
        "its weights are transposed": module.is_transposed,
        "it has biases": module.has_bias,
        "it has a norm behind the experts": getattr(module, "has_post_expert_norm", False),
        "its gate is its own": type(module)._apply_gate is not moe._default_apply_gate,
        "its activation is not silu": type(getattr(module, "act_fn", None)).__name__
        not in ("SiLU", "SiLUActivation"),
        "its experts are spread over devices": getattr(module, "_is_expert_parallel", False),
    }
    return next((reason for reason, true in differences.items() if true), None)
