"""The scan of Mamba-2 against the chunked path that transformers takes without a GPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from compare import compare, double, with_gradients
from transformers.models.mamba2 import modeling_mamba2

from brickwork.kernels.ssd_scan import ssd_scan

B, T, H, P, N = 1, 512, 48, 64, 128
CHUNK = 256  # transformers' default


def inputs():
    return [
        torch.randn(B, T, H, P),
        torch.randn(B, T, H) - 3,
        -torch.rand(H).mul(2).exp(),
        torch.randn(B, T, 1, N),
        torch.randn(B, T, 1, N),
        torch.randn(H),
    ]


def ours(backend):
    def run(x, delta, A, B, C, D):
        return ssd_scan(x, delta, A, B, C, D=D, softplus=True, backend=backend).y

    return run


def transformers(x, delta, A, B, C, D):
    scan = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
    return scan(x, delta, A, B, C, CHUNK, D=D, dt_softplus=True)


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
def test_forward(benchmark, backend):
    given = inputs()
    with torch.no_grad():
        compare(
            benchmark,
            lambda: ours(backend)(*given),
            {"transformers mamba2_chunk_scan": lambda: transformers(*given)},
            reference=lambda: ours("torch")(*double(given)),
            rounds=15,
        )


@pytest.mark.parametrize("backend", ["cpu", "chunked"])
def test_forward_and_backward(benchmark, backend):
    given = inputs()
    compare(
        benchmark,
        with_gradients(ours(backend), given),
        {"transformers mamba2_chunk_scan": with_gradients(transformers, given)},
        reference=with_gradients(ours("torch"), double(given)),
        rounds=15,
    )
