from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import experts_problem as problem
from support import assert_close, assert_same_function, gradcheck, gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import experts_cpu
from brickwork.kernels import experts_grouped as grouped
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.experts import experts, experts_reference

BACKENDS = ["torch", "grouped", "cpu"]
NAMES = ("x", "gate_up", "down", "indices", "weights")
SIZES = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([0, 1, 2, 7, 33]),
        "width": st.sampled_from([1, 3, 8]),
        "hidden": st.sampled_from([1, 5, 16]),
        "num_experts": st.sampled_from([1, 2, 5, 16]),
        "top_k": st.sampled_from([1, 2, 3]),
    }
)


def by_token(x, gate_up, down, indices, weights):
    """The equation, one token and one choice at a time."""
    rows = []
    for s in range(len(x)):
        row = torch.zeros_like(x[s])
        for k in range(indices.shape[1]):
            e = indices[s, k]
            gate, up = (gate_up[e] @ x[s]).chunk(2)
            row = row + weights[s, k] * (down[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x * 1


@given(sizes=SIZES)
def test_reference_is_the_equation(sizes):
    inputs = problem(**sizes, dtype=torch.float64)
    assert_close(experts_reference(*inputs), by_token(*inputs), terms=64)


@given(sizes=SIZES)
def test_grouped_equals_reference(sizes):
    """M10: values and every gradient, experts without tokens and no tokens at all included."""
    assert_same_function(
        lambda *t: experts(*t, backend="grouped"), experts_reference, problem(**sizes), terms=256
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(dtype, backend):
    inputs = problem(tokens=40, dtype=dtype)
    values, grads = gradients(lambda *t: experts(*t, backend=backend), inputs)
    wide = [t if t.dtype == torch.int64 else t.double() for t in inputs]
    expected, expected_grads = gradients(experts_reference, wide)
    assert values[0].dtype == dtype
    assert_close(values[0], expected[0], terms=16, compute=dtype)
    for name, t, grad, want in zip(NAMES, inputs, grads, expected_grads):
        if want is not None:
            assert grad.dtype == t.dtype
            assert_close(grad, want, terms=64, compute=dtype, name=name)


def test_mixed_dtypes_compute_in_the_widest():
    """M12: float32 x to bfloat16 weights, without autocast."""
    x, gate_up, down, indices, weights = problem()
    mixed = (x, gate_up.bfloat16(), down.bfloat16(), indices, weights)
    for backend in BACKENDS:
        y = experts(*mixed, backend=backend)
        assert y.dtype == torch.float32
        expected = by_token(x, mixed[1].float(), mixed[2].float(), indices, weights)
        assert_close(y, expected, terms=16)
    assert experts(*mixed[:4], weights.double()).dtype == torch.float32


def test_gradcheck_of_the_reference():
    x, gate_up, down, indices, weights = problem(tokens=4, width=3, hidden=2, num_experts=3)
    gradcheck(
        lambda x, g, d, w: experts_reference(x, g, d, indices, w), [x, gate_up, down, weights]
    )


def test_gradcheck_of_grouped():
    inputs = problem(tokens=4, width=3, hidden=2, num_experts=3, dtype=torch.float64)
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    assert torch.autograd.gradcheck(lambda *t: experts(*t, backend="grouped"), inputs)


def test_second_derivative_of_grouped_raises():
    """D1 5: also where the first is one term of a larger sum."""
    inputs = problem()
    x, gate_up = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    y = experts(*inputs, backend="grouped")
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"'grouped' can be differentiated once; .*prefer"):
        (grad.square().sum() + gate_up.sum()).backward()
    with prefer("torch"):
        (grad,) = torch.autograd.grad(experts(*inputs).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert gate_up.grad.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_backward_is_equal_and_nothing_is_written(backend):
    """D1 1 to 4: inputs and the incoming gradient stay as they are."""
    inputs = problem()
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    before = [t.detach().clone() for t in inputs]
    y = experts(*inputs, backend=backend)
    leaves = [t for t in inputs if t.requires_grad]
    upstream = torch.randn_like(y)
    kept = upstream.clone()
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(upstream, kept)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_are_bitwise_equal(backend):
    inputs = problem(tokens=40)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [gradients(lambda *t: experts(*t, backend=backend), inputs) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(runs[0][0] + runs[0][1], runs[1][0] + runs[1][1]):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 2])
def test_idle_experts_get_zeros(backend, tokens):
    """M10, D4 53, 56: the gradient of an expert without tokens is there, and is zero."""
    inputs = problem(tokens=tokens, num_experts=16, top_k=1, used=2)
    _, grads = gradients(lambda *t: experts(*t, backend=backend), inputs)
    by_name = dict(zip(NAMES, grads))
    idle = torch.ones(16, dtype=torch.bool)
    idle[inputs[3].flatten()] = False
    assert idle.sum() >= 14
    for name in ("gate_up", "down"):
        assert (by_name[name][idle] == 0).all()
        assert by_name[name][~idle].abs().sum() > 0 or tokens == 0
    assert by_name["x"].shape == inputs[0].shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_not_chosen_touches_nothing(backend):
    """D4 52: zero times NaN must not reach another expert's tokens or gradients."""
    inputs = problem(used=3)
    expected, expected_grads = gradients(lambda *t: experts(*t, backend=backend), inputs)
    for bad in (float("nan"), float("inf"), 3e38):
        poisoned = [t.clone() for t in inputs]
        poisoned[1][3] = bad
        poisoned[2][3] = bad
        values, grads = gradients(lambda *t: experts(*t, backend=backend), poisoned)
        assert torch.equal(values[0], expected[0])
        for grad, want in zip(grads, expected_grads):
            if want is not None:
                slices = (grad[:3], want[:3]) if want.ndim == 3 else (grad, want)
                assert torch.equal(*slices)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leaves", [("x",), ("gate_up",), ("down",), ("weights",), ("x", "down")])
def test_only_wanted_gradients_are_computed(backend, leaves):
    inputs = problem()
    _, everything = gradients(experts_reference, inputs)
    for name, t in zip(NAMES, inputs):
        t.requires_grad_(name in leaves)
    y = experts(*inputs, backend=backend)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(upstream)
    for name, t, want in zip(NAMES, inputs, everything):
        assert (t.grad is not None) == (name in leaves)
        if t.grad is not None:
            assert_close(t.grad, want, terms=64, name=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_axes_of_no_size(backend):
    """No choices, and experts of no width inside: zeros, with zero gradients."""
    for options in ({"top_k": 0}, {"hidden": 0}):
        inputs = problem(**options)
        values, grads = gradients(lambda *t: experts(*t, backend=backend), inputs)
        assert torch.equal(values[0], torch.zeros(7, 6))
        assert all(g is None or (g == 0).all() for g in grads)


@given(sizes=SIZES, backend=st.sampled_from(BACKENDS))
def test_equivariance(sizes, backend):
    """Tokens may be reordered, experts renamed, batches split."""
    x, gate_up, down, indices, weights = problem(**sizes)

    def run(x, gate_up, down, indices, weights):
        return experts(x, gate_up, down, indices, weights, backend=backend)

    y = run(x, gate_up, down, indices, weights)
    tokens, choices = torch.randperm(len(x)), torch.randperm(indices.shape[1])
    again = run(x[tokens], gate_up, down, indices[tokens], weights[tokens])
    assert_close(again, y[tokens], terms=64)
    again = run(x, gate_up, down, indices[:, choices], weights[:, choices])
    assert_close(again, y, terms=64)
    names = torch.randperm(len(down))
    assert_close(
        run(x, gate_up[names], down[names], names.argsort()[indices], weights), y, terms=64
    )
    cut = len(x) // 3
    parts = [
        run(x[p], gate_up, down, indices[p], weights[p]) for p in (slice(cut), slice(cut, None))
    ]
    assert_close(torch.cat(parts), y, terms=64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_experts_chosen_is_the_dense_mixture(backend):
    x, gate_up, down, _, weights = problem(num_experts=4, top_k=4)
    indices = torch.stack([torch.randperm(4) for _ in x])
    both = torch.einsum("sc,efc->sef", x, gate_up)
    gate, up = both.chunk(2, -1)
    each = torch.einsum("sef,ecf->sec", torch.nn.functional.silu(gate) * up, down)
    dense = torch.zeros(len(x), 4).scatter(1, indices, weights)
    expected = torch.einsum("se,sec->sc", dense, each)
    assert_close(experts(x, gate_up, down, indices, weights, backend=backend), expected, terms=64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_expanded_and_int32(backend):
    """D1 7, 9: any stride of any argument and of the incoming gradient."""
    x, gate_up, down, indices, weights = problem(tokens=6, width=6, hidden=6)
    views = [
        torch.stack((x, x), -1)[..., 0],
        gate_up.mT.contiguous().mT,
        down.mT.contiguous().mT,
        torch.stack((indices, indices), 0).transpose(0, 1)[:, 0].int(),
        weights.t().contiguous().t(),
    ]
    assert_same_function(
        lambda *t: experts(*t, backend=backend), experts_reference, views, terms=64
    )
    row = x[:1].expand(6, 6)
    expected = experts(row.contiguous(), *views[1:], backend=backend)
    assert_close(experts(row, *views[1:], backend=backend), expected, terms=16)
    leaf = x.clone().requires_grad_()
    y = experts(leaf, gate_up, down, indices, weights, backend=backend)
    (ones,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
    assert torch.equal(ones, torch.autograd.grad(y, leaf, torch.ones(6, 6))[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast(backend, x_dtype, weight_dtype):
    """M12, D4 75: every mixture runs forward and backward and keeps x's dtype."""
    x, gate_up, down, indices, weights = problem(tokens=20)
    leaves = [x.to(x_dtype), gate_up.to(weight_dtype), down.to(weight_dtype), weights]
    for t in leaves:
        t.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(*leaves[:3], indices, leaves[3], backend=backend)
    assert y.dtype == x_dtype
    assert_close(y, by_token(x, gate_up, down, indices, weights), terms=64, compute=torch.bfloat16)
    y.sum().backward()
    assert all(t.grad.dtype == t.dtype and t.grad.isfinite().all() for t in leaves)
    with torch.autocast("cpu", torch.bfloat16):
        wide = experts(*(t.double() for t in leaves[:3]), indices, leaves[3], backend=backend)
    assert wide.dtype == torch.float64


def test_grouped_computes_in_the_dtype_of_autocast():
    x, gate_up, down, indices, weights = problem(tokens=20)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, gate_up, down, indices, weights)
    narrow = experts(x.bfloat16(), gate_up.bfloat16(), down.bfloat16(), indices, weights)
    assert torch.equal(y.bfloat16(), narrow)
    assert not torch.equal(y, experts(x, gate_up, down, indices, weights))


def test_the_reference_is_not_changed_by_autocast():
    inputs = problem(tokens=20)
    expected = experts_reference(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(experts_reference(*inputs), expected)


def test_choices_are_sorted_by_expert_and_then_by_token():
    indices = torch.randint(0, 3, (400, 2))
    groups = grouped.sort_by_expert(indices, 4)
    expected = sorted(range(800), key=lambda n: (indices.flatten()[n].item(), n))
    assert groups.order.tolist() == expected
    assert torch.equal(groups.token, groups.order // 2)
    assert torch.equal(groups.order[groups.place].flatten(), torch.arange(800))
    assert groups.counts.tolist() == [(indices == e).sum().item() for e in range(4)]
    assert groups.ends.tolist() == groups.counts.cumsum(0).tolist()


class NoDouble(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            assert not isinstance(t, torch.Tensor) or t.dtype != torch.float64, func
        return out


def test_no_float64_on_float32_input():
    inputs = problem()
    with NoDouble():
        gradients(experts_reference, inputs)
        groups = grouped.sort_by_expert(inputs[3], 4)
        out, both = grouped.forward_by_expert(*inputs[:3], groups, True)
        weight = inputs[4].flatten()[groups.order]
        grouped.backward_by_expert(out[:7], *inputs[:3], groups, weight, both, [True] * 4)


def test_grouped_mm_form_equals_the_loop(monkeypatch):
    """The form for CUDA, run on the CPU: narrow dtypes, gradients not wanted; D4 53: where an
    expert without rows is left with garbage, as on some devices."""
    whole = torch.nn.functional.grouped_mm

    def dirty(a, b, *, offs):
        out = whole(a, b, offs=offs)
        if b.ndim == 2:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", dirty)
    for dtype in (torch.float32, torch.bfloat16):
        x, gate_up, down, indices, weights = problem(
            tokens=30, width=16, hidden=8, num_experts=6, used=4, dtype=dtype
        )
        groups = grouped.sort_by_expert(indices, 6)
        assert groups.counts[4:].tolist() == [0, 0]
        weight = weights.flatten()[groups.order].float()
        grad = torch.randn(30, 16).to(dtype)
        loop = grouped.forward_by_expert(x, gate_up, down, groups, True)
        mm = grouped.forward_by_grouped_mm(x, gate_up, down, groups, True)
        for a, b in zip(loop, mm):
            assert_close(a, b, terms=16, compute=dtype)
        assert grouped.forward_by_grouped_mm(x, gate_up, down, groups, False)[1].numel() == 0
        for wanted in ([True] * 4, [True, False, False, True], [False, True, True, False]):
            given_ = (grad, x, gate_up, down, groups, weight, loop[1], wanted)
            loop_grads = grouped.backward_by_expert(*given_)
            for a, b in zip(loop_grads, grouped.backward_by_grouped_mm(*given_)):
                assert_close(a, b, terms=64, compute=dtype)


def test_grouped_mm_form_reads_nothing_on_the_host():
    """D4 57, 58: fake CUDA tensors raise where a value is looked at."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, gate_up, down, indices, weights = (
            torch.empty_like(t, device="cuda")
            for t in problem(width=16, hidden=8, dtype=torch.bfloat16)
        )
        groups = grouped.sort_by_expert(indices, 4)
        out, both = grouped.forward_by_grouped_mm(x, gate_up, down, groups, True)
        weight = weights.flatten().index_select(0, groups.order).float()
        grads = grouped.backward_by_grouped_mm(
            x, x, gate_up, down, groups, weight, both, [True] * 4
        )
        assert [g.shape for g in grads] == [out.shape, gate_up.shape, down.shape, weight.shape]
        y = experts(x, gate_up, down, indices, weights)
        assert (y.shape, y.device.type, y.dtype) == (x.shape, "cuda", torch.bfloat16)


def test_where_grouped_mm_reaches(monkeypatch):
    """Decided before the call: device, dtype, no tokens, strides, alignment, torch's version."""
    reaches = grouped.grouped_mm_reaches
    x, gate_up, down, indices, _ = problem(width=16, hidden=8, dtype=torch.bfloat16)
    whole = torch.zeros(gate_up.numel() + 1, dtype=torch.bfloat16)
    refused = [
        (x.double(), gate_up.double(), down.double(), indices),
        (x[:0], gate_up, down, indices[:0]),
        (x, gate_up.mT.contiguous().mT, down, indices),
        (x, gate_up, down[..., :4].contiguous(), indices),
        (x, whole[1:].view(gate_up.shape), down, indices),
    ]
    assert reaches(x, gate_up, down, indices)
    assert reaches(x.float(), gate_up.float(), down.float(), indices)
    assert not any(reaches(*t) for t in refused)
    for t in (*refused[:3], refused[4]):  # the other is no valid call
        inputs = [*t, torch.rand(t[3].shape)]
        assert_same_function(
            lambda *u: experts(*u, backend="grouped"),
            experts_reference,
            inputs,
            terms=64,
            compute=t[0].dtype,
        )
    with monkeypatch.context() as old_torch:
        old_torch.delattr(torch.nn.functional, "grouped_mm")
        assert not reaches(x, gate_up, down, indices)

    class Cuda:
        type = "cuda"

    monkeypatch.setattr(torch.Tensor, "device", Cuda())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert reaches(x, gate_up, down, indices)
    assert not reaches(x.float(), gate_up.float(), down.float(), indices)
    assert not any(reaches(*t) for t in refused)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not reaches(x, gate_up, down, indices)


def test_grouped_does_not_depend_on_what_grouped_mm_reaches():
    """The loop and the product give the same at sizes on either side of the rule."""
    for width, hidden in ((16, 8), (16, 7), (15, 8)):
        inputs = problem(tokens=30, width=width, hidden=hidden, num_experts=6, used=4)
        assert_same_function(
            lambda *t: experts(*t, backend="grouped"), experts_reference, inputs, terms=256
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph_and_stays_right_for_other_routings(backend):
    """D1 28, D4 79."""

    def function(*t):
        return experts(*t, backend=backend)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (7, 9, 12):
        assert_same_function(compiled, function, problem(tokens=tokens), terms=64)
    with torch.no_grad():
        inputs = problem()
        assert_close(compiled(*inputs), function(*inputs), terms=64)


def test_registered_ops():
    inputs = problem()
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    torch.library.opcheck(torch.ops.brickwork.experts.default, (*inputs, True))
    with torch.no_grad():
        y, both, order = grouped.experts_forward(*inputs, True)
    for wanted in ([True] * 4, [False, True, False, False]):
        args = (y, *(t.detach() for t in inputs), both, order, wanted)
        torch.library.opcheck(torch.ops.brickwork.experts_backward.default, args)


class Layer(torch.nn.Module):
    def forward(self, *t):
        return experts(*t)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exports_and_traces_for_other_routings():
    """M11: a program made from one batch is right for batches that are routed otherwise."""
    inputs = problem()
    tokens = torch.export.Dim("tokens", min=2)
    shapes = ({0: tokens}, None, None, {0: tokens}, {0: tokens})
    program = torch.export.export(Layer(), tuple(inputs), dynamic_shapes=(shapes,))
    assert not any("brickwork" in str(node.target) for node in program.graph.nodes)
    traced = torch.jit.trace(experts, tuple(inputs), check_trace=False)
    for _ in range(5):
        other = [problem(tokens=11)[i] if i in (0, 3, 4) else inputs[i] for i in range(5)]
        other[4] = torch.rand(11, 2)
        assert_close(program.module()(*other), by_token(*other), terms=64)
        other = problem()
        assert_close(traced(*other), by_token(*other), terms=64)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_grouped_refuses_to_be_recorded():
    inputs = problem()
    with pytest.raises(BackendUnavailable, match=r"experts: .* cannot run here: torch\.jit"):
        torch.jit.trace(lambda *t: experts(*t, backend="grouped"), tuple(inputs))
    with pytest.raises(BackendUnavailable, match=r"torch\.func transforms"):
        torch.func.vmap(lambda x: experts(x, *inputs[1:], backend="grouped"))(inputs[0][None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint(backend):
    """D4 63: recomputation saves what the forward pass saved."""
    inputs = problem()
    assert_same_function(
        lambda *t: checkpoint(lambda *u: experts(*u, backend=backend), *t, use_reentrant=False),
        lambda *t: experts(*t, backend=backend),
        inputs,
    )


def test_transforms():
    _, gate_up, down, _, _ = problem()
    xs, indices, weights = torch.randn(3, 7, 6), torch.randint(0, 4, (3, 7, 2)), torch.rand(3, 7, 2)

    def loss(x, indices, weights):
        return experts(x, gate_up, down, indices, weights).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss))(xs, indices, weights)
    for i in range(3):
        leaf = xs[i].clone().requires_grad_()
        loss(leaf, indices[i], weights[i]).backward()
        assert_close(grads[i], leaf.grad, terms=64)
    batched = torch.vmap(lambda *t: experts(*t, indices[0], weights[0]))
    stacked = batched(xs, gate_up.expand(3, *gate_up.shape), down.expand(3, *down.shape))
    assert_close(stacked[1], experts(xs[1], gate_up, down, indices[0], weights[0]), terms=64)


@pytest.mark.parametrize("backend", ["torch", "grouped", "auto"])
def test_meta(backend):
    inputs = [t.to("meta").requires_grad_(t.is_floating_point()) for t in problem()]
    y = experts(*inputs, backend=backend)
    assert (y.shape, y.device.type) == (inputs[0].shape, "meta")
    y.sum().backward()
    assert inputs[1].grad.shape == inputs[1].shape


def test_choice_of_backend(monkeypatch):
    """On the CPU the compiled kernels where they multiply no wider dtype than need be and can be
    had, else the sorted groups; preferences go first."""
    ran = []

    def note(module, name):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *t: (ran.append(name), run(*t))[1])

    note(grouped, "experts_grouped")
    note(experts_cpu, "experts_cpu")
    inputs = problem()
    x, gate_up, down, indices, weights = inputs
    experts(*inputs)
    experts(*(t.double() if t.is_floating_point() else t for t in inputs))
    experts(x.double(), gate_up, down, indices, weights)
    experts(x, gate_up.bfloat16(), down.bfloat16(), indices, weights)
    with prefer("cpu"), torch.autocast("cpu", torch.bfloat16):
        experts(*inputs)
    assert ran == ["experts_cpu"] * 5
    ran.clear()
    experts(x, gate_up, down, indices, weights.double())
    experts(*(t.bfloat16() if t.is_floating_point() else t for t in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        experts(*inputs)
    with prefer("grouped"):
        experts(*inputs)
    with monkeypatch.context() as no_compiler:
        no_compiler.setattr(experts_cpu, "unavailable_here", lambda: "no compiler")
        experts(*inputs)
        with pytest.raises(BackendUnavailable, match="'cpu' cannot run here: no compiler"):
            experts(*inputs, backend="cpu")
    assert ran == ["experts_grouped"] * 5
    with prefer("torch"):
        experts(*inputs)
    assert len(ran) == 5


def test_errors():
    x, gate_up, down, indices, weights = problem()

    def refused(message, **changed):
        arguments = dict(zip(NAMES, (x, gate_up, down, indices, weights))) | changed
        with pytest.raises(ValueError, match=message):
            experts(*arguments.values())

    refused(r"x must have shape \(S, C\), got \(1, 7, 6\)", x=x[None])
    refused("gate_up must have shape .* with C = 6 as in x, got", gate_up=torch.ones(4, 10, 5))
    refused(
        "gate_up must have twice as many rows as down has columns, 10, got 9",
        gate_up=gate_up[:, 1:],
    )
    refused("down must have shape .* with E = 4 as in gate_up", down=down[:3])
    refused("indices must have shape .* with S = 7 as in x", indices=indices[:3])
    refused("weights must have shape .* with K = 2 as in indices", weights=weights[:, :1])
    refused(r"indices must be int32 or int64, got torch\.float32", indices=indices.float())
    refused(r"indices must be int32 or int64, got torch\.bool", indices=indices > 0)
    refused(r"weights must be floating point, got torch\.int64", weights=indices)
    refused(r"x must be floating point, got torch\.int64", x=x.long())
    for wrong in (-1, 4, 2**40):
        bad = indices.clone()
        bad[3, 1] = wrong
        refused(rf"indices must be in \[0, 4\), the experts, got {wrong}", indices=bad)
    with pytest.raises(BackendUnavailable, match="experts has no backend 'mamba_ssm'"):
        experts(x, gate_up, down, indices, weights, backend="mamba_ssm")
