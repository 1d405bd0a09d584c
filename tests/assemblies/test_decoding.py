from __future__ import annotations

import pytest
import torch
from torch import Tensor

from brickwork.assemblies import Rish, RishConfig
from brickwork.assemblies.decoding import DecodeStep

CACHES = ["growing", "static"]


def build(**changes) -> Rish:
    torch.manual_seed(0)
    options = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 5,
        "num_experts_per_tok": 2, "pad_token_id": None, "eos_token_id": None,
        "initializer_range": 0.5, "max_position_embeddings": 512,
    }  # fmt: skip
    return Rish(RishConfig(**{**options, **changes})).double().eval()


def prompts(rows: int) -> tuple[Tensor, Tensor]:
    """Prompts (rows, 6) padded on the left, and their mask."""
    ids = torch.randint(50, (rows, 6))
    lengths = torch.tensor([6, 3, 1, 5])[:rows]
    return ids, torch.arange(6) >= 6 - lengths[:, None]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": True, "attention_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "vocab_size": 51},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=["plain", "normalised, biases", "tied, odd", "dynamic", "linear"],
)
def test_cached_equals_uncached(changes, cache, rows):
    """A7, A8, A9: both caches, left padding, one row and several, past the first buffers."""
    model = build(**changes)
    ids, mask = prompts(rows)
    for options in ({}, {"temperature": 0.9, "top_k": 7}):
        found = [
            model.generate(
                ids, attention_mask=mask, max_new_tokens=70, cache=kind,
                generator=torch.Generator().manual_seed(4), **options,
            )
            for kind in ("none", cache)
        ]  # fmt: skip
        assert torch.equal(*found)
        assert found[0].shape == (rows, 76)


@pytest.mark.parametrize("cache", CACHES)
def test_prefill_in_chunks_changes_nothing(cache):
    """Chunks that are padding throughout for some rows too."""
    model = build()
    ids, mask = prompts(3)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    for size in (1, 2, 4, 6, 100):
        widths = []
        hook = model.layers[0].register_forward_pre_hook(
            lambda module, args, widths=widths: widths.append(args[0].shape[1])
        )
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, cache=cache, prefill_chunk=size
        )
        hook.remove()
        assert torch.equal(found, whole)
        assert max(widths) == min(size, 6)


def test_the_step_without_modules_is_taken_where_nothing_is_replaced():
    model = build()
    assert DecodeStep.why_not(model) is None
    calls = []
    hook = model.layers[1].moe.register_forward_hook(lambda *args: calls.append(args[1][0].shape))
    assert DecodeStep.why_not(model) == "layers.1.moe has hooks"
    ids, mask = prompts(2)
    hooked = model.generate(ids, attention_mask=mask, max_new_tokens=5)
    assert len(calls) == 5
    hook.remove()
    assert torch.equal(hooked, model.generate(ids, attention_mask=mask, max_new_tokens=5))
    model.layers[0].attention.q_proj = torch.nn.Sequential(model.layers[0].attention.q_proj)
    assert "Sequential" in DecodeStep.why_not(model)
    assert torch.equal(hooked, model.generate(ids, attention_mask=mask, max_new_tokens=5))
    assert "float32 or float64" in DecodeStep.why_not(build().bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert DecodeStep.why_not(build()) == "autocast is on"


@pytest.mark.parametrize("cache", CACHES)
def test_half_precision_and_autocast_generate_with_both_caches(cache):
    ids, mask = prompts(2)
    found = build().bfloat16().generate(ids, attention_mask=mask, max_new_tokens=4, cache=cache)
    assert found.shape == (2, 10)
    with torch.autocast("cpu", torch.bfloat16):
        found = build().float().generate(ids, attention_mask=mask, max_new_tokens=4, cache=cache)
    assert found.shape == (2, 10)


def test_compiled_step_compiles_once(monkeypatch):
    """Every step and, up to 256 tokens, every length run the same code."""
    compiled, compile_ = [], torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, backend=backend, **options)
    )
    torch._dynamo.reset()
    model = build()
    ids, mask = prompts(3)
    for length, new in ((6, 9), (4, 5)):
        options = {"attention_mask": mask[:, -length:], "max_new_tokens": new}
        plain = model.generate(ids[:, -length:], **options)
        found = model.generate(ids[:, -length:], cache="static", compile_step=True, **options)
        assert torch.equal(found, plain)
    assert len(compiled) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("cache", [*CACHES, "none"])
def test_callback_streams_the_tokens_and_stops_end_rows(cache):
    model = build()
    ids, mask = prompts(3)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=12, eos_token_id=())
    stops = whole[:, 8].unique().tolist()
    streamed = []
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, eos_token_id=stops, cache=cache,
        callback=lambda step, tokens: streamed.append((step, tokens)),
    )  # fmt: skip
    assert [step for step, _ in streamed] == list(range(1, found.shape[1] - 5))
    assert torch.equal(torch.stack([tokens for _, tokens in streamed], 1), found[:, 6:])
    for row, unstopped in zip(found, whole):
        end = next(i for i in range(6, 18) if int(unstopped[i]) in stops)
        assert torch.equal(row[: end + 1], unstopped[: end + 1])
        assert (row[end + 1 :] == stops[0]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "paged"}, r"cache must be one of \(None, 'growing', 'static', 'none'\)"),
        ({"prefill_chunk": 0}, "prefill_chunk must be an integer of at least 1, got 0"),
        ({"cache": "none", "prefill_chunk": 2}, "prefill_chunk must be None without a cache"),
        ({"compile_step": True}, "compile_step needs cache='static', got 'growing'"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        build().generate(torch.tensor([[1]]), max_new_tokens=1, **options)
    dynamic = build(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match=r"prefill_chunk must be None .* depend"):
        dynamic.generate(torch.tensor([[1]]), max_new_tokens=1, prefill_chunk=1)
