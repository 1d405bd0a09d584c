"""What the rebuilt decoders share: the stack around their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from brickwork.blocks import KVCache, RMSNorm, RoPE


def rope_of(config) -> RoPE:
    """The rotary embedding that a transformers config describes."""
    scaling = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return RoPE(head_dim, base=scaling["rope_theta"], scaling=scaling)


class Decoder(nn.Module):
    """Called with token ids (B, T), maybe a padding mask and one cache per layer; logits (B, T, V).

    `names` renames parts of the keys of transformers' state dicts.
    """

    names: ClassVar = {"model.": ""}

    def __init__(self, config, layer: Callable[..., nn.Module], norm: Callable[..., RMSNorm]):
        super().__init__()
        rope = rope_of(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, rope) for _ in range(config.num_hidden_layers))
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, caches=None) -> Tensor:
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask=mask, cache=caches[i] if caches else None)
        return self.lm_head(self.norm(x))

    def new_caches(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def load(self, state: dict[str, Tensor]) -> Decoder:
        """The state dict of transformers' model."""
        for theirs, ours in self.names.items():
            state = {name.replace(theirs, ours): tensor for name, tensor in state.items()}
        self.load_state_dict(state)
        return self
