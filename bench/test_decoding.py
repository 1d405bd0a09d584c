"""Rish.generate against transformers' FlexOlmo.generate: one prompt, greedy, per token."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from peers import transformers_flex_olmo

from brickwork.assemblies import Rish, RishConfig

PROMPT, NEW = 32, 128


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = RishConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_experts=8, num_experts_per_tok=2, pad_token_id=None,
        eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    ours = Rish(config).eval()
    return ours, transformers_flex_olmo(ours)


@pytest.mark.parametrize("cache", ["growing", "static"])
def test_decoding(benchmark, models, cache):
    """4 layers × 256, batch 1; both sides prefill, then decode NEW tokens."""
    ours, theirs = models
    prompt = torch.randint(1024, (1, PROMPT))
    implementation = {"growing": "dynamic", "static": "static"}[cache]

    def generate():
        return ours.generate(prompt, max_new_tokens=NEW, cache=cache)

    def peer():
        return theirs.generate(
            prompt, max_new_tokens=NEW, do_sample=False, cache_implementation=implementation
        )

    uncached = ours.generate(prompt, max_new_tokens=NEW, cache="none")
    assert torch.equal(generate(), uncached)
    assert torch.equal(peer(), uncached)
    seconds = []

    def time_peer():
        start = time.perf_counter()
        peer()
        seconds.append(time.perf_counter() - start)

    benchmark.pedantic(generate, setup=time_peer, rounds=9, iterations=1)
    ratio = statistics.median(seconds) / benchmark.stats.stats.median
    benchmark.extra_info.update(
        {"x transformers": f"{ratio:.3g}"},
        threads=torch.get_num_threads(),
        milliseconds_per_token=f"{1e3 * benchmark.stats.stats.median / NEW:.3g}",
    )
