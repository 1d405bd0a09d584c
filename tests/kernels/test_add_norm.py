from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, assert_same_function, gradcheck, gradients
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from brickwork.kernels.add_norm import AddNormOutput, add_norm, add_norm_reference
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.rms_norm import rms_norm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NARROW = [torch.bfloat16, torch.float16]
KINDS = ["rms", "layer"]
CASTS = ["once", "before_weight"]
EPS = 1e-5
SHAPES = st.tuples(st.sampled_from([(), (1,), (3,), (2, 5)]), st.sampled_from([1, 2, 31, 33, 128]))

# Both norm ops as functions of x and weight, for what must hold of either.
NORMS = {
    "rms_norm": lambda x, w: rms_norm(x, w, eps=EPS),
    "add_norm-rms": lambda x, w: add_norm(x, None, w, kind="rms", eps=EPS).y,
    "add_norm-layer": lambda x, w: add_norm(x, None, w, kind="layer", eps=EPS).y,
    "add_norm-residual": lambda x, w: add_norm(x, x.flip(0), w, kind="rms", eps=EPS).y,
}
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())


def unfused(x, residual, weight, bias, *, kind, cast, residual_dtype):
    """The addition and PyTorch's own norm, one after the other, rounding where the docs say."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    total = total.to(x.dtype if residual_dtype is None else torch.promote_types(x.dtype, wide))
    norm = F.rms_norm if kind == "rms" else F.layer_norm
    y = norm(total.to(wide), x.shape[-1:], eps=EPS)
    if cast == "before_weight":
        y = y.to(x.dtype).to(wide)
    y = y * weight.to(wide)
    return AddNormOutput((y if bias is None else y + bias.to(wide)).to(x.dtype), total)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_equals_unfused(kind, cast, with_bias, residual_dtype, dtype):
    """N4, D1 10 and 18: both outputs and every gradient over the whole option grid."""
    options = {"kind": kind, "cast": cast, "residual_dtype": residual_dtype}
    x, residual = torch.randn(3, 4, 33).to(dtype), torch.randn(3, 4, 33).to(dtype)
    fraction = torch.randn(3, 4, 33) / 7  # makes a float32 residual that no narrower type holds

    def fused(x, residual, *rest):
        return add_norm(x, residual, *rest, eps=EPS, **options)

    def apart(x, residual, *rest):
        return unfused(x, residual, *rest, **options)

    # Between the two casts a value may fall to either neighbour of its narrow type.
    close = {"compute": dtype, "terms": 1} if cast == "before_weight" else {"terms": 33}

    def widened(function):
        return lambda x, residual, *rest: function(x, residual.float() + fraction, *rest)

    for weight_dtype in (dtype, torch.float32):
        weight = torch.randn(33).to(weight_dtype)
        bias = torch.randn(33).to(weight_dtype) if with_bias else None
        rest = [weight, bias]
        assert_same_function(fused, apart, [x, None, *rest], **close)
        assert_same_function(fused, apart, [x, residual, *rest], **close)
        assert_same_function(widened(fused), widened(apart), [x, residual, *rest], **close)


@given(shape=SHAPES, kind=st.sampled_from(KINDS), given_residual=st.booleans())
def test_equals_float64(shape, kind, given_residual):
    x, weight, bias = torch.randn(*shape[0], shape[1]), torch.randn(shape[1]), torch.randn(shape[1])
    residual = torch.randn_like(x) if given_residual else None
    wide = [t if t is None else t.double() for t in (x, residual, weight, bias)]
    y, total = add_norm(x, residual, weight, bias, kind=kind, eps=0.1)
    expected, expected_total = add_norm(*wide, kind=kind, eps=0.1)
    assert_close(total, expected_total)
    scale = (expected - bias).abs().max().item() + bias.abs().max().item()
    assert_close(y, expected, terms=shape[1], scale=scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NARROW)
def test_the_sum_is_rounded_once_and_the_norm_sees_the_rounded_sum(kind, dtype):
    """N4: adding and then normalising is the same, bit for bit, for either residual dtype."""
    x, residual, weight = (
        torch.randn(64, 96).to(dtype),
        torch.randn(64, 96).to(dtype),
        torch.ones(96),
    )
    narrow = add_norm(x, residual, weight, kind=kind)
    assert torch.equal(narrow.residual, x + residual)
    assert torch.equal(narrow.y, add_norm(x + residual, None, weight, kind=kind).y)
    kept = add_norm(x, residual.float(), weight, kind=kind, residual_dtype=torch.float32)
    assert torch.equal(kept.residual, x.float() + residual.float())
    assert torch.equal(kept.y, add_norm(kept.residual, None, weight, kind=kind).y.to(dtype))
    assert not torch.equal(kept.y, narrow.y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradcheck(kind, cast, with_residual, with_bias):
    """D1 5 and 10: first and second derivatives of both outputs, for every option."""
    gradcheck(
        lambda *tensors: add_norm(*tensors, kind=kind, eps=1e-3, cast=cast),
        [
            torch.randn(3, 5),
            torch.randn(3, 5) if with_residual else None,
            torch.randn(5),
            torch.randn(5) if with_bias else None,
        ],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_gets_its_own_gradient_once(kind):
    """D1 10."""
    x, residual, weight = (torch.randn(s, dtype=torch.float64) for s in ((3, 8), (3, 8), (8,)))
    x.requires_grad_()
    residual.requires_grad_()
    y, total = add_norm(x, residual, weight, kind=kind)
    dy, dtotal = torch.randn_like(y), torch.randn_like(total)
    of_y = torch.autograd.grad(y, (x, residual), dy, retain_graph=True)
    of_total = torch.autograd.grad(total, (x, residual), dtotal, retain_graph=True)
    both = torch.autograd.grad((y, total), (x, residual), (dy, dtotal))
    for first, second, together in zip(of_y, of_total, both):
        assert torch.equal(second, dtotal)
        assert_close(together, first + second, terms=8)


@given(shape=SHAPES, factor=st.sampled_from([1e-3, 2.0, 1e3]), shift=st.sampled_from([-3.0, 0.1]))
def test_invariances(shape, factor, shift):
    x = torch.randn(*shape[0], shape[1], dtype=torch.float64)
    weight = torch.ones(shape[1], dtype=torch.float64)
    y = add_norm(x, None, weight, kind="rms", eps=0.0).y
    assert_close(add_norm(x * factor, None, weight, kind="rms", eps=0.0).y, y, terms=shape[1])
    y = add_norm(x, None, weight, kind="layer", eps=1e-3).y
    moved = add_norm(x + shift, None, weight, kind="layer", eps=1e-3).y
    assert_close(moved, y, terms=shape[1], scale=abs(shift) * 1e3)
    assert_close(y.mean(-1), torch.zeros(shape[0], dtype=torch.float64), terms=shape[1], scale=1)


@every_norm
def test_rows_do_not_see_one_another(norm):
    x, weight = torch.randn(6, 33), torch.randn(33)
    if norm is NORMS["add_norm-residual"]:
        return  # adds another row by design
    y, order = norm(x, weight), torch.randperm(6)
    assert torch.equal(norm(x[order], weight), y[order])
    assert torch.equal(torch.cat([norm(x[:2], weight), norm(x[2:], weight)]), y)


@every_norm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_x_is_kept(norm, dtype, weight_dtype, autocast):
    """N2, D1 19 and 29: whatever the weight's dtype, and autocast changes no value."""
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(8).to(weight_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = norm(x, weight)
    assert y.dtype == dtype
    assert torch.equal(y, norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given_dtype", DTYPES)
def test_dtype_of_the_residual_is_the_one_asked_for(dtype, given_dtype):
    x, residual, weight = (
        torch.ones(2, 4, dtype=dtype),
        torch.ones(2, 4, dtype=given_dtype),
        torch.ones(4),
    )
    assert add_norm(x, residual, weight).residual.dtype == dtype
    kept = add_norm(x, residual, weight, residual_dtype=torch.float32).residual
    assert kept.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_large_half_precision_values_do_not_overflow(kind):
    """N3: 300² is beyond float16, 60,000 + 60,000 too unless the residual is kept wide."""
    x = torch.tensor([300.0, -300.0] * 4, dtype=torch.float16)
    assert torch.equal(add_norm(x, None, torch.ones(8), kind=kind).y, x / 300)
    big = torch.tensor([60000.0, -60000.0], dtype=torch.float16)
    y, total = add_norm(big, big, torch.ones(2), kind=kind, residual_dtype=torch.float32)
    assert total.tolist() == [120000.0, -120000.0]
    assert y.tolist() == [1.0, -1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NARROW)
def test_cast_orders_are_what_they_say(kind, dtype):
    """N3: each order is its own formula exactly, and they differ by at most 2 ulp."""
    x, weight, bias = torch.randn(64, 96).to(dtype), torch.randn(96).to(dtype), torch.randn(96)
    plain = add_norm(x.float(), None, torch.ones(96), kind=kind).y
    once = add_norm(x, None, weight, bias, kind=kind, cast="once").y
    before = add_norm(x, None, weight, bias, kind=kind, cast="before_weight").y
    assert torch.equal(once, (plain * weight.float() + bias).to(dtype))
    assert torch.equal(before, (plain.to(dtype).float() * weight.float() + bias).to(dtype))
    assert not torch.equal(once, before)


@every_norm
def test_inputs_and_upstream_gradients_stay_as_they_are(norm):
    """D1 1 to 4: nothing is written into, and a second backward gives the same gradients."""
    a, weight = torch.randn(4, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    x = a.exp()  # exp keeps its output for its own backward
    y = norm(x, weight) + x
    upstream = torch.randn_like(y)
    before = [t.detach().clone() for t in (a, weight, x, y, upstream)]
    first = torch.autograd.grad(y, (a, weight), upstream, retain_graph=True)
    second = torch.autograd.grad(y, (a, weight), upstream)
    for old, new in zip(before, (a, weight, x, y, upstream)):
        assert torch.equal(old, new.detach())
    for one, other in zip(first, second):
        assert torch.equal(one, other)
    assert_same_function(
        lambda a, w: norm(a.exp(), w) + a.exp(),
        lambda a, w: (norm(a.double().exp(), w.double()) + a.double().exp()).float(),
        [a, weight],
        terms=33,
    )


def layouts(rows: int, columns: int):
    """Tensors of one shape that lie in memory in every way that views can make them."""
    yield torch.randn(rows, columns)
    yield torch.randn(rows, 2 * columns)[:, ::2]
    yield torch.randn(rows, columns + 3)[:, 1:-2]
    yield torch.randn(columns, rows).t()
    yield torch.randn(2 * rows, columns)[::2]
    yield torch.randn(1, columns).expand(rows, columns)


def constant_layouts(rows: int, columns: int):
    """The same for rows of one value each, which lie there once."""
    yield torch.randn(rows, 1).expand(rows, columns)
    yield torch.randn(()).expand(rows, columns)


@every_norm
def test_strides_of_inputs_and_of_upstream_gradients(norm):
    """D1 7 to 9."""
    weight = torch.randn(33)
    strided_weight = torch.randn(66)[::2]
    upstreams = [*layouts(5, 33), *constant_layouts(5, 33)]
    for x, upstream in itertools.product(layouts(5, 33), upstreams):
        results = []
        for copy in (lambda t: t, torch.Tensor.contiguous):
            leaf = copy(x.detach()).requires_grad_()
            y = norm(leaf, weight)
            results += [y, torch.autograd.grad(y, leaf, copy(upstream))[0]]
        assert_close(results[0], results[2], terms=33)
        assert_close(results[1], results[3], terms=33)
    x = torch.randn(5, 33)
    assert torch.equal(norm(x, strided_weight), norm(x, strided_weight.contiguous()))
    for x in constant_layouts(5, 33):
        # Layer norm divides what is left of x - mean(x), rounding errors of x's size, by sqrt(eps).
        scale = x.abs().max().item() / EPS**0.5
        assert_close(norm(x, weight), norm(x.contiguous(), weight), terms=33, scale=scale)


@every_norm
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 1)])
def test_no_rows(norm, shape):
    """D1 23 and 24: the right shapes, and a weight gradient of zeros."""
    (y,), (dx, dweight) = gradients(norm, [torch.randn(shape), torch.randn(shape[-1])])
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[-1]))


@every_norm
@pytest.mark.parametrize("dtype", NARROW)
def test_statistics_are_saved_in_float32(norm, dtype):
    """D1 18: one number a row, kept for the backward pass, is never of half precision."""
    x = torch.randn(7, 33, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x.to(dtype), torch.ones(33, dtype=dtype))
    statistics = [t for t in kept if t.shape == (7, 1)]
    assert statistics
    assert all(t.dtype == torch.float32 for t in statistics)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_float64_on_narrower_input(norm, dtype):
    """D1 20: devices without float64 run it, and Python's numbers do not widen it."""

    def function(x, weight):
        return torch.autograd.grad(norm(x, weight).sum(), (x, weight))

    tensors = [torch.randn(3, 8).to(dtype).requires_grad_(), torch.ones(8).requires_grad_()]
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    seen = [n.meta["val"].dtype for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert torch.float32 in seen
    assert torch.float64 not in seen


@every_norm
def test_compiles_to_one_graph_for_all_row_counts(norm):
    """D1 21 and 28: fullgraph, the gradients included, and no graph per number of rows."""
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    weight = torch.randn(8)
    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend=count)
    for rows in (3, 4, 5, 6, 7):
        x = torch.randn(rows, 8)
        assert_close(compiled(x, weight), norm(x, weight), terms=8)
    assert len(graphs) <= 2
    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled, norm, [torch.randn(3, 8), weight], terms=8)


@every_norm
def test_vmap_checkpoint_and_meta(norm):
    x, weight = torch.randn(4, 3, 8), torch.randn(4, 8)
    mapped = torch.func.vmap(norm)(x, weight)
    assert_close(mapped, torch.stack([norm(a, w) for a, w in zip(x, weight)]), terms=8)
    assert_same_function(
        lambda *t: checkpoint(norm, *t, use_reentrant=False), norm, [x[0], weight[0]]
    )
    on_meta = norm(x[0].to("meta"), weight[0].to("meta"))
    assert (on_meta.shape, on_meta.device.type) == (x[0].shape, "meta")


def test_returns_a_named_tuple_from_both_forms():
    x, weight = torch.randn(2, 4), torch.randn(4)
    for function in (add_norm, add_norm_reference):
        output = function(x, x, weight)
        assert isinstance(output, AddNormOutput)
        assert torch.equal(output.residual, 2 * x)


def test_errors():
    x, weight = torch.randn(2, 4), torch.ones(4)
    with pytest.raises(
        ValueError, match=r"residual must have the shape of x, \(2, 4\), got \(4,\)"
    ):
        add_norm(x, torch.ones(4), weight)
    with pytest.raises(ValueError, match=r"weight must have shape .* C = 4 as in x, got \(5,\)"):
        add_norm(x, None, torch.ones(5))
    with pytest.raises(ValueError, match=r"bias must have shape .* C = 4 as in x, got \(1,\)"):
        add_norm(x, None, weight, torch.ones(1))
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., C\), got \(\)"):
        add_norm(torch.tensor(1.0), None, weight)
    for name, tensors in {
        "x": (x.long(), None, weight, None),
        "residual": (x, x.long(), weight, None),
        "weight": (x, None, weight.long(), None),
        "bias": (x, None, weight, weight.bool()),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be floating point, got"):
            add_norm(*tensors)
    with pytest.raises(ValueError, match=r"kind must be one of \('rms', 'layer'\), got 'batch'"):
        add_norm(x, None, weight, kind="batch")
    with pytest.raises(ValueError, match=r"cast must be one of .* got 'later'"):
        add_norm(x, None, weight, cast="later")
    for eps in (-1.0, float("nan"), float("inf"), True, "0"):
        with pytest.raises(ValueError, match="eps must be a finite number of at least 0, got"):
            add_norm(x, None, weight, eps=eps)
    with pytest.raises(ValueError, match=r"residual_dtype must be one of .* got torch\.bfloat16"):
        add_norm(x, None, weight, residual_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        add_norm(x, None, weight, backend="fast")
    with pytest.raises(BackendUnavailable, match="add_norm has no backend 'cpu'"):
        add_norm(x, None, weight, backend="cpu")
