"""Keys and values of whole sequences, of which a call recomputes some columns only.

B batch, A columns of a call, S columns of the sequences, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from brickwork.blocks.kv_cache import CacheEntries
from brickwork.kernels.checks import check_shapes


class BlockKVCache:
    """Keys and values of S columns, written in place, for bidirectional attention.

    A first call covers all columns. After `select(columns)` a call holds those columns only: their
    keys and values replace the ones held, and they see everything. What is held of the other
    columns is as old as the call that wrote it, which is the approximation that block caches of
    diffusion models make. One object per attention layer, no gradients.

    Arguments:
        mask: (B, S) bool, True for real tokens, which alone are seen; None where all are.

    >>> from brickwork.blocks import Attention
    >>> attention, x = Attention(8, num_heads=2), torch.randn(1, 5, 8)
    >>> cache, columns = BlockKVCache(), torch.arange(5)[None]
    >>> with torch.no_grad():
    ...     whole = attention(x, positions=columns, cache=cache)
    ...     cache.select(columns[:, 2:4])
    ...     some = attention(x[:, 2:4], positions=columns[:, 2:4], cache=cache)
    >>> torch.allclose(some, whole[:, 2:4], atol=1e-6)
    True
    """

    def __init__(self, mask: Tensor | None = None) -> None:
        self._mask = mask
        self._mask_with_spare: Tensor | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._columns: Tensor | slice | None = None
        self._spare = False
        self.owner: str | None = None  # which layer fills it

    @property
    def batch_size(self) -> int | None:
        """B, None for an empty cache."""
        return None if self._keys is None else self._keys.shape[0]

    @property
    def length(self) -> int:
        """S, 0 for an empty cache."""
        return 0 if self._keys is None else self._keys.shape[1] - 1

    def select(self, columns: Tensor | slice | None) -> None:
        """Say which columns the next calls hold: (B, A) integers, a slice, or None for all.

        The number S stands for no column: its keys and values are seen by nobody.
        """
        self._columns = columns
        self._spare = isinstance(columns, Tensor) and bool((columns == self.length).any())

    def append(
        self, keys: Tensor, values: Tensor, *, positions: Tensor, mask: Tensor | None = None
    ) -> CacheEntries:
        """Write keys and values (B, A, G, D) at the columns selected and return all S.

        Raises:
            ValueError: another batch size, number of columns, head shape, dtype or device than what
                is held; a mask, which is given to the constructor; keys that need gradients.
        """
        if mask is not None:
            raise ValueError("mask must be given to BlockKVCache itself, not to the call")
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError("BlockKVCache holds no gradients: call under torch.no_grad()")
        check_shapes(keys=(keys, "B A G D"), values=(values, "B A G D"), mask=(self._mask, "B S"))
        if self._keys is None or self._values is None:
            self._allocate(keys)
        assert self._keys is not None
        assert self._values is not None
        size, columns = self.length, self._columns
        self._check(keys, self._keys)
        if columns is None:
            self._keys[:, :size], self._values[:, :size] = keys, values
        elif isinstance(columns, slice):
            self._keys[:, columns], self._values[:, columns] = keys, values
        else:
            rows = torch.arange(len(columns), device=columns.device)[:, None]
            self._keys[rows, columns], self._values[rows, columns] = keys, values
        if not self._spare:
            keys, values = self._keys[:, :size], self._values[:, :size]
            return CacheEntries(keys, values, self._mask, positions, 0)
        if self._mask_with_spare is None:
            real = keys.new_ones(len(keys), size, dtype=torch.bool)
            real = real if self._mask is None else self._mask
            self._mask_with_spare = torch.nn.functional.pad(real, (0, 1))
        return CacheEntries(self._keys, self._values, self._mask_with_spare, positions, 0)

    def buffers(self) -> tuple[Tensor, Tensor]:
        """The keys and values (B, S, G, D) held, to be read and written in place; ValueError for an
        empty cache."""
        if self._keys is None or self._values is None:
            raise ValueError("buffers() needs a cache that covers all columns, got an empty one")
        return self._keys[:, : self.length], self._values[:, : self.length]

    def next_positions(self) -> None:
        """There are none: columns are recomputed in any order."""
        raise ValueError("positions must be given with a BlockKVCache")

    def past_mask(self) -> Tensor | None:
        """(B, S) bool, or None where every token is real."""
        return self._mask

    def reset(self) -> None:
        """Forget everything but the mask."""
        self._keys = self._values = self._columns = self.owner = None
        self._spare = False

    def _allocate(self, keys: Tensor) -> None:
        if self._columns is not None:
            raise ValueError("the first call with a BlockKVCache must cover all columns")
        rows, size, *head = keys.shape
        if self._mask is not None and self._mask.shape != (rows, size):
            raise ValueError(
                f"mask must have shape (B, S) = {(rows, size)}, got {tuple(self._mask.shape)}"
            )
        self._keys, self._values = keys.new_zeros(2, rows, size + 1, *head)

    def _check(self, keys: Tensor, held: Tensor) -> None:
        columns = self._columns
        if isinstance(columns, Tensor):
            check_shapes(columns=(columns, "B A"), keys=(keys, "B A G D"))
            count = columns.shape[1]
        else:
            count = len(range(*(columns or slice(None)).indices(self.length)))
        wanted = (held.shape[0], count, *held.shape[2:])
        for what, want, got in (
            ("shape", wanted, tuple(keys.shape)),
            ("dtype", held.dtype, keys.dtype),
            ("device", held.device, keys.device),
        ):
            if want != got:
                raise ValueError(f"keys must have the {what} {want} of the cache, got {got}")
