"""`rms_norm` and `add_norm`, whose kernels are the same."""

from __future__ import annotations

import pytest
import torch
from interpreter import assert_well_behaved, count_bytes, sparse_tensor
from support import assert_close, assert_same_function, gradients

from brickwork.kernels import add_norm_triton as launches
from brickwork.kernels.add_norm import add_norm, add_norm_reference
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.rms_norm import rms_norm, rms_norm_reference

HALVES = [torch.bfloat16, torch.float16]
CASTS = ["once", "before_weight"]
# Around the borders of tiles: powers of two, several rows to one, whole rows to tiles (8,192
# columns backward, 16,384 forward).
COLUMNS = [1, 2, 3, 15, 16, 17, 31, 33, 100, 127, 128, 129, 511, 512, 513, 1000, 1024, 1025]
WIDE = [8192, 8193, 16385, 33000]


def run(backend, **options):
    return lambda x, r, w, b: add_norm(x, r, w, b, backend=backend, **options)


def tensors(M, N, dtype=torch.float32, residual=torch.float32, *, weights=None):
    x, r = torch.randn(M, N).to(dtype), torch.randn(M, N).to(residual)
    w, b = torch.randn(N).to(weights or dtype), torch.randn(N).to(weights or dtype)
    return [x, r, w, b]


def check(M, N, *, kind="rms", **options):
    """Values and every gradient in float32, with and without residual and bias."""
    # Rows of a few columns are differences of terms as large as all others, and need no small eps.
    options |= {"kind": kind, "eps": 1e-5 if N > 15 else 0.1}
    x, r, w, b = tensors(M, N)
    for inputs in ([x, r, w, b], [x, None, w, None]):
        assert_same_function(
            run("triton", **options),
            run("torch", **options),
            inputs,
            terms=max(M, N),
            one_scale=N <= 15,
        )


@pytest.mark.parametrize("N", COLUMNS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_columns(N, kind):
    check(5, N, kind=kind, cast="before_weight" if N % 2 else "once")


@pytest.mark.parametrize("N", WIDE)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_wide_rows(N, kind):
    """Rows longer than registers hold are read in tiles."""
    check(3, N, kind=kind)


@pytest.mark.parametrize("M", [1, 2, 3, 15, 16, 17, 63, 64, 65])
def test_rows(M):
    """More rows than a tile has, and than there are programs in the backward pass."""
    check(M, 128, kind="layer")
    check(M, 24)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("residual", [torch.float32, None])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("N", "cast"), [(96, "once"), (96, "before_weight"), (1000, "once"), (9000, "before_weight")]
)
def test_narrow_dtypes(dtype, residual, kind, cast, N):
    """D1 18, N3: values are the reference's up to a unit in the last place, few bits differ at
    all, and gradients are those of exact arithmetic on what the forward pass rounded."""
    residual = residual or dtype
    options = {"kind": kind, "cast": cast, "eps": 1e-5, "residual_dtype": residual}
    inputs = tensors(5, N, dtype, residual)
    values, grads = gradients(run("triton", **options), inputs)
    expected = add_norm_reference(*inputs, **options)
    assert torch.equal(values[1], expected.residual)
    assert_close(values[0], expected.y, terms=N)
    assert (values[0] != expected.y).double().mean() < 0.01
    _, exact = gradients(exact_norm(dtype, **options), [t.double() for t in inputs])
    for i, (found, wanted) in enumerate(zip(grads, exact)):
        assert found.dtype == inputs[i].dtype
        assert_close(found, wanted, terms=N, name=f"gradient of input {i}")


def exact_norm(dtype, *, kind, cast, eps, residual_dtype):
    """The op in float64, with the roundings of the reference, which gradients pass unchanged."""

    def rounded(t, to):
        return t + (t.to(to).double() - t).detach()

    def function(x, r, w, b):
        s = rounded(x + r, residual_dtype)
        y = s - s.mean(-1, keepdim=True) if kind == "layer" else s
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        if cast == "before_weight":
            y = rounded(y, dtype)
        return (y * w + b).to(dtype), s.to(residual_dtype)

    return function


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_of_another_dtype(dtype):
    """D1 19, N2: a float32 weight changes neither the dtype of y nor the rounding of its own
    gradient."""
    x, r, w, b = tensors(5, 200, dtype, weights=torch.float32)
    options = {"kind": "layer", "cast": "once", "eps": 1e-5, "residual_dtype": torch.float32}
    (y, s), grads = gradients(run("triton", **options), [x, r, w, b])
    assert (y.dtype, s.dtype) == (dtype, torch.float32)
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32, torch.float32]
    _, exact = gradients(exact_norm(dtype, **options), [t.double() for t in (x, r, w, b)])
    for found, wanted in zip(grads, exact):
        assert_close(found, wanted, terms=200)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("N", [20, 700, 33000])
def test_rms_norm(dtype, cast, N):
    x, _, w, _ = tensors(3, N, dtype)
    y = rms_norm(x, w, cast=cast, backend="triton")
    expected = rms_norm_reference(x, w, cast=cast)
    assert_close(y, expected, terms=N)
    if dtype != torch.float32:
        assert (y != expected).double().mean() < 0.01
        return
    assert_same_function(
        lambda x, w: rms_norm(x, w, cast=cast, backend="triton"),
        lambda x, w: rms_norm_reference(x, w, cast=cast),
        [x, w],
        terms=N,
    )


@pytest.mark.parametrize("N", [64, 9000])
def test_statistics_are_kept_in_float32(N):
    """D1 18."""
    x, r, w, b = tensors(3, N, torch.bfloat16, torch.bfloat16)
    op = torch.ops.brickwork.add_norm_triton
    _, s, rstd, mean = op(x, r, w, b, 1e-5, True, False, torch.bfloat16)
    wide = s.float()
    assert rstd.dtype == mean.dtype == torch.float32
    assert_close(mean, wide.mean(-1), terms=N, scale=1.0)
    assert_close(rstd, torch.rsqrt(wide.var(-1, correction=0) + 1e-5), terms=N)


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
    """D1 7, D1 8, D1 9: every operand and every incoming gradient with every kind of strides."""
    options = {"eps": 1e-5, "residual_dtype": torch.float32}
    _, r, w, b = tensors(3, N)
    wide = torch.randn(2 * N)
    for x, dy, ds in zip(lattice(3, N), rotated(lattice(3, N), 1), rotated(lattice(3, N), 3)):
        for inputs in ([x, r, w, b], [r, x, wide[::2], w[:1].expand(N)]):
            results = []
            for backend in ("triton", "torch"):
                leaves = [t.detach().requires_grad_() for t in inputs]
                outputs = run(backend, kind="layer", **options)(*leaves)
                results.append([*outputs, *torch.autograd.grad(outputs, leaves, [dy, ds])])
            for found, expected in zip(*results):
                assert_close(found, expected, terms=N)


def rotated(tensors, by):
    every = list(tensors)
    return every[by:] + every[:by]


def test_leading_axes():
    x, w = torch.randn(2, 3, 4, 20), torch.randn(20)
    for shaped in (x, x.transpose(1, 2), x[:, 1], x[0, 0, 0], x.permute(2, 0, 1, 3)):
        y = rms_norm(shaped, w, backend="triton")
        assert_close(y, rms_norm_reference(shaped, w), terms=20)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (0,), (3, 0)])
def test_empty(shape):
    """D1 23, D1 24: no launch, the right shapes, weights' gradients of 0."""
    x, r = torch.empty(shape, requires_grad=True), torch.empty(shape, requires_grad=True)
    w, b = (torch.ones(shape[-1], requires_grad=True) for _ in range(2))
    y, s = add_norm(x, r, w, b, kind="layer", residual_dtype=torch.float32, backend="triton")
    assert y.shape == s.shape == shape
    grads = torch.autograd.grad([y, s], [x, r, w, b], [torch.ones(shape)] * 2)
    assert [g.shape for g in grads] == [shape, shape, w.shape, b.shape]
    assert not grads[2].any()
    assert not grads[3].any()


@pytest.mark.parametrize("used", ["y", "residual"])
def test_one_result_alone_has_its_gradients(used):
    """D1 10: the residual's gradient is added once, and is all there is where y is not used."""
    inputs = tensors(4, 40)
    assert_same_function(
        lambda *t: getattr(run("triton")(*t), used),
        lambda *t: getattr(run("torch")(*t), used),
        inputs if used == "y" else [inputs[0], inputs[1], inputs[2].detach(), None],
        terms=40,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("M", "N"), [(40, 40), (5, 600), (3, 8200)])
def test_behaves(dtype, M, N):
    """D1 1, D1 2, D1 3, D1 4, D1 5, D1 28."""
    options = {"kind": "layer", "residual_dtype": torch.float32}
    assert_well_behaved(run("triton", **options), tensors(M, N, dtype))
    x, _, w, _ = tensors(M, N, dtype)
    assert_well_behaved(lambda x, w: rms_norm(x, w, backend="triton"), [x, w])


def test_the_ops_are_well_registered():
    """D1 28."""
    x, r, w, b = (t.requires_grad_() for t in tensors(4, 24, torch.bfloat16))
    op = torch.ops.brickwork.add_norm_triton.default
    torch.library.opcheck(op, (x, r, w, b, 1e-5, True, True, torch.float32))
    torch.library.opcheck(op, (x, None, w, None, 1e-5, False, False, None))
    y, s, rstd, mean = (t.detach() for t in op(x, r, w, b, 1e-5, True, True, torch.float32))
    backward = torch.ops.brickwork.add_norm_triton_backward.default
    arguments = (y, s, s, w.detach(), b.detach(), rstd, mean, torch.float32, True, True)
    torch.library.opcheck(backward, arguments)


def test_one_compilation_for_any_number_of_rows():
    """D1 21: rows are an argument of the kernel, not a constant."""
    for kernel in (launches.norm_forward, launches.norm_backward, launches.norm_backward_tiled):
        assert "M" in kernel.arg_names
        assert kernel.fn.__annotations__.get("M") is None


def test_a_graph_serves_every_number_of_rows():
    w = torch.randn(24)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda x, w: rms_norm(x, w, backend="triton"), fullgraph=True, backend=backend, dynamic=True
    )
    for M in (2, 3, 70):
        x = torch.randn(M, 24)
        assert torch.equal(compiled(x, w), rms_norm(x, w, backend="triton"))
    assert len(graphs) == 1


@pytest.mark.parametrize("N", [64, 512, 9000, 33000])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16])
def test_bytes(N, residual):
    """What the launcher's docstring states, and nothing is fetched from memory twice."""
    M, b = (10 if N < 1000 else 3), 2
    x, r, w, _ = tensors(M, N, torch.bfloat16, residual or torch.float32)
    r = r if residual else None
    size = residual.itemsize if residual else 0
    kept = (*(t.requires_grad_() for t in (x, w)), r if r is None else r.requires_grad_())
    with count_bytes() as moved:
        if r is None:
            outputs = [rms_norm(x, w, backend="triton")]
        else:
            outputs = list(add_norm(x, r, w, residual_dtype=residual, backend="triton"))
    assert moved.read == M * N * (b + size) + N * b
    assert moved.stored == moved.written == M * N * (b + size) + 4 * M
    if N <= 16384:
        assert moved.loaded - moved.read == (launches_of_forward(M, N) - 1) * N * b
    upstream = [torch.randn_like(o) for o in outputs]
    leaves = [t for t in kept if t is not None]
    with count_bytes() as moved:
        torch.autograd.grad(outputs, leaves, upstream)
    shape = launches.backward_shape(N, size or b)
    groups = -(-M // shape.rows)
    programs = min(groups, 16 // shape.warps)
    grown = 0 if shape.whole else min(groups - programs, programs)
    assert moved.read == M * N * (b + 2 * size if size else 2 * b) + 4 * M + N * b + 4 * N * grown
    assert moved.written == M * N * (b + (size if size > b else 0)) + 4 * N * programs


def launches_of_forward(M, N):
    shape = launches.forward_shape(N, narrow=False)
    return -(-M // shape.rows)


@pytest.mark.parametrize("operand", ["x", "residual", "dy", "ds"])
def test_rows_past_two_to_the_31_elements(operand):
    """D1 12."""
    apart = sparse_tensor((4, 2**30), torch.bfloat16)[:, :64]
    apart.copy_(torch.randn(4, 64))
    x, r, w, _ = tensors(4, 64, torch.bfloat16, torch.bfloat16)
    x, r = (apart if operand == name else t for name, t in (("x", x), ("residual", r)))
    dy, ds = (apart if operand == name else x for name in ("dy", "ds"))
    results = []
    for compact in (False, True):
        leaves = [(t.contiguous() if compact else t).detach().requires_grad_() for t in (x, r, w)]
        outputs = add_norm(*leaves, backend="triton")
        upstream = [t.detach().contiguous() if compact else t.detach() for t in (dy, ds)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_wide_rows_keep_their_variance():
    """Merged tile by tile: a mean far from 0 does not swallow it."""
    x = torch.randn(2, 40000) + 1000
    w, b = torch.ones(40000), torch.zeros(40000)
    y = add_norm(x, None, w, b, kind="layer", backend="triton").y
    expected = add_norm_reference(x.double(), None, w, b, kind="layer").y.float()
    assert_close(y, expected, terms=4, scale=1000.0)


def test_huge_and_tiny_values():
    """N3: squares of float16 values do not overflow; zero rows give zeros, and finite gradients."""
    w = torch.ones(64)
    x = torch.full((2, 64), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, w, backend="triton"), torch.ones_like(x))
    zeros = torch.zeros(2, 64, requires_grad=True)
    y = rms_norm(zeros, w, backend="triton")
    (grad,) = torch.autograd.grad(y.sum(), zeros)
    assert not y.any()
    assert_close(grad, torch.full_like(zeros, 1e3), terms=1)


def test_nan_stays_in_its_row():
    x, _, w, _ = tensors(20, 64)
    expected = rms_norm(x, w, backend="triton")
    x[3, 5] = torch.nan
    y = rms_norm(x, w, backend="triton")
    assert y[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(y[others], expected[others])


def test_autocast_changes_nothing():
    """D1 19."""
    x, r, w, b = tensors(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y, s = run("triton", kind="layer")(x, r, w, b)
    expected = run("triton", kind="layer")(x, r, w, b)
    assert torch.equal(y, expected.y)
    assert torch.equal(s, expected.residual)


def test_the_interpreter_runs_on_request_only():
    x, _, w, _ = tensors(2, 8)
    assert torch.equal(rms_norm(x, w), rms_norm_reference(x, w))
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(launches, "_add_norm", lambda *a: calls.append(a) or [x] * 4)
        rms_norm(x, w)
        add_norm(x, x, w)
        assert not calls
        with prefer("triton"):
            rms_norm(x, w)
            add_norm(x, x, w)
        assert len(calls) == 2


def test_what_it_refuses():
    x, r, w, b = tensors(2, 8)
    with pytest.raises(
        BackendUnavailable, match="it takes float32, bfloat16, float16, got float64"
    ):
        rms_norm(x.double(), w, backend="triton")
    with pytest.raises(BackendUnavailable, match="got float64"):
        add_norm(x, r, w.double(), backend="triton")
    with pytest.raises(BackendUnavailable, match="it has no float64"):
        add_norm(x, r, w, residual_dtype=torch.float64, backend="triton")
    with pytest.raises(BackendUnavailable, match="transforms differentiate and batch plain"):
        torch.func.vmap(lambda x: rms_norm(x, w, backend="triton"))(x)
    with prefer("triton"):  # where it cannot, `auto` goes on
        assert rms_norm(x.double(), w).dtype == torch.float64
        torch.func.grad(lambda x: rms_norm(x, w).sum())(x)
    with pytest.raises(ValueError, match=r"weight must have shape \(C,\)"):
        rms_norm(x, b[:7], backend="triton")
