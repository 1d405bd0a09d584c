from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_close, gradcheck, gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from brickwork.kernels import bidirectional_scan as bidirectional_scan_module
from brickwork.kernels import selective_scan_cpu
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.bidirectional_scan import ScanInputs, bidirectional_scan
from brickwork.kernels.selective_scan import selective_scan

OPTIONS = ("D", "z", "delta_bias", "mask", "seq_ids")
compiled = pytest.mark.skipif(
    selective_scan_cpu.unavailable_here() is not None,
    reason=str(selective_scan_cpu.unavailable_here()),
)


def problem(B, T, E, N, G=1, options=OPTIONS, *, dtype=torch.float64):
    """Its scan as a function of backend and of floats, and the floats."""
    flags = {"softplus": True}
    if "mask" in options:
        flags["mask"] = torch.rand(B, T) > 0.2
    if "seq_ids" in options:
        flags["seq_ids"] = (torch.rand(B, T) > 0.9).cumsum(1)
    floats = []
    for _ in range(2):
        pair = (B, T, G, N) if G > 1 else (B, T, N)
        floats += [torch.randn(B, T, E), torch.randn(B, T, E), -torch.rand(E, N) * 3]
        floats += [torch.randn(pair), torch.randn(pair)]
        floats += [torch.randn(E) if name in options else None for name in ("D", "delta_bias")]
    floats.append(torch.randn(B, T, E) if "z" in options else None)
    floats = [None if t is None else t.to(dtype) for t in floats]

    def scan(backend):
        def run(*given):
            sides = ScanInputs(*given[:7]), ScanInputs(*given[7:14])
            return [bidirectional_scan(*sides, z=given[14], **flags, backend=backend)]

        return run

    def two(*given):
        out = []
        for way in (0, 1):
            x, delta, A, B, C, D, bias = given[way * 7 : way * 7 + 7]
            kwargs = {"D": D, "delta_bias": bias, "z": given[14], "reverse": bool(way), **flags}
            out.append(selective_scan(x, delta, A, B, C, **kwargs, backend="torch").y)
        return [out[0] + out[1]]

    return scan, two, floats


def check(*size, backend="cpu", **kwargs):
    scan, two, floats = problem(*size, **kwargs)
    values, grads = gradients(two, floats)
    for dtype in (torch.float32, torch.float64):
        narrow = [None if t is None else t.to(dtype) for t in floats]
        got, got_grads = gradients(scan(backend), narrow)
        for i, (a, e) in enumerate(zip([*got, *got_grads], [*values, *grads])):
            assert (a is None) == (e is None)
            if a is not None:
                assert a.dtype == dtype
                assert_close(a, e, terms=max(size[1], size[3]), name=f"{dtype} result {i}")


@compiled
@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 128, 129, 192, 300])
def test_lengths(T):
    """Which direction comes to a token first, and sets the gradient of z, hangs on the length."""
    check(2, T, 18, 5)


@compiled
@given(
    T=st.integers(1, 140),
    size=st.sampled_from([(1, 1, 1), (16, 4, 2), (17, 5, 1), (130, 17, 1)]),
    options=st.sets(st.sampled_from(OPTIONS)),
)
@settings(max_examples=30)
def test_every_combination(T, size, options):
    check(1, T, *size, options=options)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_other_backends(backend, monkeypatch):
    """What is preferred is taken, also if only a scan alone has it."""
    monkeypatch.setattr(selective_scan_cpu, "run", None)
    with prefer("chunked"):
        check(2, 21, 6, 3, 2, backend=backend)


def test_reference_gradients():
    scan, _, floats = problem(1, 4, 2, 2)
    gradcheck(lambda *given: tuple(scan("torch")(*given)), floats)


@compiled
def test_narrow_types_are_summed_before_they_are_rounded():
    scan, _, floats = problem(1, 70, 18, 5)
    narrow = [None if t is None else t.to(torch.bfloat16) for t in floats]
    (y,) = scan("cpu")(*narrow)
    assert y.dtype == torch.bfloat16
    (exact,) = scan("torch")(*[None if t is None else t.double() for t in narrow])
    assert_close(y, exact, terms=70)


@compiled
def test_empty_and_fake():
    for B, T in ((0, 5), (2, 0)):
        scan, _, floats = problem(B, T, 6, 3, options=("D", "z", "delta_bias"))
        values, grads = gradients(scan("cpu"), floats)
        assert values[0].shape == (B, T, 6)
        assert all((g == 0).all() for g in grads)
    scan, _, floats = problem(2, 70, 6, 3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in floats]
        assert scan("cpu")(*fakes)[0].shape == (2, 70, 6)


@compiled
def test_op():
    scan, _, floats = problem(1, 66, 6, 3, options=("D", "z"))
    floats = [
        None if t is None else (t.unsqueeze(2) if i % 7 in (3, 4) and i < 14 else t).float()
        for i, t in enumerate(floats)
    ]
    leaves = [None if t is None else t.requires_grad_() for t in floats]
    scan("cpu")(*leaves)  # registers the op
    op = torch.ops.brickwork.bidirectional_scan_cpu
    torch.library.opcheck(op, (*leaves, None, None, None, True, True))


@compiled
def test_compiles_to_one_graph_and_differentiates_once():
    scan, _, floats = problem(1, 66, 6, 3)
    leaves = [None if t is None else t.requires_grad_() for t in floats]
    plain = scan("cpu")(*leaves)[0]
    whole = torch.compile(scan("cpu"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(*leaves)[0], plain)
    first = torch.autograd.grad(plain.sum(), leaves[0], retain_graph=True)[0]
    again = torch.autograd.grad(plain.sum(), leaves[0], retain_graph=True)[0]
    assert torch.equal(first, again)
    (dx,) = torch.autograd.grad(plain.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


@compiled
def test_threads_change_nothing():
    scan, _, floats = problem(2, 130, 200, 5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gradients(scan("cpu"), floats)
        torch.set_num_threads(3)
        three = gradients(scan("cpu"), floats)
    finally:
        torch.set_num_threads(before)
    for a, b in zip([*one[0], *one[1]], [*three[0], *three[1]]):
        assert torch.equal(a, b)


def test_auto_leaves_the_choice_on_a_gpu_to_the_scan(monkeypatch):
    scan, two, floats = problem(1, 5, 3, 2)
    monkeypatch.setattr(bidirectional_scan_module, "_why_not_cpu", lambda *_, **__: "not here")
    monkeypatch.setattr(bidirectional_scan_module, "_why_not_triton", lambda *_: None)
    torch.testing.assert_close(scan("auto")(*floats), two(*floats))


def test_errors():
    _, _, floats = problem(1, 4, 2, 2)
    side, other = ScanInputs(*floats[:7]), ScanInputs(*floats[7:14])
    with pytest.raises(ValueError, match=r"backward: delta must have shape \(B, T, E\)"):
        bidirectional_scan(side, other._replace(delta=torch.zeros(1, 4, 3)))
    with pytest.raises(ValueError, match=r"backward\.x must have shape .* as in forward\.x"):
        bidirectional_scan(side, ScanInputs(*problem(1, 5, 2, 2)[2][7:14]))
    with pytest.raises(ValueError, match="mask must have shape"):
        bidirectional_scan(side, other, mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(BackendUnavailable, match="has no backend 'chunked'"):
        bidirectional_scan(side, other, backend="chunked")


@compiled
def test_directions_of_other_sizes_are_refused_by_name_and_run_otherwise():
    _, _, floats = problem(1, 4, 2, 2)
    side = ScanInputs(*floats[:7])
    other = ScanInputs(*problem(1, 4, 2, 3)[2][7:14])
    with pytest.raises(BackendUnavailable, match="same shapes"):
        bidirectional_scan(side, other, backend="cpu")
    torch.testing.assert_close(
        bidirectional_scan(side, other), bidirectional_scan(side, other, backend="torch")
    )
