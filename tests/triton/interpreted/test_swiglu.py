from __future__ import annotations

import pytest
import torch
from interpreter import assert_well_behaved, count_bytes, sparse_tensor
from support import assert_close, assert_same_function, gradients

from brickwork.kernels import swiglu_triton as launches
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.swiglu import swiglu, swiglu_reference

HALVES = [torch.bfloat16, torch.float16]
CASTS = ["once", "before_up"]


def run(backend, **options):
    return lambda gate, up: swiglu(gate, up, backend=backend, **options)


@pytest.mark.parametrize("N", [1, 3, 15, 16, 17, 100, 511, 512, 513, 1023, 1024, 1025, 2500])
@pytest.mark.parametrize("M", [1, 2, 5])
def test_sizes(M, N):
    for cast in CASTS:
        assert_same_function(
            run("triton", cast=cast),
            run("torch", cast=cast),
            [torch.randn(M, N) * 3, torch.randn(M, N)],
        )


@pytest.mark.parametrize("M", [127, 128, 129, 300])
def test_rows(M):
    assert_same_function(run("triton"), run("torch"), [torch.randn(M, 12), torch.randn(M, 12)])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cast", CASTS)
def test_narrow_dtypes(dtype, cast):
    """Values are the reference's, few bits differ at all, and gradients are those of exact
    arithmetic on what the forward pass rounded."""
    inputs = [(torch.randn(9, 300) * 3).to(dtype), torch.randn(9, 300).to(dtype)]
    (y,), grads = gradients(run("triton", cast=cast), inputs)
    expected = swiglu_reference(*inputs, cast=cast)
    assert y.dtype == dtype
    assert_close(y, expected)
    assert (y != expected).double().mean() < 0.01

    def exact(gate, up):
        activated = torch.nn.functional.silu(gate)
        if cast == "before_up":
            activated = activated + (activated.to(dtype).double() - activated).detach()
        return (activated * up).to(dtype)

    _, wanted = gradients(exact, [t.double() for t in inputs])
    for found, grad in zip(grads, wanted):
        assert found.dtype == dtype
        assert_close(found, grad)


def lattice(M, N):
    """Tensors of shape (M, N) of every kind of strides."""
    yield torch.randn(M, N)
    yield torch.randn(M, 2 * N)[:, N:]
    yield torch.randn(M, 2 * N)[:, ::2]
    yield torch.randn(N, M).t()
    yield torch.randn(1, N).expand(M, N)
    yield torch.randn(M, 1).expand(M, N)
    yield torch.randn(2 * M, N + 1)[::2, 1:]
    yield torch.randn(3, M, N).transpose(0, 1)[:, 1]


@pytest.mark.parametrize("N", [24, 33])
def test_strides(N):
    """D1 7, D1 8, D1 9: of both operands and of the incoming gradient."""
    other = torch.randn(4, N)
    for x in lattice(4, N):
        for gate, up, dy in ((x, other, other), (other, x, other), (other, other, x), (x, x, x)):
            results = []
            for backend in ("triton", "torch"):
                leaves = [t.detach().requires_grad_() for t in (gate, up)]
                y = run(backend)(*leaves)
                results.append([y, *torch.autograd.grad(y, leaves, dy)])
            for found, expected in zip(*results):
                assert_close(found, expected)


def test_halves_of_one_product():
    """As the block calls it: without a copy."""
    gate, up = torch.randn(2, 3, 64).chunk(2, -1)
    with count_bytes() as moved:
        y = run("triton")(gate, up)
    assert moved.read == (gate.numel() + up.numel()) * 4
    assert_close(y, swiglu_reference(gate, up))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (), (1,), (2, 3, 4)])
def test_shapes(shape):
    """D1 23, D1 24: empty tensors, a single number, leading axes."""
    assert_same_function(run("triton"), run("torch"), [torch.randn(shape), torch.randn(shape)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_behaves(dtype):
    """D1 1, D1 3, D1 4, D1 5, D1 28."""
    inputs = [torch.randn(5, 40).to(dtype), torch.randn(5, 40).to(dtype)]
    assert_well_behaved(run("triton"), inputs)
    one = torch.randn(5, 40).to(dtype)
    assert_well_behaved(lambda x: swiglu(x, x, backend="triton"), [one])


def test_the_ops_are_well_registered():
    """D1 28."""
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.brickwork.swiglu_triton.default, (gate, up, True))
    dy, gate, up = torch.randn(3, 8), gate.detach(), up.detach()
    torch.library.opcheck(torch.ops.brickwork.swiglu_triton_backward.default, (dy, gate, up, False))


def test_extreme_values():
    ends = [-3e38, -1e4, -100.0, -88.8, -20.0, -0.0, 0.0, 20.0, 88.8, 1e4]
    inputs = [torch.tensor(ends), torch.ones(len(ends))]
    (y,), grads = gradients(run("triton"), inputs)
    (expected,), wanted = gradients(run("torch"), inputs)
    for found, value in zip([y, *grads], [expected, *wanted]):
        for a, b in zip(found, value):
            assert_close(a, b, scale=1.0 + abs(b.item()))
    for dtype in HALVES:
        x = torch.linspace(-30, 30, 1000).to(dtype)
        assert_close(run("triton")(x, x), swiglu_reference(x, x))


@pytest.mark.parametrize("N", [64, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(N, dtype):
    """What the launcher's docstring states; every element is read once."""
    gate, up = (torch.randn(37, N).to(dtype).requires_grad_() for _ in range(2))
    size = 37 * N * dtype.itemsize
    with count_bytes() as moved:
        y = run("triton")(gate, up)
    assert (moved.loaded, moved.stored) == (moved.read, moved.written) == (2 * size, size)
    dy = torch.randn_like(y)
    with count_bytes() as moved:
        torch.autograd.grad(y, (gate, up), dy)
    assert (moved.loaded, moved.stored) == (moved.read, moved.written) == (3 * size, 2 * size)


@pytest.mark.parametrize("operand", ["gate", "up", "dy"])
def test_rows_past_two_to_the_31_elements(operand):
    """D1 12."""
    apart = sparse_tensor((4, 2**30), torch.bfloat16)[:, :40]
    apart.copy_(torch.randn(4, 40))
    inputs = {name: torch.randn(4, 40).bfloat16() for name in ("gate", "up", "dy")}
    results = []
    for x in (apart, apart.contiguous()):
        gate, up, dy = {**inputs, operand: x}.values()
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        y = run("triton")(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_interpreter_runs_on_request_only():
    x = torch.randn(2, 3)
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(launches, "_swiglu", lambda *a: calls.append(a) or x)
        swiglu(x, x)
        assert not calls
        with prefer("triton"):
            swiglu(x, x)
        assert len(calls) == 1
    with pytest.raises(BackendUnavailable, match="got float64"):
        run("triton")(x.double(), x.double())
