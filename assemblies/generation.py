"""Left-to-right generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brickwork.assemblies.inputs import check_ids
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
    eos_token_id: int | None = None,
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
        eos_token_id: stops a row; default: the config's. Then come `pad_token_id`s (without one,
            more of the same id) until every row has stopped.
        generator: source of randomness for sampling.

    Returns:
        (B, T + new), the prompts as given and what was added.

    Raises:
        ValueError: padding that is not on the left, a length past the model's limit, ids outside
            the vocabulary, or an option out of its range.
    """
    config = model.config
    check_shapes(input_ids=(input_ids, "B T"), attention_mask=(attention_mask, "B T"))
    check_ids("input_ids", input_ids, config.vocab_size)
    check_integer("max_new_tokens", max_new_tokens, least=0)
    _check_sampling(temperature, top_k, top_p)
    eos = config.eos_token_id if eos_token_id is None else eos_token_id
    if eos_token_id is not None and not 0 <= eos_token_id < config.vocab_size:
        raise ValueError(f"eos_token_id must be in [0, {config.vocab_size}), got {eos_token_id}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = mask.bool()
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
    was_training = model.training
    model.eval()
    try:
        return _generate(model, input_ids, mask, max_new_tokens, eos, generator,
                         (temperature, top_k, top_p))  # fmt: skip
    finally:
        model.train(was_training)


def _generate(
    model: Rish,
    ids: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    eos: int | None,
    generator: torch.Generator | None,
    sampling: tuple[float, int | None, float | None],
) -> Tensor:
    config = model.config
    filler = eos if config.pad_token_id is None else config.pad_token_id
    alive = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
    cache: list[KVCache] | None = None
    for _ in range(max_new_tokens if ids.shape[0] else 0):
        if cache is None or _angles_change(model, mask.sum(1)):
            cache = [KVCache() for _ in model.layers] if config.use_cache else None
            logits = model(ids, attention_mask=mask, cache=cache).logits
        else:
            logits = model(ids[:, -1:], attention_mask=mask[:, -1:], cache=cache).logits
        token = _pick(logits[:, -1].float(), generator, *sampling)
        if eos is not None and filler is not None:
            token = torch.where(alive, token, filler)
            alive = alive & (token != eos)
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


def _pick(
    logits_BV: Tensor,
    generator: torch.Generator | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV / temperature
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    if top_p is not None:
        ordered, order = logits_BV.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        dropped = (before >= top_p).scatter(-1, order, before >= top_p)
        logits_BV = logits_BV.masked_fill(dropped, -torch.inf)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number of at least 0, got {temperature}")
    if top_k is not None:
        check_integer("top_k", top_k, least=1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if temperature == 0 and (top_k, top_p) != (None, None):
        raise ValueError("top_k and top_p sample: give a temperature above 0 with them")
