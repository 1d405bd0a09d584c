"""How time and memory of the scans grow with the length, and memory with the states."""

from __future__ import annotations

import time

import pytest
import torch
from memory import peak_extra

from brickwork.kernels.selective_scan import selective_scan
from brickwork.kernels.ssd_scan import ssd_scan

E, P = 1024, 64  # channels; those of a head of ssd_scan
LENGTHS = (512, 2048, 8192, 32768, 65536)
STATES = (4, 16, 64)


def problem(op, T, N, backend, training):
    def leaf(*size):
        return torch.randn(size).requires_grad_(training)

    if op == "ssd_scan":
        leaves = [leaf(1, T, E // P, P), leaf(1, T, E // P), leaf(E // P), leaf(1, T, 1, N)]
        leaves.append(leaf(1, T, 1, N))
    else:
        leaves = [leaf(1, T, E), leaf(1, T, E), leaf(E, N), leaf(1, T, N), leaf(1, T, N)]
    scan = {"ssd_scan": ssd_scan, "selective_scan": selective_scan}[op]

    def run():
        x, delta, A, B, C = leaves
        y = scan(x, delta, -A.abs(), B, C, softplus=True, backend=backend).y
        if training:
            torch.autograd.grad(y, leaves, y.detach())

    return run, leaves[0].nbytes


def seconds(run, rounds):
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("op", ["selective_scan", "ssd_scan"])
def test_length(tables, op, backend, training):
    """Time a token, in units of that at the first length, and extra memory in units of x."""
    rows, first = [], None
    for T in LENGTHS:
        run, size = problem(op, T, 16, backend, training)
        each = seconds(run, rounds=max(7, 2**15 // T)) / T
        first = first or each
        rows.append((T, f"{each / first:.2f}", f"{peak_extra(run) / size:.1f}"))
    title = f"{op}, {backend}, {'forward + backward' if training else 'forward'}, "
    tables[f"{title}E {E}, N 16"] = [
        ("tokens", "time a token / that of the first row", "peak extra memory / size of x"),
        *rows,
    ]


@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
@pytest.mark.parametrize("op", ["selective_scan", "ssd_scan"])
def test_states(tables, op, backend, training):
    """The extra memory of all states at once would be N times x."""
    rows = []
    for N in STATES:
        run, size = problem(op, 16384, N, backend, training)
        rows.append((N, f"{peak_extra(run) / size:.1f}"))
    title = f"{op}, {backend}, {'forward + backward' if training else 'forward'}, "
    tables[f"{title}E {E}, 16,384 tokens"] = [
        ("states N", "peak extra memory / size of x"),
        *rows,
    ]
