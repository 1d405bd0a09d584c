"""Llama from blocks."""

from __future__ import annotations

from functools import partial

from decoder import Decoder
from torch import Tensor, nn

from brickwork.blocks import Attention, RMSNorm, RoPE, SwiGLU

Norm = partial(RMSNorm, cast="before_weight")


class Layer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`."""

    def __init__(self, config, rope: RoPE) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(dim, eps=eps)
        self.self_attn = Attention(
            dim,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=rope.head_dim,
            rope=rope,
            causal=True,
        )
        self.post_attention_layernorm = Norm(dim, eps=eps)
        self.mlp = SwiGLU(dim, hidden_dim=config.intermediate_size)

    def forward(self, x: Tensor, **where) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(Decoder):
    """`config` is a transformers LlamaConfig; `load` takes a LlamaForCausalLM's state dict."""

    def __init__(self, config) -> None:
        super().__init__(config, Layer, Norm)
