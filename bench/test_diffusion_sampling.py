"""MiniLLaDA at the demo's size: block caches and parallel decoding against plain sampling.

The model is trained as docs/examples does, on fewer steps (`BRICKWORK_BENCH_STEPS`, 300). Then 256
tokens behind a held-out prompt are sampled in blocks of 32; and held-out rows, half of whose bytes
are masked, are filled in blocks of 16, to see what the approximations cost.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

from brickwork.blocks import SampleReport

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
NEW, BLOCK, PROMPT, ROWS = 256, 32, 128, 64
PARALLEL = 3.0  # tokens a pass, about


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    sys.path.insert(0, str(EXAMPLES))
    train = pytest.importorskip("train_mini_llada")
    steps = os.environ.get("BRICKWORK_BENCH_STEPS", "300")
    out = str(tmp_path_factory.mktemp("llada"))
    found = train.main(["--out", out, "--steps", steps, "--eval-every", steps])
    model = found.model.eval()
    return model, found.rows, accuracy(model, found.rows[:ROWS])[0]


def threshold_for(sample, tokens_per_forward: float) -> float:
    """By bisection: the higher the threshold, the fewer tokens a pass commits."""
    low, high = 0.0, 1.0
    for _ in range(8):
        middle, report = (low + high) / 2, SampleReport()
        sample(threshold=middle, report=report)
        if report.tokens_per_forward > tokens_per_forward:
            low = middle
        else:
            high = middle
    return high


def accuracy(model, rows, **options) -> tuple[float, SampleReport]:
    """The share of masked bytes that are filled in as they were, half of each row being masked."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(rows.shape, generator=generator).argsort(1) < rows.shape[1] // 2
    report = SampleReport()
    filled = model.diffusion.sample(
        model, rows.masked_fill(masks, model.config.mask_token_id), gen_length=0,
        block_length=BLOCK // 2, report=report, **options,
    )  # fmt: skip
    return (filled == rows)[masks].float().mean().item(), report


@pytest.mark.parametrize("way", ["prefix", "dual", "dual + threshold"])
def test_sampling(benchmark, tables, trained, way):
    model, rows, plain = trained
    prompt = rows[:1, :PROMPT]
    options = {"cache": way.split()[0]}

    def sample(**more):
        return model.diffusion.sample(
            model, prompt, gen_length=NEW, block_length=BLOCK, **{**options, **more}
        )

    infill = dict(options)
    if way == "dual + threshold":
        options |= {"rule": "threshold"}
        options["threshold"] = threshold_for(sample, PARALLEL)

        def fill(threshold, report):
            _, found = accuracy(model, rows[:1], cache="dual", rule="threshold",
                                threshold=threshold)  # fmt: skip
            report.tokens, report.forward_passes = found.tokens, found.forward_passes

        infill |= {"rule": "threshold", "threshold": threshold_for(fill, PARALLEL)}
    exact = model.double()
    plain_ids = exact.diffusion.sample(exact, prompt, gen_length=BLOCK, block_length=BLOCK)
    fresh = exact.diffusion.sample(
        exact, prompt, gen_length=BLOCK, block_length=BLOCK, cache=options["cache"],
        refresh_every=1,
    )  # fmt: skip
    assert torch.equal(plain_ids, fresh)
    model.float()
    seconds = []

    def time_plain():
        start = time.perf_counter()
        model.diffusion.sample(model, prompt, gen_length=NEW, block_length=BLOCK)
        seconds.append(time.perf_counter() - start)

    report = SampleReport()
    sample(report=report)
    benchmark.pedantic(sample, setup=time_plain, rounds=5, iterations=1)
    ratio = statistics.median(seconds) / benchmark.stats.stats.median
    benchmark.extra_info.update(
        {"x plain sampling": f"{ratio:.3g}"}, threads=torch.get_num_threads()
    )
    cached, filled = accuracy(model, rows[:ROWS], **infill)
    table = tables.setdefault(
        "Sampling: passes, and what the approximations cost on held-out bytes",
        [("way", "forward passes", "over the whole canvas", "tokens a pass",
          "infill: tokens a pass and row", "infill accuracy, %", "plain, %")],
    )  # fmt: skip
    table.append(
        (way, report.forward_passes, report.full_passes, f"{report.tokens_per_forward:.2f}",
         f"{filled.tokens_per_forward / ROWS:.2f}", f"{100 * cached:.2f}", f"{100 * plain:.2f}")
    )  # fmt: skip
