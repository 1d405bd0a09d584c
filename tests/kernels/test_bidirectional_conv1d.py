from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import PADDINGS, packing_ids, padding_mask
from support import assert_close, gradcheck, gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from brickwork.kernels import causal_conv1d_cpu
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.bidirectional_conv1d import Filter, bidirectional_conv1d
from brickwork.kernels.causal_conv1d import causal_conv1d

NO_CPU = causal_conv1d_cpu.unavailable_here()
compiled = pytest.mark.skipif(NO_CPU is not None, reason=str(NO_CPU))
BLOCK = causal_conv1d_cpu._BLOCK


def make(B=2, T=7, C=5, W=4, dtype=torch.float64):
    """x, and each way weight and bias; x is a slice, as half of a projection is."""
    x = torch.randn(B, T, 2 * C, dtype=dtype)[..., :C]
    return [x, *(torch.randn(size, dtype=dtype) for _ in range(2) for size in ((C, W), (C,)))]


def one(backend, *, bias=True, **options):
    def run(x, weight, b, weight_back, b_back):
        sides = (weight, b if bias else None), (weight_back, b_back if bias else None)
        return bidirectional_conv1d(x, *sides, **options, backend=backend)

    return run


def two(*, bias=True, **options):
    def run(x, weight, b, weight_back, b_back):
        b, b_back = (b, b_back) if bias else (None, None)
        y = causal_conv1d(x, weight, b, **options, backend="torch").y
        return y, causal_conv1d(x, weight_back, b_back, reverse=True, **options, backend="torch").y

    return run


def check(backend, *, B, T, C=5, W=4, **options):
    inputs = make(B, T, C, W)
    values, grads = gradients(two(**options), inputs)
    for dtype in (torch.float32, torch.float64):
        narrow = [t.to(dtype) for t in inputs]
        got, got_grads = gradients(one(backend, **options), narrow)
        for i, (a, e) in enumerate(zip([*got, *got_grads], [*values, *grads])):
            assert (a is None) == (e is None)
            if a is not None:
                assert a.dtype == dtype
                assert_close(a, e, terms=3 * (T + W) * W, name=f"{dtype} result {i}")


@compiled
@pytest.mark.parametrize("T", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 44])
def test_lengths(T):
    """Blocks of tokens of the one direction are those of the other, whatever the length."""
    check("cpu", B=2, T=T, activation="silu")


@compiled
@given(
    T=st.integers(1, 12),
    C=st.sampled_from([1, 16, 19]),
    W=st.sampled_from([1, 2, 4, 6]),
    padding=PADDINGS,
    packed=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    block=st.sampled_from([1, 3, 256]),
)
@settings(max_examples=40)
def test_every_combination(T, C, W, padding, packed, block, **options):
    where = {"mask": padding_mask(padding, 3, T), "seq_ids": packing_ids(packed, 3, T)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_conv1d_cpu, "_BLOCK", block)
        check("cpu", B=3, T=T, C=C, W=W, **where, **options)


@compiled
def test_padding_between_blocks():
    """Rows with other numbers of real tokens have other blocks."""
    mask = torch.rand(3, 2 * BLOCK + 9) > torch.tensor([0.1, 0.6, 1.0])[:, None]
    check("cpu", B=3, T=mask.shape[1], mask=mask, activation="silu")


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_other_backends(backend, monkeypatch):
    """What is preferred is taken, also if only a convolution alone has it."""
    monkeypatch.setattr(causal_conv1d_cpu, "run", None)
    with prefer("chunked"):
        check(backend, B=2, T=9, activation="silu")


def test_reference_gradients():
    gradcheck(one("torch", activation="silu"), make(1, 3, 2, 2))


@compiled
def test_narrow_types_are_summed_before_they_are_rounded():
    inputs = [t.to(torch.bfloat16) for t in make()]
    got = one("cpu", activation="silu")(*inputs)
    exact = two(activation="silu")(*(t.double() for t in inputs))
    for a, e in zip(got, exact):
        assert a.dtype == torch.bfloat16
        assert_close(a, e, terms=5)


@compiled
def test_one_of_two_gradients():
    """A result that nobody uses has no gradient to hand back, whatever its filter holds."""
    for way in (0, 1):
        inputs = make()
        inputs[3 - 2 * way].fill_(torch.inf)
        got = gradients(lambda *t, way=way: [one("cpu")(*t)[way]], inputs)[1]
        expected = gradients(lambda *t, way=way: [two()(*t)[way]], inputs)[1]
        for a, e in zip(got, expected):
            assert (a is None) == (e is None)
            if a is not None:
                assert_close(a, e, terms=7 * 4)


@compiled
def test_empty_and_fake():
    for B, T in ((0, 5), (2, 0)):
        values, grads = gradients(one("cpu"), make(B, T))
        assert [v.shape for v in values] == [(B, T, 5)] * 2
        assert all((g == 0).all() for g in grads)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in make()]
        assert [y.shape for y in one("cpu")(*fakes)] == [(2, 7, 5)] * 2


@compiled
def test_op():
    leaves = [t.float().requires_grad_() for t in make()]
    one("cpu")(*leaves)  # registers the op
    op = torch.ops.brickwork.bidirectional_conv1d_cpu
    torch.library.opcheck(op, (*leaves, None, None, None, True))


@compiled
def test_compiles_to_one_graph_and_differentiates_once():
    leaves = [t.requires_grad_() for t in make()]
    run = one("cpu", activation="silu")
    plain = run(*leaves)
    whole = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    assert all(torch.equal(a, b) for a, b in zip(whole, plain))
    (dx,) = torch.autograd.grad(plain[0].square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


@compiled
def test_threads_change_nothing():
    inputs = make(2, 2 * BLOCK + 3, 300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = gradients(one("cpu", activation="silu"), inputs)
        torch.set_num_threads(3)
        three = gradients(one("cpu", activation="silu"), inputs)
    finally:
        torch.set_num_threads(before)
    for a, b in zip([*single[0], *single[1]], [*three[0], *three[1]]):
        assert torch.equal(a, b)


def test_errors():
    x, weight, bias, *_ = make()
    filters = Filter(weight, bias), Filter(weight[:3])
    with pytest.raises(ValueError, match=r"backward: weight must have shape \(C, W\)"):
        bidirectional_conv1d(x, *filters)
    with pytest.raises(ValueError, match="activation"):
        bidirectional_conv1d(x, (weight,), (weight,), activation="gelu")
    with pytest.raises(ValueError, match="mask must have shape"):
        bidirectional_conv1d(x, (weight,), (weight,), mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(BackendUnavailable, match="has no backend 'chunked'"):
        bidirectional_conv1d(x, (weight,), (weight,), backend="chunked")


@compiled
def test_filters_of_other_widths_are_refused_by_name_and_run_otherwise():
    x, weight, bias, *_ = make()
    sides = Filter(weight, bias), Filter(weight[:, :2])
    with pytest.raises(BackendUnavailable, match="one width"):
        bidirectional_conv1d(x, *sides, backend="cpu")
    for a, b in zip(
        bidirectional_conv1d(x, *sides), bidirectional_conv1d(x, *sides, backend="torch")
    ):
        torch.testing.assert_close(a, b)
