"""Left-to-right generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brickwork.assemblies.inputs import check_ids, check_mask
from brickwork.assemblies.sampling import check_sampling, pick
from brickwork.blocks.kv_cache import KVCache
from brickwork.kernels.checks import check_integer, check_shapes

if TYPE_CHECKING:
    from brickwork.assemblies.rish import Rish


@torch.no_grad()
def generate(
    model: Rish,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each prompt token by token; cached and uncached decoding give the same ids.

    Arguments:
        input_ids: (B, T) prompts, at least one token each.
        attention_mask: (B, T), 0 for padding, which stands on the left.
        max_new_tokens: how many tokens to add at most.
        temperature: 0 takes the likeliest token, otherwise samples softmax(logits / temperature).
        top_k: sample among the k likeliest tokens only.
        top_p: sample among the likeliest tokens that together reach this probability.
        eos_token_id: one id or several that stop a row, () for none; default: the config's. Then
            come `pad_token_id`s (without one, the first of these) until every row has stopped.
        generator: source of randomness for sampling.

    Returns:
        (B, T + new), the prompts as given and what was added.

    Raises:
        ValueError: padding that is not on the left, a length past the model's limit, ids outside
            the vocabulary, or an option out of its range.
        RuntimeError: the model's logits are NaN or infinite.
    """
    config = model.config
    check_shapes(input_ids=(input_ids, "B T"), attention_mask=(attention_mask, "B T"))
    check_ids("input_ids", input_ids, config.vocab_size)
    check_integer("max_new_tokens", max_new_tokens, least=0)
    check_sampling(temperature, top_k, top_p)
    eos = _stops(config.eos_token_id if eos_token_id is None else eos_token_id, config.vocab_size)
    given = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = check_mask("attention_mask", given, input_ids[..., None])
    assert mask is not None
    if input_ids.shape[1] == 0 or not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "attention_mask must have its padding on the left, and a token in every row"
        )
    limit = config.rope_options()["max_positions"]
    longest = int(mask.sum(1).max()) + max_new_tokens if mask.numel() else 0
    if limit is not None and longest > limit:
        raise ValueError(
            f"prompt and max_new_tokens = {max_new_tokens} reach {longest} tokens, past "
            f"max_position_embeddings = {limit}"
        )
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return _generate(model, input_ids, mask, max_new_tokens, eos, generator,
                         (temperature, top_k, top_p))  # fmt: skip
    finally:
        for module, training in modes.items():
            module.training = training


def _generate(
    model: Rish,
    ids: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    eos: list[int],
    generator: torch.Generator | None,
    sampling: tuple[float, int | None, float | None],
) -> Tensor:
    config = model.config
    stops = torch.tensor(eos, dtype=torch.int64, device=ids.device)
    alive = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
    cache: list[KVCache] | None = None
    for _ in range(max_new_tokens if ids.shape[0] else 0):
        if cache is None or _angles_change(model, mask.sum(1)):
            cache = [KVCache() for _ in model.layers] if config.use_cache else None
            logits = model(ids, attention_mask=mask, cache=cache).logits
        else:
            logits = model(ids[:, -1:], attention_mask=mask[:, -1:], cache=cache).logits
        token = pick(logits[:, -1].float(), generator, *sampling)
        if eos:
            filler = eos[0] if config.pad_token_id is None else config.pad_token_id
            token = torch.where(alive, token, filler)
            alive = alive & ~torch.isin(token, stops)
        ids = torch.cat([ids, token[:, None].to(ids.dtype)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        if not alive.any():
            break
    return ids


def _angles_change(model: Rish, lengths_B: Tensor) -> bool:
    """Whether RoPE's angles differ from those of a token less; a cache is then out of date."""
    rope = model.rope
    if not rope.length_dependent:
        return False
    now, before = (rope.inv_freq(lengths_B.device, n) for n in (lengths_B, lengths_B - 1))
    return not torch.equal(now, before)


def _stops(eos_token_id: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    if eos_token_id is None:
        return []
    ids = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
    for token in ids:
        check_integer("eos_token_id", token, least=0)
        if token >= vocab_size:
            raise ValueError(f"eos_token_id must be in [0, {vocab_size}), got {token}")
    return ids
