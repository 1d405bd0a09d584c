"""How the benchmarks compare: values first, then interleaved rounds, medians and their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Runner = Callable[[], Any]
PATIENCE = 20.0  # seconds after which a slow peer is left out of further rounds


def compare(
    benchmark: Any,
    ours: Runner,
    peers: dict[str, Runner],
    *,
    rounds: int = 7,
    tolerance: float = 1e-4,
    reference: Runner,
) -> dict[str, float]:
    """Time `ours` and every peer in turn, round by round, and return peer / ours of the medians.

    Before anything is timed the tensors of every runner must equal those of `reference`, computed
    in float64, within `tolerance` of their largest value. A peer that has taken `PATIENCE` seconds
    misses the rounds that are left. The ratios are kept in `benchmark.extra_info`.
    """
    expected = _tensors(reference())
    assert all(t.dtype == torch.float64 for t in expected), "the reference must be float64"
    for name, run in {"brickwork": ours, **peers}.items():
        _assert_equal(name, _tensors(run()), expected, tolerance)
    seconds: dict[str, list[float]] = {name: [] for name in peers}

    def time_peers() -> None:
        for name, run in peers.items():
            if sum(seconds[name]) > PATIENCE:
                continue
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(ours, setup=time_peers, rounds=rounds, iterations=1)
    own = benchmark.stats.stats.median
    ratios = {name: statistics.median(times) / own for name, times in seconds.items()}
    benchmark.extra_info.update(
        {f"x {name}": f"{ratio:.3g}" for name, ratio in ratios.items()},
        threads=torch.get_num_threads(),
        rounds={"brickwork": rounds, **{name: len(times) for name, times in seconds.items()}},
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


def double(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same values in float64."""
    return [t.detach().double() for t in tensors]


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for t in result if isinstance(t, Tensor)]


def _assert_equal(name: str, found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected), f"{name}: {len(found)} results against {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected)):
        assert a.shape == b.shape, f"{name}, result {i}: {tuple(a.shape)} against {tuple(b.shape)}"
        error = (a.double() - b).abs().max().item()
        size = b.abs().max().item()
        assert error <= tolerance * size, f"{name}, result {i}: off by {error:.2e} of {size:.2e}"
