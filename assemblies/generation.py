"""Left-to-right generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from brickwork.assemblies.decoder import Decoder
from brickwork.assemblies.inputs import check_ids, check_mask
from brickwork.assemblies.sampling import check_sampling, pick
from brickwork.kernels.checks import check_integer, check_one_of, check_shapes

if TYPE_CHECKING:
    from brickwork.assemblies.rish import Rish


CacheKind = Literal["growing", "static", "none"]


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
    cache: CacheKind | None = None,
    prefill_chunk: int | None = None,
    compile_step: bool = False,
    generator: torch.Generator | None = None,
    callback: Callable[[int, Tensor], object] | None = None,
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
        cache: `"growing"` or `"static"`, buffers of the final length, or `"none"`, every step
            anew. Default: growing, or none if the config says `use_cache=False`.
        prefill_chunk: run the prompts through the model so many tokens at a time, which bounds
            the memory of long ones. Default: at once.
        compile_step: compile the step of a new token, with `cache="static"`: one compilation for
            each batch size and, in steps of 256, each final length.
        generator: source of randomness for sampling.
        callback: called `callback(step, tokens)` with each step's tokens (B,), 1 for the first; it
            must not change the model.

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
    check_one_of("cache", cache, (None, "growing", "static", "none"))
    kind: CacheKind = cache or ("growing" if config.use_cache else "none")
    if prefill_chunk is not None:
        check_integer("prefill_chunk", prefill_chunk, least=1)
        if kind == "none" or model.rope.length_dependent:
            raise ValueError(
                "prefill_chunk must be None without a cache, and with a RoPE whose angles depend "
                "on the length: every chunk would be of another"
            )
    if compile_step and kind != "static":
        raise ValueError(f"compile_step needs cache='static', got {kind!r}")
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
        decoder = Decoder(model, input_ids, mask, max_new_tokens, kind, prefill_chunk, compile_step)
        return _generate(decoder, input_ids, max_new_tokens, eos, generator, callback,
                         (temperature, top_k, top_p))  # fmt: skip
    finally:
        for module, training in modes.items():
            module.training = training


def _generate(
    decoder: Decoder,
    input_ids: Tensor,
    max_new_tokens: int,
    eos: list[int],
    generator: torch.Generator | None,
    callback: Callable[[int, Tensor], object] | None,
    sampling: tuple[float, int | None, float | None],
) -> Tensor:
    config = decoder.model.config
    stops = torch.tensor(eos, dtype=torch.int64, device=input_ids.device)
    alive = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    columns = [input_ids]
    for step in range(1, max_new_tokens + 1 if len(input_ids) else 1):
        logits = decoder.logits(columns[-1])
        token = pick(logits.float(), generator, *sampling)
        if eos:
            filler = eos[0] if config.pad_token_id is None else config.pad_token_id
            token = torch.where(alive, token, filler)
            alive = alive & ~torch.isin(token, stops)
        columns.append(token[:, None].to(input_ids.dtype))
        if callback is not None:
            callback(step, columns[-1][:, 0].clone())
        if eos and not alive.any():
            break
    return torch.cat(columns, 1)


def _stops(eos_token_id: int | Sequence[int] | None, vocab_size: int) -> list[int]:
    if eos_token_id is None:
        return []
    ids = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
    for token in ids:
        check_integer("eos_token_id", token, least=0)
        if token >= vocab_size:
            raise ValueError(f"eos_token_id must be in [0, {vocab_size}), got {token}")
    return ids
