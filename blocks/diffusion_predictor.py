"""What a masked-diffusion model predicts for a block's masks: plain, guided, with block caches.

Shapes: B rows, T columns of the canvas, K masks of a block, A columns of a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brickwork.blocks.attention import Attention
from brickwork.blocks.block_kv_cache import BlockKVCache
from brickwork.blocks.diffusion_canvas import (
    Canvas,
    checked_logits,
    cut_vocabulary,
    model_logits,
)
from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.checks import check_floating, check_integer, check_one_of

Cache = Literal["prefix", "dual"]
LogitsProcessor = Callable[[Tensor, Tensor, Tensor], Tensor]
ColumnsPass = Callable[[Tensor, Tensor, slice, Tensor | None], Tensor]


class Predictor:
    """Logits (B, K, V) at the masks of a block, -Inf for tokens that must not be taken.

    `passes` counts the forward passes of the model, `full_passes` those over the whole canvas. The
    arguments are those of `sample`; `known` (B, T) are the tokens that guidance masks.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        canvas: Canvas,
        *,
        known: Tensor,
        cfg_scale: float,
        mask_token_id: int,
        vocab_size: int | None,
        suppress_ids: Sequence[int] = (),
        logits_processor: LogitsProcessor | None = None,
        cache: Cache | None = None,
        refresh_every: int | None = None,
    ) -> None:
        for token in suppress_ids:
            check_integer("each of suppress_ids", token, least=0)
        check_one_of("cache", cache, (None, "prefix", "dual"))
        if refresh_every is not None:
            check_integer("refresh_every", refresh_every, least=1)
            if cache is None:
                raise ValueError("refresh_every must be None without a cache, which it refreshes")
        self.model = model
        self.known = known
        self.cfg_scale = cfg_scale
        self.mask_token_id = mask_token_id
        self.vocab_size = vocab_size
        self.suppress_ids = {*suppress_ids, mask_token_id}
        self.logits_processor = logits_processor
        self.refresh_every = refresh_every
        self.kind = cache
        self.copies = 2 if cfg_scale > 0 else 1  # the canvas and, below it, the unguided one
        self.mask = None if canvas.mask is None else canvas.mask.repeat(self.copies, 1)
        self.ends = canvas.real.sum(1, keepdim=True)
        self.caches = [] if cache is None else _caches(model, self.mask)
        # A model may offer passes over columns that cost less than its forward.
        self.columns_pass: ColumnsPass | None = None
        self.offered = False
        offer = getattr(model, "columns_pass", None)
        # Of a wrapper that hands on what it has not, it would be another model's.
        self.offer = offer if getattr(offer, "__self__", None) is model else None
        self.passes = self.full_passes = self.age = 0
        self.barred: Tensor | None = None

    def begin(self, positions_BK: Tensor, sizes: Sequence[int]) -> None:
        """Start a block: row r has its masks at the first `sizes[r]` of `positions_BK`."""
        self.positions = positions_BK
        self.index = positions_BK.repeat(self.copies, 1)
        self.age = 0
        if self.kind is not None:
            size = torch.tensor(sizes, device=positions_BK.device)[:, None]
            self._choose_columns(self.kind, positions_BK, size)

    def __call__(self, ids_BT: Tensor) -> Tensor:
        canvas = ids_BT
        if self.cfg_scale > 0:
            blind = ids_BT.masked_fill(self.known, self.mask_token_id)
            canvas = torch.cat([ids_BT, blind])
        logits = self._plain(canvas) if self.kind is None else self._cached(canvas)
        self.passes += 1
        self.age += 1
        logits = logits.to(compute_dtype(logits))
        if self.cfg_scale > 0:
            cond, un = logits.chunk(2)
            impossible = (cond == -torch.inf) | (un == -torch.inf)
            logits = un + (self.cfg_scale + 1) * (cond - un)
            logits = logits.masked_fill(impossible, -torch.inf)
        if self.logits_processor is not None:
            shape = logits.shape
            logits = self.logits_processor(ids_BT, self.positions, logits)
            if not isinstance(logits, Tensor) or logits.shape != shape:
                got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise ValueError(
                    f"logits_processor must return logits of shape {tuple(shape)}, got {got}"
                )
            check_floating(**{"what logits_processor returns": logits})
        if self.barred is None:
            self.barred = self._barred(logits)
        return logits.index_fill(-1, self.barred, -torch.inf)

    def _plain(self, ids: Tensor) -> Tensor:
        self.full_passes += 1
        logits = model_logits(self.model, ids, self.mask, self.vocab_size)
        return logits[torch.arange(len(ids), device=ids.device)[:, None], self.index]

    def _cached(self, ids: Tensor) -> Tensor:
        full = self.age == 0 if self.refresh_every is None else self.age % self.refresh_every == 0
        columns = None if full else self.columns
        for cache in self.caches:
            cache.select(columns)
        if full:
            self.full_passes += 1
            self.offered = False
            where = torch.arange(ids.shape[1], device=ids.device)[None]
            logits_at: Tensor | None = self.index
        else:
            ids = ids[:, columns] if isinstance(columns, slice) else ids.gather(1, self.where)
            where, logits_at = self.where, self.rows
            if self.offer is not None and not self.offered:  # anew in every block
                self.columns_pass, self.offered = self.offer(self.caches), True
            if self.columns_pass is not None and isinstance(columns, slice):
                logits = self.columns_pass(ids, where, columns, logits_at)
                return cut_vocabulary(logits, self.vocab_size)
        output = self.model(ids, position_ids=where, cache=self.caches, logits_at=logits_at)
        return checked_logits(output, tuple(self.index.shape), self.vocab_size)

    def _choose_columns(self, kind: Cache, positions: Tensor, size: Tensor) -> None:
        """Which columns a pass recomputes, and which of its rows are the block's masks."""
        length, device = self.known.shape[1], positions.device
        if kind == "dual":
            column = torch.arange(positions.shape[1], device=device)
            columns = torch.where(column < size, positions, length)
            rows = None
        else:
            first = positions[:, :1]
            widths = torch.where(size > 0, self.ends - first, 0)
            column = torch.arange(int(widths.max()), device=device)
            columns = torch.where(column < widths, first + column, length)
            rows = (positions - first).clamp(0, len(column) - 1)
        columns = columns.repeat(self.copies, 1)
        self.rows = None if rows is None else rows.repeat(self.copies, 1)
        start, count = int(columns[0, 0]), columns.shape[1]
        run = torch.arange(start, start + count, device=device)
        self.columns: Tensor | slice = columns
        self.where = columns.masked_fill(columns == length, 0)
        if start + count <= length and bool((columns == run).all()):
            self.columns, self.where = slice(start, start + count), run[None]

    def _barred(self, logits: Tensor) -> Tensor:
        size, tokens = logits.shape[-1], self.suppress_ids - {self.mask_token_id}
        if max(tokens, default=0) >= size:
            raise ValueError(f"suppress_ids must be below V = {size}, got {max(tokens)}")
        barred = sorted(token for token in self.suppress_ids if token < size)
        if len(barred) == size:
            raise ValueError(f"suppress_ids must leave one of the {size} tokens besides the mask")
        return torch.tensor(barred, device=logits.device).long()


def _caches(model: Callable[..., Any], mask: Tensor | None) -> list[BlockKVCache]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = sum(isinstance(module, Attention) for module in modules)
    if not layers:
        raise ValueError(
            "model must be a module with Attention blocks to be sampled with a cache, got "
            f"{type(model).__name__}"
        )
    return [BlockKVCache(mask) for _ in range(layers)]
