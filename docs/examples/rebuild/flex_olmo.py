"""FlexOlmo from blocks: OLMo 2 with a mixture of experts in place of the feed-forward layer."""

from __future__ import annotations

from decoder import Decoder
from torch import Tensor, nn

from brickwork.blocks import Attention, MoE, RMSNorm, RoPE


class Layer(nn.Module):
    """`x += norm(attention(x)); x += norm(experts(x))`."""

    def __init__(self, config, rope: RoPE) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            dim,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            qk_norm="full",
            norm_eps=eps,
            rope=rope,
            causal=True,
        )
        self.post_attention_layernorm = RMSNorm(dim, eps=eps)
        self.mlp = MoE(
            dim,
            hidden_dim=config.intermediate_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
        )
        self.post_feedforward_layernorm = RMSNorm(dim, eps=eps)

    def forward(self, x: Tensor, **where) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, **where))
        return x + self.post_feedforward_layernorm(self.mlp(x).y)


class FlexOlmo(Decoder):
    """Of a transformers FlexOlmoConfig; `load` takes a FlexOlmoForCausalLM's state dict."""

    names = Decoder.names | {
        "mlp.gate.": "mlp.router.",
        "mlp.experts.gate_up_proj": "mlp.gate_up",
        "mlp.experts.down_proj": "mlp.down",
    }

    def __init__(self, config) -> None:
        super().__init__(config, Layer, RMSNorm)
