from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CONV_OPTIONS, ConvProblem
from support import assert_close, gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from brickwork.kernels import causal_conv1d_cpu
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.causal_conv1d import causal_conv1d

pytestmark = pytest.mark.skipif(
    causal_conv1d_cpu.unavailable_here() is not None,
    reason=str(causal_conv1d_cpu.unavailable_here()),
)

ALL = frozenset(CONV_OPTIONS)
CHANNELS = [1, 3, 15, 16, 17, 33]  # around the vectors of 4, 8 and 16
WIDTHS = [1, 2, 3, 4, 5, 7]


class Problem(ConvProblem):
    def check(self, dtypes=(torch.float32, torch.float64)):
        """Values and every gradient in each dtype against the float64 reference."""
        values, grads = gradients(self.run("torch"), [t.double() for t in self.floats])
        expected = [*values, *grads]
        for dtype in dtypes:
            got, got_grads = gradients(self.run("cpu"), [t.to(dtype) for t in self.floats])
            for i, (a, e) in enumerate(zip([*got, *got_grads], expected)):
                assert a.dtype == dtype
                assert_close(a, e, terms=self.terms, name=f"{dtype} result {i}")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("W", WIDTHS)
def test_lengths(W, reverse):
    for T in sorted({1, 2, max(W - 1, 1), W, W + 1, 63, 64, 65}):
        Problem(2, T, 17, W, reverse=reverse).check()
        Problem(2, T, 17, W, (), reverse=reverse, activation=None).check()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", [(), ALL], ids=["plain", "all"])
def test_long(options, reverse):
    """Several blocks of tokens: their gradients meet at the borders."""
    for T in (255, 256, 257, 1000):
        Problem(2, T, 18, 4, options, reverse=reverse).check()


@pytest.mark.parametrize("C", [*CHANNELS, 255, 256, 257, 600])
def test_channels(C):
    """mamba#643: any channel count, around the vectors and the tiles of 256."""
    Problem(2, 20, C, 4).check()


@given(
    T=st.integers(1, 30),
    C=st.sampled_from(CHANNELS),
    W=st.sampled_from(WIDTHS),
    options=st.sets(st.sampled_from(CONV_OPTIONS)),
    activation=st.sampled_from([None, "silu"]),
    reverse=st.booleans(),
    block=st.sampled_from([1, 2, 7, 256]),
)
@settings(max_examples=60)
def test_every_combination(T, C, W, options, activation, reverse, block):
    """Blocks shorter than the filter too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_conv1d_cpu, "_BLOCK", block)
        patch.setattr(causal_conv1d_cpu, "_TILE", 16)
        Problem(2, T, C, W, options, activation=activation, reverse=reverse).check()


def test_all_tokens_masked():
    p = Problem(2, 9, 5, 4)
    p.flags["mask"] = torch.zeros(2, 9, dtype=torch.bool)
    p.check()


def test_masked_tokens_may_hold_anything():
    """fla#1272, mamba#66: padding is passed over, whatever it or its gradient holds."""
    p = Problem(2, 300, 17, 4)
    mask = p.flags["mask"]
    values, grads = gradients(p.run("cpu"), p.floats)
    p.floats[0] = p.floats[0].masked_fill(~mask[..., None], torch.nan)
    again, again_grads = gradients(p.run("cpu"), p.floats)
    for a, e in zip([*again, *again_grads], [*values, *grads]):
        assert torch.equal(a, e)
    assert (again[0][~mask] == 0).all()
    leaves = [t.clone().requires_grad_() for t in p.floats]
    y = p.run("cpu")(*leaves).y
    upstream = torch.ones_like(y).masked_fill(~mask[..., None], torch.nan)
    for grad in torch.autograd.grad(y, leaves, upstream):
        assert grad.isfinite().all()


def layouts(tensor):
    """The same values with other strides."""
    yield tensor.mT.contiguous().mT
    yield tensor.repeat_interleave(2, -1)[..., ::2]
    yield tensor.repeat_interleave(2, 0)[::2]
    yield torch.cat([tensor, tensor], -1).chunk(2, -1)[1]


@pytest.mark.parametrize("which", range(4))
def test_strides(which):
    """mamba#345, mamba#537, fla#871: any strides, in every argument and gradient."""
    p = Problem(2, 66, 18, 4)
    expected, expected_grads = gradients(p.run("cpu"), p.floats)
    given = p.floats[which]
    shapes = [] if given.dim() == 1 else list(layouts(given))
    for other in [*shapes, given.repeat_interleave(2, -1)[..., ::2]]:
        floats = [t.clone().requires_grad_() for t in p.floats]
        floats[which] = other.requires_grad_()
        found = p.run("cpu")(*floats)
        upstream = torch.Generator().manual_seed(1)
        dy = [torch.randn(o.shape, generator=upstream) for o in found]
        grads = torch.autograd.grad(found, floats, [g.mT.contiguous().mT for g in dy])
        for a, e in zip([*found, *grads], [*expected, *expected_grads]):
            assert torch.equal(a, e)


def test_a_slice_is_read_where_it_lies():
    """No copy of a slice of a projection, nor of a gradient that is one."""
    projected = torch.randn(2, 9, 36)
    for part in projected.chunk(2, -1):
        assert causal_conv1d_cpu.dense(part) is part


def test_expanded_inputs_and_gradients():
    """fla#1138: y.sum().backward() hands back a gradient with stride 0."""
    x, weight = torch.randn(1, 66, 1).expand(2, 66, 18), torch.randn(1, 4).expand(18, 4)
    found = []
    for backend, dtype in (("cpu", torch.float32), ("torch", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = causal_conv1d(*leaves, activation="silu", backend=backend).y
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for a, e in zip(*found):
        assert_close(a, e, terms=132)


@pytest.mark.parametrize(("B", "T", "C"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(B, T, C):
    p = Problem(B, T, C, 3)
    values, grads = gradients(p.run("cpu"), p.floats)
    expected, expected_grads = gradients(p.run("torch"), p.floats)
    for a, e in zip(values, expected):
        assert_close(a, e)
    for a, e, t in zip(grads, expected_grads, p.floats):
        assert_close(a, torch.zeros_like(t) if e is None else e)


def test_results_do_not_depend_on_threads():
    """mamba#137: no atomics; the same bits on every run and for every number of threads."""
    p = Problem(3, 600, 300, 4)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            values, grads = gradients(p.run("cpu"), p.floats)
            found.append([*values, *grads])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wide", [(), (1, 2), (0, 3)], ids=["all", "activations", "parameters"])
def test_dtypes(dtype, wide):
    """fla#1264: parameters in float32, activations in bfloat16; results are rounded once."""
    p = Problem(2, 66, 18, 4)
    mixed = [t if i in wide else t.to(dtype) for i, t in enumerate(p.floats)]
    leaves = [t.requires_grad_() for t in mixed]
    exact = [t.detach().double().requires_grad_() for t in mixed]
    found, expected = p.run("cpu")(*leaves), p.run("torch")(*exact)
    dy = torch.randn(2, 66, 18).to(found.y.dtype)
    grads = torch.autograd.grad(found.y, leaves, dy)
    exact_grads = torch.autograd.grad(expected.y, exact, dy.double())
    inputs = [mixed[0], mixed[0], *mixed]
    for a, e, like in zip([*found, *grads], [*expected, *exact_grads], inputs):
        assert a.dtype == like.dtype
        assert_close(a, e, terms=p.terms, compute=torch.float32)


@pytest.mark.parametrize("size", [1e-30, 20.0, 100.0, 1e4, 1e30])
def test_large_and_small_results(size):
    """silu and its slope neither overflow nor lose their small values."""
    p = Problem(1, 40, 18, 4, ("bias",))
    p.floats = [p.floats[0] * size, *p.floats[1:]]
    p.check()


def test_opcheck():
    p = Problem(2, 66, 18, 4)
    leaves = [t.requires_grad_() for t in p.floats]
    flags = (p.flags["mask"], torch.rand(2, 66) > 0.9, True, False)
    torch.library.opcheck(torch.ops.brickwork.causal_conv1d_cpu, (*leaves, *flags))
    bare = (*leaves[:2], None, None, None, None, False, True)
    torch.library.opcheck(torch.ops.brickwork.causal_conv1d_cpu, bare)
    plain = [t.detach() for t in leaves]
    dy = torch.randn(2, 66, 18)
    torch.library.opcheck(torch.ops.brickwork.causal_conv1d_cpu_backward, (dy, *plain, *flags))


def test_double_backward_raises():
    leaves = [t.requires_grad_() for t in Problem(1, 5, 3, 2).floats]
    y = causal_conv1d(*leaves[:2], backend="cpu").y
    (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once; take backend='torch'"):
        torch.autograd.grad(dx.sum(), leaves[1])


def test_offsets_past_two_to_the_31():
    """mamba#503 and others: pointer arithmetic in 64 bits, on memory that is mostly not there."""
    step = 2**30 + 3
    try:
        buffer = torch.empty(2 * step + 8)
    except RuntimeError:
        pytest.skip("no address space for the buffer")
    x = buffer.as_strided((1, 3, 4), (1, step, 1))
    x.copy_(torch.randn(1, 3, 4))
    weight = torch.randn(4, 2)
    for reverse in (False, True):
        got = causal_conv1d(x, weight, reverse=reverse, backend="cpu")
        expected = causal_conv1d(x.clone(), weight, reverse=reverse, backend="torch")
        assert_close(got.y, expected.y, terms=3)


def test_choice_of_backend():
    p = Problem(1, 5, 3, 2)
    with pytest.MonkeyPatch.context() as patch:
        called = []
        run = causal_conv1d_cpu.run
        patch.setattr(causal_conv1d_cpu, "run", lambda *a: (called.append(a[0]), run(*a)))
        p.run("auto")(*p.floats)
        assert called == ["forward"]
        with prefer("chunked"):
            p.run("auto")(*p.floats)
        Problem(1, 1, 3, 2).run("auto")(*Problem(1, 1, 3, 2).floats)
        assert called == ["forward"]
    with FakeTensorMode():
        x, weight = torch.empty(1, 5, 3, device="cuda"), torch.empty(3, 2, device="cuda")
        with pytest.raises(BackendUnavailable, match="it takes CPU tensors, got cuda"):
            causal_conv1d(x, weight, backend="cpu")
    with pytest.raises(BackendUnavailable, match=r"torch\.func"):
        torch.func.vmap(lambda row: causal_conv1d(row[None], p.floats[1], backend="cpu").y)(
            p.floats[0]
        )
