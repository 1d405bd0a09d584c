"""How the benchmarks compare: values first, then interleaved rounds, medians and their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Runner = Callable[[], Any]


def compare(
    benchmark: Any,
    ours: Runner,
    peers: dict[str, Runner],
    *,
    rounds: int = 7,
    tolerance: float | None = 1e-4,
    reference: Runner | None = None,
) -> dict[str, float]:
    """Time `ours` and every peer in turn, round by round, and return peer / ours of the medians.

    Before anything is timed each runner's tensors must equal those of `reference` (default: the
    first peer) within `tolerance` of their largest value; None only where the peer computes
    something else by design. The ratios are kept in `benchmark.extra_info`.
    """
    if tolerance is not None:
        expected = _tensors((reference or next(iter(peers.values())))())
        for name, run in {"brickwork": ours, **peers}.items():
            _assert_equal(name, _tensors(run()), expected, tolerance)
    else:
        for run in (ours, *peers.values()):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in peers}

    def time_peers() -> None:
        for name, run in peers.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(ours, setup=time_peers, rounds=rounds, iterations=1)
    own = benchmark.stats.stats.median
    ratios = {name: statistics.median(times) / own for name, times in seconds.items()}
    benchmark.extra_info.update(
        {f"x {name}": round(ratio, 2) for name, ratio in ratios.items()},
        threads=torch.get_num_threads(),
        rounds=rounds,
    )
    return ratios


def with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Runner:
    """A runner of forward and backward: returns the outputs and the gradient of every input."""
    leaves = [t.detach().requires_grad_() for t in inputs]

    def run() -> list[Tensor]:
        outputs = _tensors(function(*leaves))
        grads = torch.autograd.grad([o.sum() for o in outputs], leaves)
        return [o.detach() for o in outputs] + list(grads)

    return run


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for t in result if isinstance(t, Tensor)]


def _assert_equal(name: str, found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected), f"{name}: {len(found)} results against {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected)):
        assert a.shape == b.shape, f"{name}, result {i}: {tuple(a.shape)} against {tuple(b.shape)}"
        error = (a.double() - b.double()).abs().max().item()
        size = b.double().abs().max().item()
        assert error <= tolerance * size, f"{name}, result {i}: off by {error:.2e} of {size:.2e}"
