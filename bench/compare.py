"""How the benchmarks compare: values first, then interleaved rounds, medians and their ratios."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Runner = Callable[[], Any]
PATIENCE = 20.0  # seconds after which a slow peer is left out of further rounds
TURN = 0.5  # seconds that a process runs before the next one does


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
    assert_same_results({"brickwork": ours, **peers}, reference=reference, tolerance=tolerance)
    seconds: dict[str, list[float]] = {name: [] for name in peers}

    def time_peers() -> None:
        for name, run in peers.items():
            if sum(seconds[name]) > PATIENCE:
                continue
            seconds[name].append(_seconds(run))

    benchmark.pedantic(ours, setup=time_peers, rounds=rounds, iterations=1)
    return _report(benchmark, benchmark.stats.stats.median, seconds, rounds)


def compare_processes(
    benchmark: Any, build: Callable[[str], Runner], peers: Sequence[str], *, rounds: int = 7
) -> dict[str, float]:
    """`compare`, but each side has a process of its own, and they take turns.

    There, `build` of a module's top level makes the runner of a side by its name; ours is that of
    "brickwork". No side meets the memory that another has left behind, and in a turn of `TURN`
    seconds it runs after itself, as in a loop over batches: a turn counts as the median of its runs
    but the first, or as the first if there is no other. Nothing is compared but times, so compare
    values before. A peer that has taken `PATIENCE` seconds misses the rounds that
    are left.
    """
    threads = torch.get_num_threads()
    sides = {name: _Side(build, name, threads) for name in ("brickwork", *peers)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}

    def turn(name: str) -> None:
        seconds[name].append(sides[name].seconds())

    def turn_of_peers() -> None:
        for name in peers:
            if sum(seconds[name]) <= PATIENCE:
                turn(name)

    try:
        benchmark.pedantic(turn, args=("brickwork",), setup=turn_of_peers, rounds=rounds)
    finally:
        for side in sides.values():
            side.close()
    own = statistics.median(seconds.pop("brickwork"))
    return _report(benchmark, own, seconds, rounds)


class _Side:
    """A process with a runner, called once to warm up, and then in the turns of `seconds()`."""

    def __init__(self, build: Callable[[str], Runner], name: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, build, name, threads))
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def seconds(self) -> float:
        self.pipe.send(True)
        return float(self.pipe.recv())

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


def _serve(pipe: Any, build: Callable[[str], Runner], name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    run = build(name)
    run()
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while pipe.recv():
            times = [_seconds(run)]
            while sum(times) < TURN:
                times.append(_seconds(run))
            pipe.send(statistics.median(times[1:] or times))


def _seconds(run: Runner) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _report(
    benchmark: Any, own: float, seconds: dict[str, list[float]], rounds: int
) -> dict[str, float]:
    ratios = {name: statistics.median(times) / own for name, times in seconds.items()}
    benchmark.extra_info.update(
        {f"x {name}": f"{ratio:.3g}" for name, ratio in ratios.items()},
        threads=torch.get_num_threads(),
        rounds={"brickwork": rounds, **{name: len(times) for name, times in seconds.items()}},
    )
    return ratios


def assert_same_results(
    runners: dict[str, Runner], *, reference: Runner, tolerance: float = 1e-4
) -> None:
    """Assert that all give what `reference` gives in float64, within `tolerance` of its largest."""
    expected = _tensors(reference())
    assert all(t.dtype == torch.float64 for t in expected), "the reference must be float64"
    for name, run in runners.items():
        _assert_equal(name, _tensors(run()), expected, tolerance)


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
