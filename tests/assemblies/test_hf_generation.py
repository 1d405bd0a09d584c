"""`generate()` of transformers over Rish."""

from __future__ import annotations

import inspect

import pytest
import torch
from hf_models import left_padded, rish, token_ids
from transformers import DynamicCache, StaticCache

from brickwork.assemblies.hf_cache import CACHE_NAME

DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8}
LONGROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 8,
    },
}
YARN = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
}
SAMPLE = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
PADDED = (3, 6, 1)

# Name: (config, lengths of the prompts, arguments of generate, those of the cached call alone)
CONFIGURATIONS = {
    "greedy": ({}, (5, 5), {}, {}),
    "left padded": ({}, PADDED, {}, {}),
    "one row": ({}, (4,), {}, {}),
    "sampling": ({}, (5, 5), SAMPLE, {}),
    "sampling padded": ({}, PADDED, SAMPLE, {}),
    "sampling several": ({}, PADDED, SAMPLE | {"num_return_sequences": 3}, {}),
    "beams": ({}, (5, 5), {"num_beams": 3}, {}),
    "beams padded": ({}, PADDED, {"num_beams": 3, "num_return_sequences": 2}, {}),
    "beams long": ({}, PADDED, {"num_beams": 2, "length_penalty": 2.0, "eos_token_id": 7}, {}),
    "beam sampling": ({}, PADDED, SAMPLE | {"num_beams": 3}, {}),
    "penalties": ({}, PADDED, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}, {}),
    "stops": ({}, PADDED, {"eos_token_id": list(range(5, 15))}, {}),
    "static": ({}, (5, 5), {}, {"cache_implementation": "static"}),
    "static padded": ({}, PADDED, {}, {"cache_implementation": "static"}),
    "static beams": ({}, PADDED, {"num_beams": 3}, {"cache_implementation": "static"}),
    "chunked prefill": ({}, (9, 7), {}, {"prefill_chunk_size": 4}),
    "prompt lookup": ({}, (9,), {}, {"prompt_lookup_num_tokens": 3}),
    "eager": ({"attn_implementation": "eager"}, PADDED, {}, {}),
    "eager static": (
        {"attn_implementation": "eager"}, PADDED, {}, {"cache_implementation": "static"},
    ),
    "biases, one group": (
        {"attention_bias": True, "num_key_value_heads": 1}, PADDED, {"num_beams": 2}, {},
    ),
    "tied head": ({"tie_word_embeddings": True}, PADDED, {}, {}),
    "yarn": (YARN, PADDED, {}, {}),
    "dynamic": (DYNAMIC, PADDED, {}, {}),
    "dynamic beams": (DYNAMIC, PADDED, {"num_beams": 3}, {}),
    "dynamic static": (DYNAMIC, (7, 6), {}, {"cache_implementation": "static"}),
    "longrope": (LONGROPE, PADDED, {}, {}),
    "longrope sampling": (LONGROPE, PADDED, SAMPLE, {}),
}  # fmt: skip


def generate(model, inputs, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": 10, "do_sample": False} | options
    return model.generate(**inputs, **options)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_cached_ids_equal_uncached_ids(name):
    """A7, A8, A9, H3, R9"""
    fields, lengths, options, cached = CONFIGURATIONS[name]
    model, inputs = rish(**fields), left_padded(*lengths)
    expected = generate(model, inputs, use_cache=False, **options)
    found = generate(model, inputs, use_cache=True, **options, **cached)
    assert found.tolist() == expected.tolist()
    assert len({tuple(row) for row in expected[:, -10:].tolist()}) > 1 or len(lengths) == 1


@pytest.mark.parametrize("fields", [{}, DYNAMIC, LONGROPE], ids=["plain", "dynamic", "longrope"])
def test_ids_are_those_of_the_assembly_and_of_each_prompt_alone(fields):
    """A7, A8"""
    model, inputs = rish(**fields), left_padded(*PADDED)
    found = generate(model, inputs)
    assert torch.equal(found, model.assembly().generate(**inputs, max_new_tokens=10))
    for row, length in enumerate(PADDED):
        alone = generate(model, {"input_ids": inputs["input_ids"][row : row + 1, -length:]})
        assert torch.equal(found[row, -10:], alone[0, -10:])


def test_a_step_sees_one_token_and_the_cache_under_its_name(monkeypatch):
    """H3"""
    model, seen = rish(), []
    forward = model.model.forward

    def counting(**inputs):
        seen.append((inputs["input_ids"].shape[1], inputs["cache"] is not None))
        return forward(**inputs)

    monkeypatch.setattr(model.model, "forward", counting)
    out = generate(model, left_padded(5, 2), return_dict_in_generate=True)
    assert seen == [(5, True)] + [(1, True)] * 9
    assert out[CACHE_NAME].get_seq_length() == 14


def test_a_cache_goes_on_where_it_stopped():
    model, inputs = rish(), left_padded(4, 6)
    longer = generate(model, inputs, max_new_tokens=8)
    cache = DynamicCache(config=model.config)
    first = generate(model, inputs, max_new_tokens=3, **{CACHE_NAME: cache})
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.int64)], 1)
    again = {"input_ids": first, "attention_mask": mask}
    assert torch.equal(generate(model, again, max_new_tokens=5, **{CACHE_NAME: cache}), longer)


def test_generates_from_embeddings():
    model, inputs = rish(), left_padded(5, 3)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    expected = generate(model, inputs)[:, 5:]
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    assert torch.equal(generate(model, given)[:, -10:], expected)


def test_chunks_of_logits_with_either_name_of_the_cache():
    """A3, H3"""
    model, ids = rish(), token_ids(2, 9)
    full = model(ids).logits
    for name in ("cache", "past_key_values"):
        cache, parts = DynamicCache(config=model.config), []
        for chunk in ids.split([4, 1, 3, 1], 1):
            out = model(chunk, **{name: cache})
            assert (out.get("cache") or out.get("past_key_values")) is cache
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=1e-5)
    static = StaticCache(config=model.config, max_cache_len=16)
    parts = [model(chunk, cache=static).logits for chunk in ids.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=1e-5)


def test_the_size_of_a_static_cache_changes_nothing():
    """A9"""
    model, inputs = rish(), left_padded(5, 3)
    expected = model(**inputs).logits
    for slots in (5, 9, 40):
        cache = StaticCache(config=model.config, max_cache_len=slots)
        for _ in range(2):
            found = model(**inputs, cache=cache).logits
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            cache.reset()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_axes(dtype):
    model, ids = rish(), token_ids(2, 5)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) != 1)
    mask = allowed[None, None].expand(2, 1, 5, 5)
    if dtype.is_floating_point:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    padding = torch.tensor([[1, 0, 1, 1, 1]]).expand(2, 5)
    where = torch.arange(5)[None]
    found = model(ids, attention_mask=mask, position_ids=where).logits
    expected = model(ids, attention_mask=padding, position_ids=where).logits
    torch.testing.assert_close(found[:, 2:], expected[:, 2:], atol=1e-5, rtol=1e-5)


def test_errors():
    model, ids = rish(), token_ids(2, 3)
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="cache and past_key_values are one argument"):
        model(ids, cache=cache, past_key_values=cache)
    with pytest.raises(ValueError, match="cache must be a transformers Cache"):
        model(ids, cache=[1])
    with pytest.raises(TypeError, match="kv_cache"):
        model(ids, kv_cache=cache)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, S\) = \(2, 4\)"):
        model(ids[:, :1], cache=cache, attention_mask=torch.ones(2, 1))
    with pytest.raises(ValueError, match="batch size 2"):
        model(ids[:1, :1], cache=cache)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(ids, output_attentions=True)
    dynamic = rish(**DYNAMIC)
    with pytest.raises(ValueError, match="position_ids must count the real tokens"):
        dynamic(ids, use_cache=True, position_ids=torch.tensor([[0, 2, 4]]))
    with pytest.raises(ValueError, match="pass all input_ids, no chunks"):
        generate(dynamic, left_padded(12), prefill_chunk_size=4)
    repeated = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5]])}
    with pytest.raises(ValueError, match="decode one token at a time"):
        generate(dynamic, repeated, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="max_positions = 64"):
        generate(model, left_padded(60))


def test_generate_finds_the_arguments_it_looks_for():
    assert "logits_to_keep" in inspect.signature(rish().forward).parameters
