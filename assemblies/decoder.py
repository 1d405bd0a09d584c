"""What `generate` asks of a model at every step, with or without a cache of earlier tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brickwork.assemblies.decoding import DecodeStep
from brickwork.assemblies.head import logits_of
from brickwork.blocks.kv_cache import KVCache, StaticKVCache

if TYPE_CHECKING:
    from brickwork.assemblies.rish import Rish

COMPILED_SLOTS = 256  # lengths that share a compiled step


class Decoder:
    """Logits of the next token: first the prompts go in, then each step's tokens.

    Arguments are those of `generate`; `mask` (B, T) bool.
    """

    def __init__(
        self,
        model: Rish,
        input_ids: Tensor,
        mask: Tensor,
        max_new_tokens: int,
        kind: str,
        prefill_chunk: int | None,
        compile_step: bool,
    ) -> None:
        self.model = model
        self.mask = mask
        self.ids = input_ids[:, :0]
        self.kind = kind
        self.chunk = prefill_chunk
        self.slots = input_ids.shape[1] + max_new_tokens
        self.caches: Sequence[KVCache | StaticKVCache] | None = None
        self.fast: DecodeStep | None = None
        self.compiled: Callable[..., Tensor] | None = None
        if compile_step:
            self.slots = -(-self.slots // COMPILED_SLOTS) * COMPILED_SLOTS
            self.compiled = torch.compile(_one_token, fullgraph=True, dynamic=False)

    def logits(self, ids_BN: Tensor) -> Tensor:
        """The logits (B, V) behind all tokens so far, the new ones (B, N) last."""
        first = not self.ids.shape[1]
        if self.fast is not None:
            return self.fast(ids_BN[:, 0])
        self.ids = torch.cat([self.ids, ids_BN], 1)
        if not first:
            self.mask = F.pad(self.mask, (0, 1), value=True)
        if self.kind == "none" or self.caches is None or self._angles_change():
            self.caches = self._new_caches()
            logits = self._prefill()
            if self.kind != "none" and self.compiled is None and not DecodeStep.why_not(self.model):
                assert self.caches is not None
                slots = self.slots if self.kind == "static" else None
                self.fast = DecodeStep(self.model, self.caches, self.mask, slots=slots)
                self.caches = None  # its buffers have them
            return logits
        step = self.compiled or _one_token
        return step(self.model, ids_BN, self.mask[:, -1:].contiguous(), self.caches)  # one stride

    def _prefill(self) -> Tensor:
        size = self.chunk or max(1, self.ids.shape[1])
        chunks = list(zip(self.ids.split(size, 1), self.mask.split(size, 1)))
        for ids, mask in chunks[:-1]:
            self.model(ids, attention_mask=mask, cache=self.caches, return_logits=False)
        ids, mask = chunks[-1]
        return _last_logits(self.model, ids, mask, self.caches)

    def _new_caches(self) -> Sequence[KVCache | StaticKVCache] | None:
        model, config = self.model, self.model.config
        if self.kind == "none":
            return None
        if self.kind == "growing":
            return [KVCache() for _ in model.layers]
        options = config.attention_options()
        weight = model.embed_tokens.weight
        layers: list[Any] = list(model.layers)
        dtype = weight.dtype
        if torch.is_autocast_enabled(weight.device.type):
            dtype = torch.get_autocast_dtype(weight.device.type)
        return [
            StaticKVCache(
                len(self.mask),
                self.slots,
                num_kv_heads=options["num_kv_heads"] or options["num_heads"],
                head_dim=layer.attention.head_dim,
                dtype=dtype,
                device=weight.device,
            )
            for layer in layers
        ]

    def _angles_change(self) -> bool:
        """Whether RoPE's angles differ from those of a token less; a cache is then out of date."""
        rope = self.model.rope
        if not rope.length_dependent:
            return False
        lengths = self.mask.sum(1)
        now, before = (rope.inv_freq(lengths.device, n) for n in (lengths, lengths - 1))
        return not torch.equal(now, before)


def _last_logits(
    model: Rish, ids: Tensor, mask: Tensor, caches: Sequence[KVCache | StaticKVCache] | None
) -> Tensor:
    """The logits (B, V) of the last column, without those of the others."""
    out = model(
        ids, attention_mask=mask, cache=caches, return_logits=False, output_hidden_states=True
    )
    assert out.hidden_states is not None
    return logits_of(out.hidden_states[-1][:, -1], model.lm_head, model.embed_tokens)


def _one_token(
    model: Rish, ids: Tensor, mask: Tensor, caches: Sequence[KVCache | StaticKVCache]
) -> Tensor:
    return model(ids, attention_mask=mask, cache=caches).logits[:, -1]
