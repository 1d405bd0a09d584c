"""What an assembly's forward is given: embedding and checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from brickwork.blocks.diffusion_canvas import free_to_look_at
from brickwork.blocks.kv_cache import KVCache, StaticKVCache
from brickwork.kernels.checks import check_shapes


def embed(
    embedding: nn.Embedding,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    labels: Tensor | None = None,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """The embedded input (B, T, C), from ids or as given; exactly one of them.

    Raises:
        ValueError: both or neither given, a wrong shape or dtype, or ids outside the vocabulary
            (looked at on the CPU only, where it costs no synchronisation).
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids and inputs_embeds must be given")
    if input_ids is None:
        check_shapes(inputs_embeds=(inputs_embeds, "B T C"), embedding=(embedding.weight, "V C"))
        check_shapes(inputs_embeds=(inputs_embeds, "B T C"), labels=(labels, "B T"))
        assert inputs_embeds is not None
        return inputs_embeds
    check_shapes(input_ids=(input_ids, "B T"), labels=(labels, "B T"))
    check_ids("input_ids", input_ids, vocab_size or embedding.num_embeddings)
    return embedding(input_ids)


def check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise unless `ids` are int64 or int32 and, where looking is free, in the vocabulary."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {ids.dtype}")
    if ids.numel() == 0 or not free_to_look_at(ids):
        return
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{name} must be in [0, {vocab_size}), got {int(ids.min())} to {int(ids.max())}"
        )


def check_mask(name: str, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A (B, T) mask of `like`, (B, T) or (B, T, C), as bool: 1 is real; None stays None."""
    if mask is None:
        return None
    check_shapes(inputs=(like, "B T C" if like.ndim == 3 else "B T"), **{name: (mask, "B T")})
    if mask.dtype == torch.bool:
        return mask
    if free_to_look_at(mask) and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} must be 0 (padding) or 1 (real) everywhere")
    return mask != 0


def rows_at(name: str, x: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
    """The rows of x (B, T, C) at `index` (B, K) integers: (B, K, C)."""
    if labels is not None:
        raise ValueError(f"{name} must be None with labels: all their tokens are scored")
    check_shapes(inputs=(x, "B T C"), **{name: (index, "B K")})
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, got {index.dtype}")
    if free_to_look_at(index) and index.numel():
        least, most = (int(bound) for bound in torch.aminmax(index))
        if least < 0 or most >= x.shape[1]:
            raise ValueError(f"{name} must be in [0, {x.shape[1]}), got {least} to {most}")
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def padding(mask: Tensor | Sequence[Tensor] | None) -> Tensor | None:
    """The one of an attention's masks that says which tokens are real, (B, T), or None."""
    masks = [mask] if isinstance(mask, Tensor) else mask or ()
    return next((one for one in masks if one.ndim == 2), None)


def check_per_layer(
    layers: int,
    *,
    cache: object = None,
    routing: object = None,
    kinds: tuple[type, ...] = (KVCache, StaticKVCache),
) -> None:
    """Raise unless each is None or a list with one entry for each layer, no cache in it twice.

    `kinds` are the caches that the model takes.

    >>> check_per_layer(2, cache=[KVCache()])
    Traceback (most recent call last):
    ValueError: cache must be a list of 2, one KVCache or StaticKVCache per layer, got a list of 1
    """
    _check_entries("cache", cache, layers, *kinds)
    _check_entries("routing", routing, layers, Tensor)
    if not isinstance(cache, Sequence) or torch.compiler.is_compiling():
        return
    if len({id(entry) for entry in cache}) < layers:
        raise ValueError("cache must be another object for each layer, got one for several")


def _check_entries(name: str, given: object, layers: int, *kinds: type) -> None:
    if given is None:
        return
    kind = " or ".join(kind.__name__ for kind in kinds)
    rule = f"{name} must be a list of {layers}, one {kind} per layer"
    if not isinstance(given, Sequence):
        raise ValueError(f"{rule}, got {type(given).__name__}")
    if len(given) != layers:
        raise ValueError(f"{rule}, got a {type(given).__name__} of {len(given)}")
    for i, entry in enumerate(given):
        if not isinstance(entry, kinds):
            raise ValueError(f"{rule}, got {type(entry).__name__} for layer {i}")
