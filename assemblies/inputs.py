"""What an assembly's forward is given: embedding, checks, and next-token targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from brickwork.blocks.diffusion_canvas import free_to_look_at
from brickwork.blocks.kv_cache import KVCache, StaticKVCache
from brickwork.blocks.masked_diffusion import Noise
from brickwork.kernels.checks import check_floating, check_shapes


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


def check_per_layer(layers: int, *, cache: object = None, routing: object = None) -> None:
    """Raise unless each is None or a list with one entry for each layer, no cache in it twice.

    >>> check_per_layer(2, cache=[KVCache()])
    Traceback (most recent call last):
    ValueError: cache must be a list of 2, one KVCache or StaticKVCache per layer, got a list of 1
    """
    _check_entries("cache", cache, layers, KVCache, StaticKVCache)
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


def maskable_tokens(labels: Tensor, input_ids: Tensor) -> Tensor:
    """(B, T), True where a label is not -100: the tokens that noise may mask.

    Raises:
        ValueError: a wrong shape or dtype, or (looked at on the CPU only) labels that are neither
            -100 nor the token of input_ids, which is what is predicted.
    """
    check_shapes(input_ids=(input_ids, "B T"), labels=(labels, "B T"))
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels must be int64 or int32, got {labels.dtype}")
    maskable = labels != -100
    if free_to_look_at(labels) and free_to_look_at(input_ids):
        wrong = maskable & (labels != input_ids)
        if wrong.any():
            raise ValueError(
                f"labels must be -100 or the token of input_ids, got {labels[wrong][0]} for token "
                f"{input_ids[wrong][0]} at {tuple(wrong.nonzero()[0].tolist())}"
            )
    return maskable


def check_noise(noise: Noise, input_ids: Tensor, maskable: Tensor) -> Noise:
    """`noise` of `input_ids` (B, T), its p cut to the maskable tokens.

    Raises:
        ValueError: not a Noise, a wrong shape or dtype, or (looked at on the CPU only) a masked
            token that is not maskable or whose p is 0.
    """
    if not isinstance(noise, Noise):
        raise ValueError(f"noise must be a Noise, got {type(noise).__name__}")
    shapes = {f"noise.{name}": (tensor, "B T") for name, tensor in noise._asdict().items()}
    check_shapes(input_ids=(input_ids, "B T"), **shapes)
    if noise.mask.dtype != torch.bool:
        raise ValueError(f"noise.mask must be bool, got {noise.mask.dtype}")
    check_floating(**{"noise.p": noise.p})
    if free_to_look_at(noise.mask) and free_to_look_at(maskable) and (noise.mask & ~maskable).any():
        raise ValueError(
            "noise.mask must be False where labels are -100 or attention_mask is 0, got True at "
            f"{tuple((noise.mask & ~maskable).nonzero()[0].tolist())}"
        )
    if (
        free_to_look_at(noise.mask)
        and free_to_look_at(noise.p)
        and (noise.p[noise.mask] <= 0).any()
    ):
        raise ValueError("noise.p must be above 0 where noise.mask is True")
    return noise._replace(mask=noise.mask & maskable, p=noise.p.masked_fill(~maskable, 0))


def next_token_labels(
    labels: Tensor, *, mask: Tensor | None = None, seq_ids: Tensor | None = None
) -> Tensor:
    """The target of every position: the next position's label, -100 where there is none to score.

    Arguments:
        labels: (B, T), -100 where the token is not to be predicted.
        mask: (B, T), True for real tokens; nothing is predicted from or at padding.
        seq_ids: (B, T); nothing is predicted across the border of two packed sequences.

    Returns:
        (B, T).

    >>> next_token_labels(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    if labels.shape[1] == 0:
        return labels
    ahead = labels[:, 1:]
    if mask is not None:
        ahead = ahead.masked_fill(~(mask[:, :-1] & mask[:, 1:]), -100)
    if seq_ids is not None:
        ahead = ahead.masked_fill(seq_ids[:, :-1] != seq_ids[:, 1:], -100)
    return torch.nn.functional.pad(ahead, (0, 1), value=-100)
