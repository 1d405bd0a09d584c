"""OLMo 2 from blocks: norms on what each branch returns, and on whole queries and keys."""

from __future__ import annotations

from decoder import Decoder
from torch import Tensor, nn

from brickwork.blocks import Attention, RMSNorm, RoPE, SwiGLU


class Layer(nn.Module):
    """`x += norm(attention(x)); x += norm(mlp(x))`."""

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
        self.mlp = SwiGLU(dim, hidden_dim=config.intermediate_size)
        self.post_feedforward_layernorm = RMSNorm(dim, eps=eps)

    def forward(self, x: Tensor, **where) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, **where))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2(Decoder):
    """`config` is a transformers Olmo2Config; `load` takes an Olmo2ForCausalLM's state dict."""

    def __init__(self, config) -> None:
        super().__init__(config, Layer, RMSNorm)
