"""Which keys a query sees, and at which positions tokens stand.

B batch, T new tokens, H query heads, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brickwork.blocks.block_kv_cache import BlockKVCache
from brickwork.blocks.kv_cache import CacheEntries, KVCache, StaticKVCache
from brickwork.kernels.checks import values_readable
from brickwork.kernels.sequences import check_mask

Masks = Tensor | Sequence[Tensor] | None


class Split(NamedTuple):
    """The caller's masks, sorted: `padding` (B, T) bool of the new tokens; `past` (B, S - T) bool,
    what is said of the tokens in a cache; `rules` (B or 1, H or 1, T or 1, S or 1), bool or
    floating. None: nothing is said."""

    padding: Tensor | None
    past: Tensor | None
    rules: list[Tensor]


class Visible(NamedTuple):
    """What attention may see: `allowed`, bool, and `bias`, floating, both broadcastable to
    (B, H, T, S) (None: everything, nothing); or `causal` alone, for the triangle T = S."""

    allowed: Tensor | None
    bias: Tensor | None
    causal: bool


def split_masks(
    mask: Masks, batch: int, tokens: int, cache: KVCache | StaticKVCache | BlockKVCache | None
) -> Split:
    """Sort one mask or several; ValueError for a wrong shape, dtype or value."""
    masks = (mask,) if isinstance(mask, Tensor) else () if mask is None else mask
    if not isinstance(masks, (tuple, list)):
        raise ValueError(f"mask must be a tensor or a tuple of tensors, got {mask!r}")
    padding = past = None
    rules = []
    for one in masks:
        if not isinstance(one, Tensor):
            raise ValueError(f"mask must be a tensor or a tuple of tensors, got {one!r}")
        if one.ndim == 2:
            old, new = _split_padding(one, batch, tokens, cache)
            padding = new if padding is None else padding & new
            if old is not None:
                past = old if past is None else past & old
        elif one.ndim in (3, 4):
            if one.dtype != torch.bool and not one.is_floating_point():
                raise ValueError(
                    f"a mask of {one.ndim} axes must be bool or floating point, got {one.dtype}"
                )
            rules.append(one[:, None] if one.ndim == 3 else one)
        else:
            raise ValueError(
                "mask must have shape (B, T), (B, T, S) or one broadcastable to (B, H, T, S), "
                f"got {tuple(one.shape)}"
            )
    return Split(padding, past, rules)


def default_positions(
    padding: Tensor | None,
    starts: Tensor | None,
    cache: KVCache | StaticKVCache | BlockKVCache | None,
    *,
    tokens: int,
    device: torch.device,
) -> Tensor:
    """(B or 1, T): count the real tokens of each sequence, going on from the cache.

    >>> padding = torch.tensor([[False, True, True, False, True]])
    >>> default_positions(padding, None, None, tokens=5, device="cpu")
    tensor([[0, 0, 1, 1, 2]])
    """
    positions = torch.arange(tokens, device=device)[None]
    if padding is not None:
        positions = padding.long().cumsum(1) - 1
    if starts is not None and tokens:
        positions = positions - torch.where(starts, positions, 0).cummax(1).values
    following = None if cache is None else cache.next_positions()
    if following is not None:
        positions = positions + following[:, None]
    return positions.clamp(min=0)  # padding before the first real token


def sequence_lengths(
    positions: Tensor, real: Tensor | None, starts: Tensor | None = None
) -> Tensor:
    """The largest position of a real token + 1, of each row (B,) or, where `starts` marks packed
    sequences, of the sequence of each token (B, T).

    >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
    >>> sequence_lengths(positions, None)
    tensor([3])
    >>> sequence_lengths(positions, None, torch.tensor([[False, False, False, True, False]]))
    tensor([[3, 3, 3, 2, 2]])
    """
    ends = positions + 1 if real is None else torch.where(real, positions + 1, 0)
    if starts is None:
        return ends.amax(1) if ends.shape[1] else ends.sum(1)
    sequence = starts.cumsum(1)
    longest = torch.zeros_like(sequence).scatter_reduce(
        1, sequence, ends.expand_as(sequence), "amax"
    )
    return longest.gather(1, sequence)


def visible_keys(
    entries: CacheEntries,
    masks: Split,
    starts: Tensor | None,
    *,
    causal: bool,
    num_heads: int,
    tokens: int,
) -> Visible:
    """Everything that hides keys, as one rule."""
    batch, keys = entries.keys.shape[:2]
    device = entries.keys.device
    hiding, biases = [], []
    real = entries.mask
    if masks.past is not None:
        unsaid = keys - masks.past.shape[1]
        said = torch.nn.functional.pad(masks.past, (0, unsaid), value=True)
        real = said if real is None else real & said
    if real is not None:
        hiding.append(real[:, None, None])
    if starts is not None:
        sequence = starts.cumsum(1)
        hiding.append((sequence[:, :, None] == sequence[:, None])[:, None])
    for rule in masks.rules:
        rule = _fit(rule, (batch, num_heads, tokens, keys), entries.start)
        if rule.dtype == torch.bool:
            hiding.append(rule)
        else:
            hiding.append(rule > torch.finfo(rule.dtype).min)
            biases.append(rule)
    # One new token is the last of its row: whatever the cache holds lies before it.
    if causal and tokens != 1:
        if not hiding and isinstance(entries.start, int) and entries.start == 0:
            return Visible(None, None, True)
        slots = entries.start + torch.arange(tokens, device=device)
        hiding.append((torch.arange(keys, device=device) <= slots[:, None])[None, None])
    allowed = bias = None
    for one in hiding:
        allowed = one if allowed is None else allowed & one
    for one in biases:
        bias = one if bias is None else bias + one
    return Visible(allowed, bias, False)


def _split_padding(
    mask: Tensor, batch: int, tokens: int, cache: KVCache | StaticKVCache | BlockKVCache | None
) -> tuple[Tensor | None, Tensor]:
    """What a (B, T) or (B, S) mask says of the tokens in the cache and of the new ones."""
    if mask.device.type == "cpu" and mask.dtype != torch.bool and values_readable(mask):
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel():
            raise ValueError(f"mask of shape (B, T) must hold only 0 and 1, got {wrong[0].item()}")
    if cache is None or mask.shape[1] == tokens:
        return None, _padding(mask, (batch, tokens))
    if isinstance(cache, StaticKVCache) and torch.compiler.is_compiling():
        raise ValueError(
            f"mask must be of the new tokens, (B, T) = {(batch, tokens)}, in compiled code with a "
            f"StaticKVCache, got {tuple(mask.shape)}"
        )
    held = cache.length
    mask = _padding(mask, (batch, held + tokens))
    old, new = mask[:, :held], mask[:, held:]
    known = cache.past_mask()
    readable = old.device.type == "cpu" and values_readable(old)
    if known is not None and readable and (old & ~known[:, :held]).any():
        raise ValueError("mask must not call a token real that came into the cache as padding")
    return old, new


def _padding(mask: Tensor, size: tuple[int, int]) -> Tensor:
    checked = check_mask(mask, size)
    assert checked is not None
    return checked


def _fit(rule: Tensor, size: tuple[int, int, int, int], start: int | Tensor) -> Tensor:
    """Check that `rule` is broadcastable to `size`; in a static cache add the unwritten slots."""
    keys, tokens = size[3], size[2]
    given = rule.shape[3]
    readable = isinstance(start, Tensor) and values_readable(start)
    if given not in (1, keys) and readable and given == int(start) + tokens:
        rule = torch.nn.functional.pad(rule, (0, keys - given))
    if any(got not in (1, wanted) for got, wanted in zip(rule.shape, size)):
        raise ValueError(
            f"mask must be broadcastable to (B, H, T, S) = {size}, got {tuple(rule.shape)}"
        )
    return rule
