"""Compiled for one size and then for any: no op asks for a third graph, forward or backward."""

from __future__ import annotations

import pytest
import torch
from support import assert_close
from torch._dynamo.testing import CompileCounterWithBackend

from brickwork.kernels.add_norm import add_norm
from brickwork.kernels.bidirectional_conv1d import Filter, bidirectional_conv1d
from brickwork.kernels.bidirectional_scan import ScanInputs, bidirectional_scan
from brickwork.kernels.causal_conv1d import causal_conv1d
from brickwork.kernels.cross_entropy import cross_entropy
from brickwork.kernels.experts import experts
from brickwork.kernels.linear import linear
from brickwork.kernels.rms_norm import rms_norm
from brickwork.kernels.rope import rope
from brickwork.kernels.selective_scan import selective_scan
from brickwork.kernels.ssd_scan import ssd_scan
from brickwork.kernels.swiglu import swiglu

E, N, W = 4, 3, 3  # channels, state, filter


def norms(x, weight):
    y, residual = add_norm(rms_norm(x, weight), x, weight)
    return swiglu(linear(y, weight.outer(weight)), residual)


def rotated(x, weight):
    positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    heads = (x * weight).unflatten(-1, (1, E))
    return rope(heads, positions, inv_freq=torch.ones(E // 2), layout="half")


def convolved(backend):
    return lambda x, weight: causal_conv1d(x, weight[:, None].expand(E, W), backend=backend).y


def convolved_both(x, weight):
    of_both = Filter(weight[:, None].expand(E, W), None)
    return sum(bidirectional_conv1d(x, of_both, of_both))


def side(x, weight):
    states = x[..., :N]
    return ScanInputs(x, x.square(), -weight[:, None].square().expand(E, N), states, states, weight)


def scanned(backend, **options):
    def run(x, weight):
        *five, D, _ = side(x, weight)
        y, state = selective_scan(*five, D=D, z=x, backend=backend, **options)
        return y + state.sum()

    return run


def scanned_both(x, weight):
    return bidirectional_scan(side(x, weight), side(x, weight), z=x)


def scanned_by_heads(backend):
    def run(x, weight):
        heads, states = x.unflatten(-1, (2, E // 2)), x[..., None, :N]
        five = heads, x[..., :2].square(), -weight[:2].square(), states, states
        return ssd_scan(*five, z=heads, backend=backend).y

    return run


def of_experts(backend):
    def run(x, weight):
        gate_up, down = weight.expand(2, 2 * E, E), weight.expand(2, E, E)
        rows = x.flatten(0, 1)
        indices = torch.arange(2).expand(rows.shape[0], 2)
        return experts(rows, gate_up, down, indices, rows[:, :2], backend=backend)

    return run


def loss(x, weight):
    rows = x.flatten(0, 1)
    labels = torch.arange(rows.shape[0]) % E
    return cross_entropy(rows, weight.outer(weight), labels, reduction="none")


CASES = {
    "norms, swiglu, linear": norms,
    "rope": rotated,
    "causal_conv1d cpu": convolved("cpu"),
    "causal_conv1d chunked": convolved("chunked"),
    "bidirectional_conv1d": convolved_both,
    "selective_scan cpu": scanned("cpu"),
    "selective_scan chunked": scanned("chunked", reverse=True),
    "bidirectional_scan": scanned_both,
    "ssd_scan cpu": scanned_by_heads("cpu"),
    "ssd_scan chunked": scanned_by_heads("chunked"),
    "experts cpu": of_experts("cpu"),
    "experts grouped": of_experts("grouped"),
    "cross_entropy": loss,
}


@pytest.mark.parametrize(
    "sizes", [[(2, 5), (3, 7), (4, 9), (2, 8), (5, 70)], [(1, 5), (1, 70), (1, 8)]], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_two_graphs(name, sizes):
    torch._dynamo.reset()
    run, counter = CASES[name], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for batch, tokens in sizes:
        leaves = [torch.randn(s, requires_grad=True) for s in ((batch, tokens, E), (E,))]
        found, expected = compiled(*leaves), run(*leaves)
        assert_close(found, expected, terms=tokens * batch)
        for a, b in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (found, expected))):
            assert_close(a, b, terms=tokens * batch * E)
    assert counter.frame_count == 2
