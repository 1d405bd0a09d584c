"""Config of Rish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from brickwork.assemblies.config import (
    Config,
    check_base,
    check_dict,
    check_fraction,
    check_number,
    check_size,
    check_token_id,
    given,
)
from brickwork.assemblies.rish_rope import rope_options
from brickwork.kernels.checks import check_flag, check_one_of


@dataclass(frozen=True, kw_only=True)
class RishConfig(Config):
    """The original's fields; `balance`, over what the balancing loss averages, is ours.

    RoPE scaling may stand in `rope_scaling` or, with `rope_theta`, in `rope_parameters`.
    """

    model_type: ClassVar[str] = "rish_ai"

    vocab_size: int = 100352
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = 100277
    bos_token_id: int | None = None
    eos_token_id: int | None = 100257
    tie_word_embeddings: bool = False
    rope_theta: float = 500000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_type: str | None = None
    original_max_position_embeddings: int | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    num_experts: int = 7
    num_experts_per_tok: int = 5
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.01
    balance: Literal["per_layer", "pooled"] = "per_layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            **given(
                num_key_value_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                original_max_position_embeddings=self.original_max_position_embeddings,
            ),
        )
        check_token_id(
            self.vocab_size,
            **given(
                pad_token_id=self.pad_token_id,
                bos_token_id=self.bos_token_id,
                eos_token_id=self.eos_token_id,
            ),
        )
        for flag in ("use_cache", "tie_word_embeddings", "attention_bias", "norm_topk_prob"):
            check_flag(flag, getattr(self, flag))
        check_flag("output_router_logits", self.output_router_logits)
        check_one_of("hidden_act", self.hidden_act, ("silu",))
        check_one_of("balance", self.balance, ("per_layer", "pooled"))
        check_number(0, rms_norm_eps=self.rms_norm_eps, initializer_range=self.initializer_range)
        check_number(0, router_aux_loss_coef=self.router_aux_loss_coef)
        check_fraction(attention_dropout=self.attention_dropout)
        check_base(rope_theta=self.rope_theta)
        check_dict("rope_scaling", self.rope_scaling)
        check_dict("rope_parameters", self.rope_parameters)
        self._check_heads()
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be at most num_experts = {self.num_experts}, "
                f"got {self.num_experts_per_tok}"
            )
        self.rope_options()

    def _check_heads(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads = {kv_heads}, "
                f"got {heads}"
            )
        if self.head_dim is None and self.hidden_size % (2 * heads):
            raise ValueError(
                f"hidden_size must be an even multiple of num_attention_heads = {heads} unless "
                f"head_dim is given, got {self.hidden_size}"
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")

    def attention_options(self) -> dict[str, Any]:
        """The keyword arguments of the attention block, less `rope`."""
        return {
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "qk_norm": "full",
            "norm_eps": self.rms_norm_eps,
            "causal": True,
            "bias": self.attention_bias,
            "dropout": self.attention_dropout,
        }

    def moe_options(self) -> dict[str, Any]:
        """The keyword arguments of the mixture-of-experts block."""
        return {
            "hidden_dim": self.intermediate_size,
            "num_experts": self.num_experts,
            "top_k": self.num_experts_per_tok,
            "normalize": self.norm_topk_prob,
        }

    def rope_options(self) -> dict[str, Any]:
        """The arguments of this model's RoPE block.

        Raises:
            ValueError: a value is given twice and differs, or the scaling is incomplete.
        """
        return rope_options(self)
