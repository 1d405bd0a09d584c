"""What is special to the compiled experts; `test_experts.py` asks them what all backends owe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import experts_problem as problem
from support import assert_close, gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import cpu_extension, experts_cpu
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.experts import experts, experts_reference

pytestmark = pytest.mark.skipif(
    experts_cpu.unavailable_here() is not None, reason=str(experts_cpu.unavailable_here())
)

AROUND_A_BLOCK = [1, 2, 6, 7, 13, 14, 15, 29]
AROUND_A_VECTOR = [1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 65]


def compiled(*inputs):
    return experts(*inputs, backend="cpu")


def check(inputs, terms=256):
    """Values and every gradient against the reference, the latter in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    values, grads = gradients(compiled, inputs)
    expected, expected_grads = gradients(experts_reference, wide)
    for a, e in zip(values + grads, expected + expected_grads):
        assert (a is None) == (e is None)
        if a is not None:
            assert_close(a, e, terms=terms)


@given(
    tokens=st.sampled_from(AROUND_A_BLOCK),
    width=st.sampled_from(AROUND_A_VECTOR),
    hidden=st.sampled_from(AROUND_A_VECTOR),
    num_experts=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_around_every_border(tokens, width, hidden, num_experts, dtype):
    """Rows and columns one below, at and above what a block and a vector hold."""
    check(
        problem(
            tokens=tokens, width=width, hidden=hidden, num_experts=num_experts, dtype=dtype, top_k=1
        )
    )


@pytest.mark.parametrize("tokens", [251, 252, 253, 256, 257, 800])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_rows_of_one_expert(tokens, dtype):
    """More rows than a task takes at once, and than the gradient of a weight sums in registers."""
    check(problem(tokens=tokens, width=35, hidden=18, num_experts=1, top_k=1, dtype=dtype), 1024)


def test_uneven_experts():
    """One expert with nearly all rows, some with one, some with none."""
    inputs = problem(tokens=300, width=40, hidden=24, num_experts=9, top_k=2)
    inputs[3][:] = 4
    inputs[3][7, 0], inputs[3][8, 1], inputs[3][299] = 0, 8, 1
    check(inputs, 1024)


def test_every_expert_for_every_token():
    inputs = problem(tokens=20, width=16, hidden=32, num_experts=6, top_k=6)
    inputs[3] = torch.stack([torch.randperm(6) for _ in range(20)])
    check(inputs)


@pytest.mark.parametrize("size", [100.0, 1e4, 1e15])
def test_large_gates(size):
    """silu and its slope far out, where the exponential is 0 or would be infinite."""
    x = torch.tensor([[-1.0], [-0.01], [0.01], [1.0]]) * size
    gate_up = torch.tensor([[[1.0], [1e-10]]])
    inputs = [x, gate_up, torch.ones(1, 1, 1), torch.zeros(4, 1).long(), torch.ones(4, 1)]
    check(inputs)


def test_a_bad_token_stays_alone():
    """NaN in one token reaches no other token's result or gradient."""
    inputs = problem(tokens=40, width=20, hidden=20)
    values, grads = gradients(compiled, inputs)
    inputs[0][13] = float("nan")
    poisoned, poisoned_grads = gradients(compiled, inputs)
    others = torch.arange(40) != 13
    assert poisoned[0][13].isnan().all()
    assert torch.equal(poisoned[0][others], values[0][others])
    assert torch.equal(poisoned_grads[0][others], grads[0][others])
    assert torch.equal(poisoned_grads[4][others], grads[4][others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_gets_the_same_bits_in_any_batch(dtype):
    """A sum is not cut by how many rows there are: exact, not only close."""
    inputs = problem(tokens=70, width=40, hidden=24, dtype=dtype)
    x, gate_up, down, indices, weights = inputs
    y = compiled(*inputs)
    for part in (slice(0, 1), slice(5, 20), slice(33, 70)):
        some = compiled(x[part], gate_up, down, indices[part], weights[part])
        assert torch.equal(some, y[part])
    order = torch.randperm(70)
    mixed = compiled(x[order], gate_up, down, indices[order], weights[order])
    assert torch.equal(mixed, y[order])


def test_results_do_not_depend_on_threads():
    """No atomics: the same bits on every run and for every number of threads."""
    inputs = problem(tokens=500, width=40, hidden=70, num_experts=5)
    library = cpu_extension.load("experts_cpu")
    before = torch.get_num_threads()
    found = []
    try:
        for threads, team in [(1, True), (2, True), (7, True), (3, False)]:
            torch.set_num_threads(threads)
            # without the OpenMP runtime of PyTorch: plain threads
            library.brickwork_team_start(cpu_extension._team_start() if team else None)
            values, grads = gradients(compiled, inputs)
            found.append([*values, *(g for g in grads if g is not None)])
    finally:
        torch.set_num_threads(before)
        library.brickwork_team_start(cpu_extension._team_start())
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert torch.equal(a, b)


@pytest.mark.parametrize("which", range(5))
def test_strides(which):
    """Any strides, in every argument; memory that starts anywhere."""
    inputs = problem(tokens=20, width=32, hidden=32)
    expected, expected_grads = gradients(compiled, inputs)
    given_ = inputs[which]
    moved = torch.cat([given_.flatten()[:1], given_.flatten()])[1:].view(given_.shape)
    views = [
        given_.mT.contiguous().mT,
        given_.repeat_interleave(2, -1)[..., ::2],
        given_.repeat_interleave(2, 0)[::2],
        torch.cat([given_, given_], -1)[..., given_.shape[-1] :],
        moved,
    ]
    for view in views:
        arguments = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        arguments[which] = view.detach().requires_grad_(view.is_floating_point())
        y = compiled(*arguments)
        assert torch.equal(y, expected[0])
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        leaves = [t for t in arguments if t.requires_grad]
        grads = torch.autograd.grad(y, leaves, upstream.mT.contiguous().mT)
        for a, e in zip(grads, [g for g in expected_grads if g is not None]):
            assert torch.equal(a, e)


def test_offsets_past_two_to_the_31():
    """Pointer arithmetic in 64 bits, on memory that is mostly not there."""
    step = 2**30 + 3
    try:
        buffer = torch.empty(2 * step + 8)
    except RuntimeError:
        pytest.skip("no address space for the buffer")
    _, gate_up, down, indices, weights = problem(tokens=3, width=6)
    x = buffer.as_strided((3, 6), (step, 1))
    x.copy_(torch.randn(3, 6))
    got = compiled(x, gate_up, down, indices, weights)
    assert torch.equal(got, compiled(x.clone(), gate_up, down, indices, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_float32(dtype):
    narrow = [t.to(dtype) if t.is_floating_point() else t for t in problem(tokens=20)]
    wide = [t.float() if t.is_floating_point() else t for t in narrow]
    y, expected = compiled(*narrow), compiled(*wide)
    assert y.dtype == dtype
    assert torch.equal(y, expected.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(*wide), expected)


def test_indices_out_of_range_are_seen_where_python_cannot_look():
    """In a compiled graph the op itself refuses them, forward and backward."""
    inputs = problem()
    graph = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    graph(*inputs)
    ops = torch.ops.brickwork
    both = ops.experts_cpu(*inputs, True)[1]
    for wrong in (-1, 4, 2**40):
        inputs[3][3, 1] = wrong
        with pytest.raises(ValueError, match=r"indices must be in \[0, 4\), the experts"):
            graph(*inputs)
        with pytest.raises(ValueError, match=r"indices must be in \[0, 4\), the experts"):
            ops.experts_cpu_backward(inputs[0], *inputs, both, [True] * 4)


def test_opcheck():
    forward = torch.ops.brickwork.experts_cpu.default
    backward = torch.ops.brickwork.experts_cpu_backward.default
    inputs = problem()
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    for keep in (True, False):
        torch.library.opcheck(forward, (*inputs, keep))
    bare = [t.detach() for t in inputs]
    y, both = forward(*bare, True)
    for wanted in ([True] * 4, [False, True, False, False]):
        torch.library.opcheck(backward, (y, *bare, both, wanted))


def test_what_was_not_kept_is_computed_again():
    inputs = problem(tokens=20)

    def op(keep):
        return lambda *t: torch.ops.brickwork.experts_cpu(*t, keep)[0]

    for a, b in zip(gradients(op(False), inputs)[1], gradients(op(True), inputs)[1]):
        assert a is b is None or torch.equal(a, b)


def test_checkpoint_gives_the_same_bits():
    inputs = problem(tokens=20)
    again = gradients(lambda *t: checkpoint(compiled, *t, use_reentrant=False), inputs)
    for a, e in zip(again[1], gradients(compiled, inputs)[1]):
        assert a is e is None or torch.equal(a, e)


def test_double_backward_raises():
    inputs = problem()
    x, gate_up = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    (grad,) = torch.autograd.grad(compiled(*inputs).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"'cpu' is differentiable once; .*prefer"):
        torch.autograd.grad(grad.sum(), gate_up)


def test_other_devices_are_refused():
    with FakeTensorMode():
        inputs = [torch.empty_like(t, device="cuda") for t in problem()]
        with pytest.raises(BackendUnavailable, match="it takes CPU tensors, got cuda"):
            compiled(*inputs)
        assert experts(*inputs).device.type == "cuda"


def test_a_default_device_elsewhere_changes_nothing():
    arguments = problem(9, 8, 6, num_experts=3, top_k=2)
    expected = experts(*arguments, backend="cpu")
    with torch.device("meta"), torch.no_grad():
        assert torch.equal(experts(*arguments, backend="cpu"), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own
def test_forward_mode_goes_to_the_reference():
    x, *others = problem(9, 8, 6, num_experts=3, top_k=2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found, expected = (experts(dual, *others, backend=b) for b in ("auto", "torch"))
        tangents = [forward_ad.unpack_dual(y).tangent for y in (found, expected)]
    assert torch.equal(*tangents)
