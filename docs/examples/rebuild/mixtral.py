"""Mixtral from blocks: Llama with a mixture of experts, whose chosen weights sum to one."""

from __future__ import annotations

from functools import partial

from decoder import Decoder
from torch import Tensor, nn

from brickwork.blocks import Attention, MoE, RMSNorm, RoPE

Norm = partial(RMSNorm, cast="before_weight")


class Layer(nn.Module):
    """`x += attention(norm(x)); x += experts(norm(x))`."""

    def __init__(self, config, rope: RoPE) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(dim, eps=eps)
        self.self_attn = Attention(
            dim,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            rope=rope,
            causal=True,
        )
        self.post_attention_layernorm = Norm(dim, eps=eps)
        self.mlp = MoE(
            dim,
            hidden_dim=config.intermediate_size,
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            normalize=True,
        )

    def forward(self, x: Tensor, **where) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **where)
        return x + self.mlp(self.post_attention_layernorm(x)).y


class Mixtral(Decoder):
    """`config` is a transformers MixtralConfig; `load` takes a MixtralForCausalLM's state dict."""

    names = Decoder.names | {
        "mlp.gate.": "mlp.router.",
        "mlp.experts.gate_up_proj": "mlp.gate_up",
        "mlp.experts.down_proj": "mlp.down",
    }

    def __init__(self, config) -> None:
        super().__init__(config, Layer, Norm)
