from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import assert_well_behaved, count_bytes, sparse_tensor
from problems import CONV_OPTIONS, ConvProblem
from support import assert_close, assert_same_function, gradients

from brickwork.kernels import causal_conv1d_triton as launches
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.causal_conv1d import causal_conv1d

ALL = frozenset(CONV_OPTIONS)
HALVES = [torch.bfloat16, torch.float16]


class Problem(ConvProblem):
    def check(self):
        assert_same_function(self.run("triton"), self.run("torch"), self.floats, terms=self.terms)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 8])
def test_lengths(W, reverse):
    """Around the filter, the unrolled tokens (4) and a program's tokens (16)."""
    for T in (W, 17) if W in (1, 4) else (W + 1,):
        Problem(2, T, 5, W, reverse=reverse).check()
    Problem(1, 5, 5, W, (), reverse=reverse, activation=None).check()


@pytest.mark.parametrize("C", [1, 127, 128, 129, 1025])
def test_channels(C):
    """mamba#643: any channel count, around a program's (128 to 1,024)."""
    Problem(2, 6, C, 4).check()


@given(
    T=st.integers(1, 12),
    W=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    options=st.sets(st.sampled_from(CONV_OPTIONS)),
    activation=st.sampled_from([None, "silu"]),
    reverse=st.booleans(),
    tokens=st.sampled_from([1, 2, 5, 16]),
    tiled=st.booleans(),
)
@settings(max_examples=12)
def test_every_combination(T, W, options, activation, reverse, tokens, tiled):
    """Programs of fewer tokens than the filter has too; tiles, which only 16 bits take, exactly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "_TOKENS", tokens)
        if tiled:
            tile = launches._backward_tile(3, 8, torch.bfloat16, 32)
            assert tile.tiled
            patch.setattr(launches, "_backward_tile", lambda *_: tile)
        Problem(2, T, 3, W, options, activation=activation, reverse=reverse).check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wide", [(), (1, 2), (0, 3)], ids=["all", "activations", "parameters"])
@pytest.mark.parametrize("W", [4, 8])
def test_dtypes(dtype, wide, W):
    """fla#1264: parameters in float32, activations narrow, or the other way round; one rounding."""
    p = Problem(2, 18, 6, W)
    mixed = [t if i in wide else t.to(dtype) for i, t in enumerate(p.floats)]
    leaves = [t.requires_grad_() for t in mixed]
    exact = [t.detach().double().requires_grad_() for t in mixed]
    exact[3] = mixed[3].detach().to(mixed[0].dtype).double().requires_grad_()  # it takes x's dtype
    found, expected = p.run("triton")(*leaves), p.run("torch")(*exact)
    dy = torch.randn(2, 18, 6).to(found.y.dtype)
    grads = torch.autograd.grad(found.y, leaves, dy)
    exact_grads = torch.autograd.grad(expected.y, exact, dy.double())
    inputs = [mixed[0], mixed[0], *mixed]
    for a, e, like in zip([*found, *grads], [*expected, *exact_grads], inputs):
        assert a.dtype == like.dtype
        assert_close(a, e, terms=p.terms, compute=torch.float32)


def layouts(tensor):
    """The same values with other strides."""
    yield tensor.mT.contiguous().mT
    yield tensor.repeat_interleave(2, -1)[..., ::2]
    yield tensor.repeat_interleave(2, 0)[::2]
    yield torch.cat([tensor, tensor], -1).chunk(2, -1)[1]


@pytest.mark.parametrize("which", range(4))
def test_strides(which):
    """mamba#345, mamba#537, fla#871: any strides, in every argument and gradient."""
    p = Problem(2, 7, 6, 4)
    expected, expected_grads = gradients(p.run("triton"), p.floats)
    given = p.floats[which]
    for other in [
        given.repeat_interleave(2, -1)[..., ::2],
        *([] if which == 2 else layouts(given)),
    ]:
        floats = [t.clone().requires_grad_() for t in p.floats]
        floats[which] = other.requires_grad_()
        found = p.run("triton")(*floats)
        upstream = torch.Generator().manual_seed(1)
        dy = [torch.randn(o.shape, generator=upstream) for o in found]
        grads = torch.autograd.grad(found, floats, [g.mT.contiguous().mT for g in dy])
        for a, e in zip([*found, *grads], [*expected, *expected_grads]):
            assert torch.equal(a, e)


def test_expanded_inputs_and_gradients():
    """fla#1138: y.sum().backward() hands back a gradient with stride 0."""
    x, weight = torch.randn(1, 9, 1).expand(2, 9, 6), torch.randn(1, 4).expand(6, 4)
    found = []
    for backend in ("triton", "torch"):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        y = causal_conv1d(*leaves, activation="silu", backend=backend).y
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for a, e in zip(*found):
        assert_close(a, e, terms=18)


@pytest.mark.parametrize(("B", "T", "C"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(B, T, C):
    p = Problem(B, T, C, 3)
    values, grads = gradients(p.run("triton"), p.floats)
    expected, expected_grads = gradients(p.run("torch"), p.floats)
    for a, e in zip(values, expected):
        assert_close(a, e)
    for a, e, t in zip(grads, expected_grads, p.floats):
        assert_close(a, torch.zeros_like(t) if e is None else e)


def test_masked_tokens_may_hold_anything():
    """fla#1272, mamba#66: padding is passed over, whatever it or its gradient holds."""
    p = Problem(2, 19, 3, 4)
    mask = p.flags["mask"]
    values, grads = gradients(p.run("triton"), p.floats)
    p.floats[0] = p.floats[0].masked_fill(~mask[..., None], torch.nan)
    again, again_grads = gradients(p.run("triton"), p.floats)
    for a, e in zip([*again, *again_grads], [*values, *grads]):
        assert torch.equal(a, e)
    leaves = [t.clone().requires_grad_() for t in p.floats]
    y = p.run("triton")(*leaves).y
    assert (y[~mask] == 0).all()
    upstream = torch.ones_like(y).masked_fill(~mask[..., None], torch.nan)
    for grad in torch.autograd.grad(y, leaves, upstream):
        assert grad.isfinite().all()
    p.flags["mask"] = torch.zeros(2, 19, dtype=torch.bool)
    assert (p.run("triton")(*p.floats).y == 0).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # NumPy's
@pytest.mark.parametrize("size", [1e-30, 100.0, 1e30])
def test_large_and_small_results(size):
    """silu and its slope neither overflow nor lose their small values."""
    p = Problem(1, 9, 4, 4, ("bias",))
    p.floats = [p.floats[0] * size, *p.floats[1:]]
    p.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_behaves(dtype):
    """D1 1, D1 3, D1 5, D1 28; mamba#137: no atomics."""
    p = Problem(2, 18, 5, 4)
    assert_well_behaved(p.run("triton"), [t.to(dtype) for t in p.floats])


def test_the_ops_are_well_registered():
    p = Problem(2, 6, 5, 4)
    leaves = [t.requires_grad_() for t in p.floats]
    order, count = torch.arange(6).expand(2, 6).contiguous(), torch.tensor([6, 4])
    flags = (order, count, torch.rand(2, 6) > 0.9, True, False)
    torch.library.opcheck(launches._forward_op, (*leaves, *flags))
    torch.library.opcheck(launches._forward_op, (*leaves[:2], *[None] * 5, False, True))
    plain = [t.detach() for t in leaves]
    torch.library.opcheck(launches._backward_op, (torch.randn(2, 6, 5), *plain, *flags))


@pytest.mark.parametrize("W", [4, 8])
@pytest.mark.parametrize("given", [(), ("bias",)])
def test_bytes(given, W):
    """What the launcher's docstring states, and what programs share at their borders."""
    B, T, C, per_program = 1, 40, 6, 16
    p = Problem(B, T, C, W, given)
    x, *others = (t.requires_grad_() for t in [p.floats[0].bfloat16(), *p.floats[1:]])
    small = 4 * C * (W + len(given))
    programs = -(-T // per_program)
    with count_bytes() as moved:
        y = p.run("triton")(x, *others).y
    assert moved.read == x.nbytes + small
    assert moved.loaded == x.nbytes + 2 * C * (W - 1) * (programs - 1) + programs * small
    assert moved.stored == moved.written == y.nbytes
    dy = torch.randn_like(y)
    with count_bytes() as moved:
        torch.autograd.grad(y, [x, *others], dy)
    assert moved.read == 2 * x.nbytes + small
    assert moved.loaded == moved.read + (programs - 1) * (small + 3 * 2 * C * (W - 1))
    assert moved.stored == moved.written == x.nbytes + 4 * C * (W + 1) * programs


@pytest.mark.parametrize("operand", ["x", "dy"])
def test_offsets_past_two_to_the_31(operand):
    """mamba#503 and others: tokens far apart in memory that is mostly not there."""
    apart = sparse_tensor((1, 4, 2**30), torch.bfloat16)[..., :4]
    apart.copy_(torch.randn(1, 4, 4))
    near = torch.randn(1, 4, 4).bfloat16()
    weight = torch.randn(4, 2, requires_grad=True)
    results = []
    for compact in (False, True):
        given = apart.contiguous() if compact else apart
        x, dy = (given, near) if operand == "x" else (near, given)
        x = x.detach().requires_grad_()
        y = causal_conv1d(x, weight, reverse=True, backend="triton").y
        results.append([y, *torch.autograd.grad(y, [x, weight], dy)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_what_it_refuses():
    p = Problem(1, 5, 3, 9, ())
    with pytest.raises(BackendUnavailable, match="it takes widths up to 8, got 9"):
        p.run("triton")(*p.floats)
    p = Problem(1, 5, 3, 2, ())
    with pytest.raises(BackendUnavailable, match="got float64"):
        p.run("triton")(*(t.double() for t in p.floats))
    with pytest.raises(BackendUnavailable, match="transforms differentiate and batch plain"):
        torch.func.vmap(lambda row: p.run("triton")(row[None], p.floats[1]).y)(p.floats[0])


def test_the_interpreter_runs_on_request_only():
    p = Problem(1, 5, 3, 2, ())
    with pytest.MonkeyPatch.context() as patch:
        called = []
        run = launches._forward_op
        patch.setattr(launches, "_forward_op", lambda *a: called.append(a) or run(*a))
        p.run("auto")(*p.floats)
        assert not called
        with prefer("triton"):
            p.run("auto")(*p.floats)
        assert len(called) == 1
