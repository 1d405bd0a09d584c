"""The causal convolution against PyTorch's own, as transformers calls it."""

from __future__ import annotations

import pytest
import torch
from compare import compare, double, with_gradients

from brickwork.kernels.causal_conv1d import causal_conv1d

B, T, C, W = 1, 1024, 1536, 4


def inputs():
    return [torch.randn(B, T, C), torch.randn(C, W), torch.randn(C)]


def padded(x, weight, bias):
    rows = x.transpose(1, 2)
    y = torch.nn.functional.conv1d(rows, weight[:, None], bias, padding=W - 1, groups=C)
    return torch.nn.functional.silu(y[..., :T]).transpose(1, 2)


def flipped(x, weight, bias):
    return padded(x.flip(1), weight, bias).flip(1)


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
def test_forward_and_backward(benchmark, reverse):
    given = inputs()

    def ours(backend):
        def run(x, weight, bias):
            options = {"activation": "silu", "reverse": reverse, "backend": backend}
            return causal_conv1d(x, weight, bias, **options).y

        return run

    compare(
        benchmark,
        with_gradients(ours("auto"), given),
        {"F.conv1d": with_gradients(flipped if reverse else padded, given)},
        reference=with_gradients(ours("torch"), double(given)),
        rounds=15,
    )
