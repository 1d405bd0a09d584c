"""One layer of a cache of transformers', as the attention block takes it.

B batch, T new tokens, S tokens held (slots, for a static cache), G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from brickwork.blocks.kv_cache import CacheEntries, KVCache

# transformers renamed it; outputs have it under the name that generate() reads.
CACHE_NAME = (
    "cache" if "cache" in MoeModelOutputWithPast.__dataclass_fields__ else "past_key_values"
)


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache, whichever of its two names the caller used.

    Raises:
        ValueError: both were used, or it is no cache.
    """
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are one argument: give it once")
    cache = past_key_values if cache is None else cache
    if cache is not None and not (hasattr(cache, "update") and hasattr(cache, "get_seq_length")):
        raise ValueError(
            f"cache must be a transformers Cache such as DynamicCache, got {type(cache).__name__}"
        )
    return cache


class LayerCache(KVCache):
    """Layer `index` of `cache`: keys and values live there, and only for this call here.

    `real` (B, past + T), True for real tokens, or None where all are: of the tokens held before
    this call and of the new ones. Their positions count the real tokens.
    """

    def __init__(self, cache: Any, index: int, real: Tensor | None) -> None:
        super().__init__()
        self._cache, self._index, self._real = cache, index, real

    @property
    def batch_size(self) -> int | None:
        layers = self._cache.layers
        keys = layers[self._index].keys if self._index < len(layers) else None
        return keys.shape[0] if isinstance(keys, Tensor) and keys.ndim == 4 else None

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length(self._index))

    def append(
        self, keys: Tensor, values: Tensor, *, positions: Tensor, mask: Tensor | None = None
    ) -> CacheEntries:
        tokens = keys.shape[1]
        start = self._cache.get_seq_length(self._index)
        start = start.clone() if isinstance(start, Tensor) else start  # written to in place
        new = (rearrange(t, "b t g d -> b g t d") for t in (keys, values))
        held = self._cache.update(*new, self._index)
        k_BSGD, v_BSGD = (rearrange(t, "b g s d -> b s g d") for t in held)
        slots = k_BSGD.shape[1]
        index = torch.arange(slots, device=keys.device)
        real, written = self._real, None
        if isinstance(start, Tensor) or start + tokens < slots:
            written = (index < start + tokens)[None].expand(k_BSGD.shape[0], -1)
        if real is not None and real.shape[1] < slots:
            real = torch.nn.functional.pad(real, (0, slots - real.shape[1]))
        where = index[None] if real is None else (real.long().cumsum(1) - 1).clamp(min=0)
        seen = written if real is None else real if written is None else real & written
        return CacheEntries(k_BSGD, v_BSGD, seen, where.expand(k_BSGD.shape[:2]), start)
