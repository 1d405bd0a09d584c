"""The scan of Mamba-1 against mamba-ssm's reference function and mambapy's parallel scan.

The backward of mamba-ssm's reference function is autograd's: it takes time quadratic in the length,
since every step's slice of the decays gets a gradient as large as all of them.
"""

from __future__ import annotations

import pytest
import torch
from compare import compare, double, with_gradients
from peers import mamba_ssm, mambapy_scan

from brickwork.kernels.selective_scan import selective_scan

SHAPES = {"1x3072x512x16": (1, 3072, 512, 16), "4x768x512x16": (4, 768, 512, 16)}


def inputs(shape):
    B, E, T, N = shape
    return [
        torch.randn(B, T, E),
        torch.randn(B, T, E) - 3,
        -torch.rand(E, N).mul(3).exp(),
        torch.randn(B, T, N),
        torch.randn(B, T, N),
        torch.randn(E),
        torch.randn(B, T, E),
    ]


def ours(backend):
    def run(x, delta, A, B, C, D, z):
        return selective_scan(x, delta, A, B, C, D=D, z=z, softplus=True, backend=backend).y

    return run


def reference(x, delta, A, B, C, D, z):
    scan = mamba_ssm("ops.selective_scan_interface").selective_scan_ref
    to = [t.transpose(1, 2).contiguous() for t in (x, delta, B, C, z)]
    return scan(*to[:2], A, *to[2:4], D, to[4], None, True).transpose(1, 2)


def parallel(x, delta, A, B, C, D, z):
    steps = torch.nn.functional.softplus(delta)
    return mambapy_scan(x, steps, A, B, C, D) * torch.nn.functional.silu(z)


PEERS = {"mamba-ssm selective_scan_ref": reference, "mambapy pscan": parallel}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("backend", ["cpu", "chunked"])
def test_forward(benchmark, backend, shape):
    given = inputs(shape)
    with torch.no_grad():
        compare(
            benchmark,
            lambda: ours(backend)(*given),
            {name: (lambda peer=peer: peer(*given)) for name, peer in PEERS.items()},
            reference=lambda: ours("torch")(*double(given)),
        )


@pytest.mark.parametrize(
    ("backend", "peers"),
    [("cpu", PEERS), ("chunked", {"mambapy pscan": parallel})],
    ids=["cpu", "chunked"],
)
def test_forward_and_backward(benchmark, backend, peers):
    given = inputs(SHAPES["1x3072x512x16"])
    compare(
        benchmark,
        with_gradients(ours(backend), given),
        {name: with_gradients(peer, given) for name, peer in peers.items()},
        reference=with_gradients(ours("torch"), double(given)),
    )
