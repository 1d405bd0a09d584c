"""Padding and packing, as the ops that run along a sequence understand them.

A token whose `mask` is False is passed over: it changes no state, its result is 0, and no gradient
reaches or leaves it, whatever its inputs hold. `seq_ids` marks packed sequences: a sequence starts
wherever the id differs from that of the token before it in scan direction, tokens passed over not
counting. Only the equality of neighbours matters, not the ids themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_mask(mask: Tensor | None, size: tuple[int, int]) -> Tensor | None:
    """`mask` as a bool tensor; ValueError unless it is (B, T), bool or integer.

    >>> check_mask(torch.tensor([[1, 0]]), (1, 2))
    tensor([[ True, False]])
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool and mask.dtype not in _INTEGERS:
        raise ValueError(f"mask must be bool or integer (1 = real), got {mask.dtype}")
    if tuple(mask.shape) != size:
        raise ValueError(f"mask must have shape (B, T) = {size}, got {tuple(mask.shape)}")
    return mask if mask.dtype == torch.bool else mask != 0


def check_seq_ids(seq_ids: Tensor | None, size: tuple[int, int]) -> None:
    """ValueError unless `seq_ids` is (B, T) of integers."""
    if seq_ids is None:
        return
    if seq_ids.dtype not in _INTEGERS:
        raise ValueError(f"seq_ids must be integers, got {seq_ids.dtype}")
    if tuple(seq_ids.shape) != size:
        raise ValueError(f"seq_ids must have shape (B, T) = {size}, got {tuple(seq_ids.shape)}")


def sequence_starts(
    seq_ids: Tensor | None, mask: Tensor | None = None, *, reverse: bool = False
) -> Tensor | None:
    """(B, T), True where a real token has another id than the real token before it.

    "Before" is to the left, or to the right if `reverse`. The first real token never is a start:
    an initial state belongs to its sequence.

    >>> ids = torch.tensor([[7, 7, 9, 9]])
    >>> sequence_starts(ids)
    tensor([[False, False,  True, False]])
    >>> sequence_starts(ids, reverse=True)
    tensor([[False,  True, False, False]])
    """
    if seq_ids is None:
        return None
    if reverse:  # flips of (B, T) integers only
        flipped = None if mask is None else mask.flip(1)
        starts = sequence_starts(seq_ids.flip(1), flipped)
        return None if starts is None else starts.flip(1)
    if mask is None:
        before = torch.arange(seq_ids.shape[1], device=seq_ids.device) - 1
        return seq_ids != seq_ids[:, before.clamp(min=0)]
    before = last_real(mask)
    return mask & (before >= 0) & (seq_ids != seq_ids.gather(1, before.clamp(min=0)))


def last_real(mask: Tensor) -> Tensor:
    """(B, T), the index of the nearest real token to the left, -1 where there is none.

    >>> last_real(torch.tensor([[True, False, True]]))
    tensor([[-1,  0,  0]])
    """
    if mask.shape[1] == 0:
        return mask.long()
    index = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    latest = index.masked_fill(~mask, -1).cummax(1).values
    return torch.nn.functional.pad(latest, (1, 0), value=-1)[:, : mask.shape[1]]


def scan_ranks(mask: Tensor, *, reverse: bool = False) -> Tensor:
    """(B, T), each token's place when the real tokens come first, in scan order, then the others.

    >>> scan_ranks(torch.tensor([[True, False, True]]), reverse=True)
    tensor([[1, 2, 0]])
    """
    if reverse:
        return scan_ranks(mask.flip(1)).flip(1)
    so_far = mask.long().cumsum(1)  # no sort: ONNX has no stable one
    behind = so_far[:, -1:] + torch.arange(mask.shape[1], device=mask.device) - so_far
    return torch.where(mask, so_far - 1, behind)


def scan_order(mask: Tensor, *, reverse: bool = False) -> Tensor:
    """(B, T), the indices of the real tokens in scan order, then those of the others.

    >>> scan_order(torch.tensor([[True, False, True]]), reverse=True)
    tensor([[2, 0, 1]])
    """
    index = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    return torch.zeros_like(index).scatter(1, scan_ranks(mask, reverse=reverse), index)


def take_tokens(tensor: Tensor, index: Tensor) -> Tensor:
    """The tokens of `tensor` (B, T, C) at `index` (B, S), as (B, S, C)."""
    return tensor.gather(1, index[..., None].expand(-1, -1, tensor.shape[2]))


def why_not_plain(x: Tensor) -> str | None:
    """None for one token, as in decoding, where plain operators are the fastest, and in an exported
    program, which consists of them and must not ask for the length; else a reason."""
    if torch.compiler.is_exporting() or x.shape[1] == 1:
        return None
    return "another backend is faster for more than one token"
