"""A decoding step of Rish on the CPU, over buffers allocated before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from brickwork.blocks.kv_cache import KVCache, StaticKVCache
from brickwork.blocks.single_token import (
    AttentionStep,
    MoEStep,
    Turn,
    product_of,
    why_not_single,
)

if TYPE_CHECKING:
    from brickwork.assemblies.rish import Rish

FIRST_SLOTS = 64


class DecodeStep:
    """Called with a token for each row (B,), returns the logits (B, V) of the next ones.

    Arguments:
        model: one for which `why_not` gives None.
        caches: one per layer, filled with the prompts.
        mask: (B, T), which of their tokens are real.
        slots: how many tokens the buffers hold; None lets them grow.
    """

    def __init__(
        self,
        model: Rish,
        caches: Sequence[KVCache | StaticKVCache],
        mask: Tensor,
        *,
        slots: int | None,
    ) -> None:
        self.model = model
        self.layers: list[Any] = list(model.layers)
        self.length = mask.shape[1]
        self.slots = slots or max(FIRST_SLOTS, 2 * self.length)
        padded = not bool(mask.all())
        self.mask = F.pad(mask, (0, self.slots - self.length), value=True) if padded else None
        self.turn = Turn(model.rope, mask.sum(1, keepdim=True), model.embed_tokens.weight.dtype)
        self.attention = [
            AttentionStep(
                layer.attention,
                layer.post_attention_layernorm,
                cache.held(),
                self.length,
                self.slots,
            )
            for layer, cache in zip(self.layers, caches)
        ]
        self.moe = [
            MoEStep(layer.moe, layer.post_feedforward_layernorm, len(mask)) for layer in self.layers
        ]
        head: Any = model.lm_head or model.embed_tokens
        self.head = product_of(head.weight, getattr(head, "bias", None), len(mask))

    @staticmethod
    def why_not(model: Rish) -> str | None:
        """Why the step would not compute what the model's modules do, or None."""
        from brickwork.assemblies.rish import Block, Rish

        if type(model).forward is not Rish.forward or type(model).run_layer is not Rish.run_layer:
            return f"{type(model).__name__} has a forward of its own"
        return why_not_single(model, type(model), Block)

    def __call__(self, token_B: Tensor) -> Tensor:
        model, slot = self.model, self.length
        if slot == self.slots:
            self._grow()
        x = F.embedding(token_B, model.embed_tokens.weight)
        turn = self.turn()
        for attention, moe in zip(self.attention, self.moe):
            x = moe(attention(x, slot, turn, self.mask))
        self.length += 1
        return self.head(model.norm(x))

    def _grow(self) -> None:
        if self.mask is not None:
            self.mask = F.pad(self.mask, (0, self.slots), value=True)
        self.slots *= 2
        for attention in self.attention:
            attention.grow(self.slots)
