"""Keys and values of the tokens seen so far, one cache per attention layer.

B batch, T new tokens, S tokens held (slots, for the static cache), G key/value heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brickwork.kernels.checks import check_integer, check_shapes, values_readable


class CacheEntries(NamedTuple):
    """What a cache holds after an append.

    `keys` and `values` (B, S, G, D); `mask` (B, S), True where a slot holds a real token, or None
    where all do; `positions` (B, S); `start`, the slot of the first token just appended.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    positions: Tensor
    start: int | Tensor


class KVCache:
    """A cache that grows: pass one object per attention layer, and the same at every call.

    Gradients flow through it. It refuses to be appended to during a backward pass: activation
    checkpointing runs the forward again there and would append the same tokens twice. So train
    with a cache or with checkpointing, not with both.

    >>> from brickwork.blocks import Attention
    >>> attention, x = Attention(8, num_heads=2, causal=True), torch.randn(1, 5, 8)
    >>> cache = KVCache()
    >>> y = torch.cat([attention(x[:, :3], cache=cache), attention(x[:, 3:], cache=cache)], 1)
    >>> torch.allclose(y, attention(x), atol=1e-6), cache.length
    (True, 5)
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._positions: Tensor | None = None
        self._mask: Tensor | None = None  # None while every token is real
        self.owner: str | None = None  # which layer fills it

    @property
    def batch_size(self) -> int | None:
        """B, None for an empty cache."""
        return None if self._keys is None else self._keys.shape[0]

    @property
    def length(self) -> int:
        """S, the number of tokens held, padding included."""
        return 0 if self._keys is None else self._keys.shape[1]

    def append(
        self, keys: Tensor, values: Tensor, *, positions: Tensor, mask: Tensor | None = None
    ) -> CacheEntries:
        """Add T tokens: keys and values (B, T, G, D), positions (B, T) or (1, T), mask (B, T) bool.

        Raises ValueError for another batch size, head shape, dtype or device than what is held.
        """
        _refuse_recomputation()
        _check_new(keys, values, self._keys)
        start, size = self.length, keys.shape[:2]
        positions = positions.expand(size)
        if self._keys is None or self._values is None or self._positions is None:
            self._keys, self._values, self._positions, self._mask = keys, values, positions, mask
            return CacheEntries(keys, values, mask, positions, start)
        if mask is not None or self._mask is not None:
            old = _all_real(self._keys) if self._mask is None else self._mask
            new = _all_real(keys) if mask is None else mask
            self._mask = torch.cat((old, new), 1)
        self._keys = torch.cat((self._keys, keys), 1)
        self._values = torch.cat((self._values, values), 1)
        self._positions = torch.cat((self._positions, positions), 1)
        return CacheEntries(self._keys, self._values, self._mask, self._positions, start)

    def held(self) -> CacheEntries:
        """What `append` would return for no new token; ValueError for an empty cache."""
        if self._keys is None or self._values is None or self._positions is None:
            raise ValueError("held() needs a cache that something was appended to")
        return CacheEntries(self._keys, self._values, self._mask, self._positions, self.length)

    def next_positions(self) -> Tensor | None:
        """(B,), each row's largest position of a real token + 1; None for an empty cache."""
        if self._positions is None or not self.length:
            return None
        return _next_positions(self._positions, self._mask)

    def past_mask(self) -> Tensor | None:
        """(B, S) bool, or None where every token is real."""
        return self._mask

    def select(self, index_B: Tensor) -> None:
        """Keep the rows `index_B` (integers), in that order: a row may be dropped or repeated."""
        held = (self._keys, self._values, self._positions, self._mask)
        self._keys, self._values, self._positions, self._mask = (
            None if t is None else t.index_select(0, index_B) for t in held
        )

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        _check_crop(length, self.length)
        held = (self._keys, self._values, self._positions, self._mask)
        self._keys, self._values, self._positions, self._mask = (
            None if t is None else t[:, :length] for t in held
        )

    def reset(self) -> None:
        """Forget everything, the batch size included."""
        self._keys = self._values = self._positions = self._mask = self.owner = None


class StaticKVCache:
    """A cache of a fixed number of slots, written in place: a compiled step serves every length.

    Slots not yet written are never attended to, so `max_length` does not change a result. It holds
    no gradients: use it under `torch.no_grad()` or `torch.inference_mode()`.

    Arguments:
        batch_size: B; another one is an error.
        max_length: slots per row; a token too many is an error (in compiled code PyTorch's own
            error for an index out of bounds).
        num_kv_heads: G.
        head_dim: D.
        dtype: of keys and values, that of the projections' outputs (under autocast the autocast
            dtype).
        device: of keys and values.

    >>> from brickwork.blocks import Attention
    >>> attention, x = Attention(8, num_heads=2, causal=True), torch.randn(1, 5, 8)
    >>> cache = StaticKVCache(1, 16, num_kv_heads=2, head_dim=4)
    >>> with torch.no_grad():
    ...     y = torch.cat([attention(x[:, :3], cache=cache), attention(x[:, 3:], cache=cache)], 1)
    >>> torch.allclose(y, attention(x), atol=1e-6), cache.length
    (True, 5)
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_integer("batch_size", batch_size, least=0)
        check_integer("max_length", max_length, least=1)
        check_integer("num_kv_heads", num_kv_heads, least=1)
        check_integer("head_dim", head_dim, least=1)
        self.batch_size = batch_size
        self.max_length = max_length
        self.owner: str | None = None
        slots = (batch_size, max_length)
        with torch.inference_mode(False):  # so that it can be written outside inference mode too
            self._keys = torch.zeros(*slots, num_kv_heads, head_dim, dtype=dtype, device=device)
            self._values = torch.zeros_like(self._keys)
            self._positions = torch.zeros(slots, dtype=torch.int64, device=device)
            self._mask = torch.zeros(slots, dtype=torch.bool, device=device)
            # A tensor, for a Python number would be compiled in.
            self._length = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def length(self) -> int:
        """The number of slots written, padding included; read from the device."""
        return int(self._length)

    def append(
        self, keys: Tensor, values: Tensor, *, positions: Tensor, mask: Tensor | None = None
    ) -> CacheEntries:
        """Add T tokens, as `KVCache.append`; raises ValueError also past `max_length` and for keys
        that need gradients."""
        _refuse_recomputation()
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError("StaticKVCache holds no gradients: call under torch.no_grad()")
        _check_new(keys, values, self._keys)
        size = keys.shape[:2]
        if values_readable(self._length) and self.length + size[1] > self.max_length:
            raise ValueError(
                f"StaticKVCache holds at most max_length = {self.max_length} tokens, got "
                f"{size[1]} more than the {self.length} in it"
            )
        start = self._length.clone()
        slots = start + torch.arange(size[1], device=start.device)
        new = _all_real(keys) if mask is None else mask
        self._keys.index_copy_(1, slots, keys)
        self._values.index_copy_(1, slots, values)
        self._positions.index_copy_(1, slots, positions.to(torch.int64).expand(size))
        self._mask.index_copy_(1, slots, new)
        self._length.add_(size[1])
        return CacheEntries(self._keys, self._values, self._mask, self._positions, start)

    def held(self) -> CacheEntries:
        """What `append` would return for no new token."""
        return CacheEntries(
            self._keys, self._values, self._mask, self._positions, self._length.clone()
        )

    def next_positions(self) -> Tensor:
        """(B,), each row's largest position of a real token + 1."""
        return _next_positions(self._positions, self._mask)

    def past_mask(self) -> Tensor:
        """(B, max_length) bool, True where a slot holds a real token."""
        return self._mask

    def select(self, index_B: Tensor) -> None:
        """Overwrite row i with what row `index_B[i]` holds; (B,) integers."""
        check_shapes(cache=(self._mask, "B S"), index=(index_B, "B"))
        for held in (self._keys, self._values, self._positions, self._mask):
            held.copy_(held.index_select(0, index_B))

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        _check_crop(length, self.length)
        self._mask[:, length:] = False
        self._length.fill_(length)

    def reset(self) -> None:
        """Forget everything."""
        for held in (self._keys, self._values, self._positions, self._mask, self._length):
            held.zero_()
        self.owner = None


def _check_crop(length: int, held: int) -> None:
    """Raise unless `length` tokens can be kept of `held`."""
    check_integer("length", length, least=0)
    if length > held:
        raise ValueError(f"length must be at most the {held} tokens held, got {length}")


def _check_new(keys: Tensor, values: Tensor, held: Tensor | None) -> None:
    check_shapes(keys=(keys, "B T G D"), values=(values, "B T G D"))
    if held is None:
        return
    check_shapes(cache=(held[:, :1], "B one G D"), keys=(keys, "B T G D"))
    for new in (keys, values):
        for attribute in ("dtype", "device"):
            wanted, got = getattr(held, attribute), getattr(new, attribute)
            if wanted != got:
                raise ValueError(
                    f"keys and values must have the cache's {attribute} {wanted}, got {got}"
                )


def _refuse_recomputation() -> None:
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise ValueError(
            "a cache must not be appended to during a backward pass (activation checkpointing runs "
            "the forward again): train with cache=None, or without checkpointing"
        )


def _all_real(keys: Tensor) -> Tensor:
    return torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)


def _next_positions(positions: Tensor, mask: Tensor | None) -> Tensor:
    real = positions if mask is None else positions.masked_fill(~mask, -1)
    return real.amax(1).long() + 1
