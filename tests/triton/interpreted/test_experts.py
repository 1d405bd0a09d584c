"""The experts' Triton kernels, interpreted: values and every gradient against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import count_bytes, only_programs, sparse_tensor
from problems import experts_problem as problem
from support import assert_close, assert_same_function, gradients
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import experts_triton as kernels
from brickwork.kernels import experts_triton_launch as launch
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.experts import experts, experts_reference
from brickwork.kernels.experts_grouped import Groups, sort_by_expert

NAMES = ("x", "gate_up", "down", "indices", "weights")
NARROW = (torch.bfloat16, torch.float16)
# (tokens, width, hidden, experts, chosen): a tile has 16, 64 or 128 rows where widths are multiples
# of 8, else 32; 64 or 128 columns; 16 to 64 terms are added up at a time.
SIZES = [
    (1, 1, 1, 1, 1),
    (3, 31, 33, 2, 2),
    (33, 64, 65, 2, 1),
    (63, 15, 63, 1, 1),
    (15, 16, 8, 1, 1),
    (17, 32, 64, 2, 1),
    (20, 72, 136, 3, 1),
    (64, 8, 128, 1, 1),
    (40, 136, 56, 3, 2),
    (97, 128, 64, 2, 2),
]


def run(*t):
    return experts(*t, backend="triton")


def require_grad(inputs):
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    return inputs


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(size):
    """D4 54, 78: rows and widths on either side of every tile, no multiple of anything needed."""
    assert_same_function(run, experts_reference, problem(*size), terms=256)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rows", [127, 128, 129, 257])
def test_narrow_dtypes(dtype, rows):
    """Products of narrow numbers, added up in float32; tiles of 128 rows."""
    inputs = problem(rows, 72, 136, 1, 1, dtype=dtype)
    assert launch.plan_of(*inputs[:4]).BM == 128
    check_narrow(inputs)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("size", [(5, 9, 7, 3, 2), (70, 40, 64, 2, 1)])
def test_narrow_dtypes_in_small_tiles(dtype, size):
    check_narrow(problem(*size, dtype=dtype))


def check_narrow(inputs):
    dtype = inputs[0].dtype
    values, grads = gradients(run, inputs)
    wide = [t if t.dtype == torch.int64 else t.float() for t in inputs]
    expected, expected_grads = gradients(experts_reference, wide)
    assert values[0].dtype == dtype
    assert_close(values[0], expected[0], terms=16, compute=dtype)
    for name, t, grad, want in zip(NAMES, inputs, grads, expected_grads):
        if want is not None:
            assert grad.dtype == t.dtype
            assert_close(grad, want, terms=64, compute=dtype, name=name)


def test_sums_are_float32():
    """Many equal small terms: a narrower sum would stop growing."""
    x = torch.full((1, 4096), 2.0**-6, dtype=torch.bfloat16)
    gate_up = torch.ones(1, 16, 4096, dtype=torch.bfloat16)  # gate = up = 64
    down = torch.full((1, 8, 8), 2.0**-12, dtype=torch.bfloat16)
    y = run(x.expand(1, 4096), gate_up, torch.cat([down] * 512, 1), *choice(16))
    assert torch.equal(y, torch.full_like(y, 128.0))  # 16 times 8 · 64² / 4096


def choice(times):
    return torch.zeros(1, times, dtype=torch.int64), torch.ones(1, times)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_activation_is_that_of_what_is_kept(dtype):
    """Gate and up are rounded before they are used, so that the backward pass starts from the same
    numbers."""
    x, gate_up, down, indices, _ = problem(40, 64, 64, 1, 1, dtype=dtype)
    p = launch.plan_of(x, gate_up, down, indices)
    activation, both = launch.gate_up_rows(x, gate_up, p, 1, True)
    gate, up = both.float().chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    assert (activation == expected).float().mean() > 0.99


def test_mixed_dtypes_compute_in_the_widest():
    """D1 29: float32 x to bfloat16 experts, float16 weights."""
    x, gate_up, down, indices, weights = problem()
    inputs = [x, gate_up.bfloat16(), down.bfloat16(), indices, weights.half()]
    assert_same_function(run, experts_reference, inputs, terms=256)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast(x_dtype, weight_dtype):
    """D4 75: every mixture runs forward and backward and keeps x's dtype."""
    x, gate_up, down, indices, weights = problem(20)
    leaves = [x.to(x_dtype), gate_up.to(weight_dtype), down.to(weight_dtype), weights]
    require_grad(leaves)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(*leaves[:3], indices, leaves[3])
    assert y.dtype == x_dtype
    narrow = run(*(t.bfloat16() for t in leaves[:3]), indices, leaves[3])
    assert torch.equal(y.bfloat16(), narrow)
    expected = experts_reference(x, gate_up, down, indices, weights)
    assert_close(y, expected, terms=64, compute=torch.bfloat16)
    y.sum().backward()
    assert all(t.grad.dtype == t.dtype and t.grad.isfinite().all() for t in leaves)


def test_tf32_only_where_pytorch_may_use_it(monkeypatch):
    assert launch.precision(torch.float32) == "ieee"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert launch.precision(torch.float32) == "tf32"
        assert launch.precision(torch.bfloat16) == "ieee"
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert launch.precision(torch.float32) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


STRIDES = {
    "contiguous": lambda t: t.clone(),
    "sliced": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.mT.contiguous().mT,
    "stepped": lambda t: torch.stack((t, t), -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("size", [(9, 24, 16, 3, 2), (9, 7, 5, 3, 2)])
def test_strides(stride, size):
    """D1 7, 8, 9: of every argument and of the incoming gradient."""
    inputs = [STRIDES[stride](t) for t in problem(*size)]
    inputs[3] = inputs[3].int()
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    y, expected = run(*leaves), experts_reference(*leaves)
    assert_close(y, expected, terms=64)
    floats = [t for t in leaves if t.requires_grad]
    upstream = STRIDES[stride](torch.randn_like(y))
    for one, other in zip(*(torch.autograd.grad(o, floats, upstream) for o in (y, expected))):
        assert_close(one, other, terms=256)


def test_strides_too_far_apart_for_a_tile():
    """Rows of an expert 2^27 numbers apart: copied, so that 32 bits do within a tile."""
    x, gate_up, down, indices, weights = problem(5, 6, 3, 2, 1)
    vast = sparse_tensor((6, 2, 2**26), torch.float32)
    vast[:, :, :6] = gate_up.transpose(0, 1)
    far = vast[:, :, :6].transpose(0, 1)
    assert far.stride(1) == 2**27
    assert launch.near(far).is_contiguous()
    near = gate_up.mT
    assert launch.near(near) is near
    assert_close(run(x, far, down, indices, weights), run(x, gate_up, down, indices, weights))


def test_no_tokens_no_choices_no_width_inside():
    """D1 23, D4 56, 81: right shapes, zero gradients, in the graph."""
    for sizes in ((0, 6, 5, 4, 2), (7, 6, 5, 4, 0), (7, 6, 0, 4, 2)):
        inputs = problem(*sizes)
        values, grads = gradients(run, inputs)
        assert torch.equal(values[0], torch.zeros(sizes[0], 6))
        for t, grad in zip(inputs, grads):
            assert grad is None or (grad.shape == t.shape and (grad == 0).all())


@pytest.mark.parametrize("used", [1, 2])
def test_idle_experts_get_zeros(used):
    """D4 53, 54: an expert without rows has a gradient, and it is zero."""
    inputs = problem(20, 8, 8, 6, 1, used=used)
    _, grads = gradients(run, inputs)
    for grad in (grads[1], grads[2]):
        assert (grad[used:] == 0).all()
        assert grad[:used].abs().sum() > 0


def test_an_expert_not_chosen_touches_nothing():
    """D4 52: zero times NaN must not reach another expert's tokens or gradients."""
    inputs = problem(used=3)
    expected, expected_grads = gradients(run, inputs)
    for bad in (float("nan"), float("inf"), 3e38):
        poisoned = [t.clone() for t in inputs]
        poisoned[1][3] = bad
        poisoned[2][3] = bad
        values, grads = gradients(run, poisoned)
        assert torch.equal(values[0], expected[0])
        for grad, want in zip(grads, expected_grads):
            if want is not None:
                assert torch.equal(*((grad[:3], want[:3]) if want.ndim == 3 else (grad, want)))


def test_a_token_touches_no_other_token():
    """D4 52: rows of one tile do not mix, forward or backward."""
    inputs = problem(9, 8, 8, 1, 1)
    expected, expected_grads = gradients(run, inputs)
    poisoned = [t.clone() for t in inputs]
    poisoned[0][4] = float("nan")
    values, grads = gradients(run, poisoned)
    others = torch.arange(9) != 4
    assert torch.equal(values[0][others], expected[0][others])
    assert torch.equal(grads[0][others], expected_grads[0][others])


def test_all_experts_chosen_and_one_chosen_twice():
    x, gate_up, down, _, weights = problem(6, 8, 8, 4, 4)
    every = torch.stack([torch.randperm(4) for _ in x])
    same = torch.full_like(every, 2)
    for indices in (every, same):
        inputs = [x, gate_up, down, indices, weights]
        assert_same_function(run, experts_reference, inputs, terms=256)
    once = run(x, gate_up, down, same[:, :1], weights.sum(1, keepdim=True))
    assert_close(run(x, gate_up, down, same, weights), once, terms=64)


@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=9), BM=st.sampled_from([16, 32, 64])
)
def test_tiles_cover_every_row_once(counts, BM):
    experts_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    if len(experts_of) == 0:
        return
    shuffled = experts_of[torch.randperm(len(experts_of))][:, None]
    p = launch.plan(shuffled, len(counts), BM, True)
    rows = []
    for t, e in enumerate(p.expert_of_tile.tolist()):
        if e == len(counts):
            continue
        first = p.tile_ends[e - 1].item() if e else 0
        start = p.groups.ends[e].item() - counts[e] + (t - first) * BM
        rows += range(start, min(start + BM, p.groups.ends[e].item()))
    assert rows == list(range(len(experts_of)))
    assert p.tiles == len(p.expert_of_tile) <= -(-len(experts_of) // BM) + len(counts)


def test_second_backward_is_equal_and_nothing_is_written():
    """D1 1 to 4: inputs and the incoming gradient stay as they are."""
    inputs = require_grad(problem())
    before = [t.detach().clone() for t in inputs]
    y = run(*inputs)
    leaves = [t for t in inputs if t.requires_grad]
    upstream = torch.randn_like(y)
    kept = upstream.clone()
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(upstream, kept)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


def test_second_derivative_raises():
    """D1 5: also where the first is one term of a larger sum."""
    inputs = require_grad(problem())
    (grad,) = torch.autograd.grad(run(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"experts_triton is differentiable once; .*prefer"):
        (grad.square().sum() + inputs[1].sum()).backward()


def test_runs_are_bitwise_equal_and_training_equals_inference():
    inputs = problem(40, 8, 8, 3, 2, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [gradients(run, inputs) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(runs[0][0] + runs[0][1], runs[1][0] + runs[1][1]):
        assert a is b is None or torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(run(*inputs), runs[0][0][0])


@pytest.mark.parametrize("leaves", [("x",), ("gate_up",), ("down",), ("weights",), ("x", "down")])
def test_only_wanted_gradients_are_computed(leaves):
    inputs = problem()
    _, everything = gradients(experts_reference, inputs)
    for name, t in zip(NAMES, inputs):
        t.requires_grad_(name in leaves)
    y = run(*inputs)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    for name, t, want in zip(NAMES, inputs, everything):
        assert (t.grad is not None) == (name in leaves)
        if t.grad is not None:
            assert_close(t.grad, want, terms=64, name=name)


def test_registered_ops():
    inputs = require_grad(problem())
    forward, backward = kernels.experts_forward, kernels.experts_backward
    torch.library.opcheck(forward, (*inputs, torch.float32, True))
    torch.library.opcheck(forward, (*inputs, torch.bfloat16, False))
    with torch.no_grad():
        y, both, order = forward(*inputs, torch.float32, True)
    for wanted in ([True] * 4, [False, True, False, False]):
        args = (y, *(t.detach() for t in inputs), both, order, wanted)
        torch.library.opcheck(backward, args)


def test_a_graph_made_without_knowing_that_a_gradient_is_wanted():
    """What the forward pass did not keep is computed again."""
    inputs = require_grad(problem())
    y = kernels.experts_forward(*inputs, torch.float32, False)[0]
    expected = run(*inputs)
    leaves = [t for t in inputs if t.requires_grad]
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), leaves) for o in (y, expected))):
        assert torch.equal(a, b)


def test_compiles_to_one_graph_and_stays_right_for_other_routings():
    """D1 28, D4 79."""
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (7, 9):
        assert_same_function(compiled, run, problem(tokens), terms=64)


def test_checkpoint():
    """D4 62, 63: recomputation saves what the forward pass saved, and routes the same."""
    assert_same_function(
        lambda *t: checkpoint(run, *t, use_reentrant=False), run, problem(), terms=1
    )


def test_choice_of_backend(monkeypatch):
    """Interpreted kernels run where they are asked for, and nothing falls back when named."""
    ran = []
    monkeypatch.setattr(
        kernels, "experts_triton", lambda *t: ran.append("triton") or experts_reference(*t)
    )
    inputs = problem()
    experts(*inputs)
    assert not ran
    with prefer("triton"):
        experts(*inputs)
        experts(*(t.double() if t.is_floating_point() else t for t in inputs))
    run(*inputs)
    assert ran == ["triton", "triton"]
    with pytest.raises(BackendUnavailable, match="it takes float32, bfloat16, float16, got flo"):
        run(inputs[0].double(), *inputs[1:])
    wide = torch.empty(4, 2, 2**23 + 1, device="meta")
    with pytest.raises(BackendUnavailable, match="it takes widths up to 8388608, got 8388609"):
        run(wide[0, :, :], wide, wide.mT[..., :1], inputs[3][:2], inputs[4][:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(dtype):
    """What the docstrings of the launches say: every program's loads, and nothing stored twice."""
    S, C, F, E, K, b = 30, 72, 136, 3, 2, dtype.itemsize
    x, gate_up, down, indices, weights = problem(S, C, F, E, K, dtype=dtype, used=2)
    p = launch.plan_of(x, gate_up, down, indices)
    N, BM, order = S * K, p.BM, p.groups.order
    assert BM == 16
    full = -(-p.groups.counts // BM)
    R = int(full.sum())
    used = int((p.groups.counts > 0).sum())
    places = {"loaded": 0}

    def check(moved, *, loaded, least, stored):
        index = places["loaded"]
        assert (moved.loaded - index, moved.read) == (loaded, least)
        assert moved.stored == moved.written == stored

    def launches(columns):
        """Loads of places: the tiles' experts, and for those with rows where they are."""
        first = int((p.expert_of_tile == 0).sum())
        return 8 * columns * (p.tiles + R + 2 * (R - first))

    def tables():
        return 8 * (p.tiles + 2 * used - 1)

    f = -(-F // 64)
    with count_bytes() as moved:
        activation, both = launch.gate_up_rows(x, gate_up, p, K, True)
    places["loaded"] = launches(f) + 8 * f * N
    least = b * (S * C + used * 2 * F * C) + 8 * N + tables()
    check(moved, loaded=b * C * (f * N + 2 * F * R), least=least, stored=3 * b * N * F)

    j = -(-C // 128)
    with count_bytes() as moved:
        out = launch.rows_by_expert(activation, down.mT, p)
    places["loaded"] = launches(j)
    least = b * (N * F + used * C * F) + tables()
    check(moved, loaded=b * F * (j * N + C * R), least=least, stored=b * N * C)

    with count_bytes() as moved:
        launch.combine(out, p.groups.place, weights, torch.empty_like(x))
    places["loaded"] = (8 + b) * N
    check(moved, loaded=b * N * C, least=b * N * C + (8 + b) * N, stored=b * S * C)

    with count_bytes() as moved:
        grad_both, scaled, _ = launch.activation_grad(x, down, both, weights, p)
    places["loaded"] = launches(f) + (8 + b) * f * N
    check(
        moved,
        loaded=b * C * (f * N + F * R) + 2 * b * N * F,
        least=b * (S * C + used * C * F + 2 * N * F) + (8 + b) * N + tables(),
        stored=3 * b * N * F + 4 * f * N,
    )

    tile = launch.weight_tile(dtype, True)
    with count_bytes() as moved:
        launch.weight_grad(grad_both, x, p, K, torch.empty_like(gate_up), gather_left=False)
    tiles = -(-2 * F // tile.BM) * -(-C // tile.BN)
    places["loaded"] = 8 * tiles * (N + 2 * E - 1)
    check(
        moved,
        loaded=b * N * (-(-C // tile.BN) * 2 * F + -(-2 * F // tile.BM) * C),
        least=b * (N * 2 * F + S * C) + 8 * (N + E),
        stored=b * E * 2 * F * C,
    )
    assert len(order) == N
    assert scaled.shape == (N, F)


def test_offsets_past_two_to_the_31_in_the_experts():
    """D4 76: expert times hidden times width."""
    x, gate_up, down, indices, weights = problem(6, 8, 8, 3, 1)
    vast = [sparse_tensor((3, 2**30, 1), torch.float32) for _ in range(2)]
    far_gate_up = vast[0].as_strided(gate_up.shape, (2**30 + 8, 8, 1)).copy_(gate_up)
    far_down = vast[1].as_strided(down.shape, (2**30 + 8, 8, 1)).copy_(down)
    inputs = [x, gate_up, down, indices, weights]
    values, grads = gradients(run, inputs)
    leaf = x.clone().requires_grad_()
    y = run(leaf, far_gate_up, far_down, indices, weights)
    assert_close(y, values[0], terms=8)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    assert_close(torch.autograd.grad(y, leaf, upstream)[0], grads[0], terms=8)
    p = launch.plan_of(x, gate_up, down, indices)
    vast[0].as_strided(gate_up.shape, (2**30 + 8, 8, 1)).zero_()
    both = torch.randn(6, 16)
    launch.weight_grad(both, x, p, 1, far_gate_up, gather_left=False)
    launch.weight_grad(both, x, p, 1, gate_up, gather_left=False)
    assert torch.equal(far_gate_up, gate_up)


def test_offsets_past_two_to_the_31_in_the_rows(monkeypatch):
    """D1 12, D4 76: sorted row times width, in every kernel, and token times width."""
    monkeypatch.setattr(launch, "_empty", lambda like, *shape: like.new_empty(shape))
    C = F = 2**11
    N = 2**31 // C + 7
    x = sparse_tensor((N, C), torch.bfloat16)
    rows = torch.randn(3, C).bfloat16()
    x[-3:] = rows
    gate_up, down = (torch.randn(2, n, C).bfloat16() / 32 for n in (2 * F, F))
    order = torch.arange(N)
    ends = torch.tensor([N - 3, N])
    groups = Groups(order, order, order[:, None], ends.diff(prepend=ends[:1]), ends)
    p = launch.Plan(groups, 16, True, 1, torch.tensor([1]), torch.tensor([0, 1]))
    small = sort_by_expert(torch.ones(3, 1, dtype=torch.int64), 2)
    q = launch.Plan(small, 16, True, 1, torch.tensor([1]), torch.tensor([0, 1]))
    weights = torch.rand(N, 1)
    last = slice(-64, None)  # the columns of one program

    with only_programs(-1):
        activation, both = launch.gate_up_rows(x, gate_up, p, 1, True)
        want, want_both = launch.gate_up_rows(rows, gate_up, q, 1, True)
        assert torch.equal(activation[-3:, last], want[:, last])
        assert torch.equal(both[-3:, last], want_both[:, last])
        out = launch.rows_by_expert(x, down, p)
        assert torch.equal(out[-3:, last], launch.rows_by_expert(rows, down, q)[:, last])
        both[-3:] = want_both[:] = torch.randn(3, 2 * F)
        got = launch.activation_grad(x, down, both, weights, p)
        want = launch.activation_grad(rows, down, want_both, weights[-3:], q)
        assert torch.equal(got[0][-3:, last], want[0][:, last])
        assert torch.equal(got[1][-3:, last], want[1][:, last])
        grad, want = torch.zeros(2, 2, F, C, dtype=torch.bfloat16)
        for left in (False, True):
            launch.weight_grad(x, x, p, 1, grad, gather_left=left)
            launch.weight_grad(rows, rows, q, 1, want, gather_left=left)
            assert torch.equal(grad[1, last, last], want[1, last, last])
            assert grad[1, last, last].abs().sum() > 0
        y = launch.combine(x, groups.place, weights, sparse_tensor((N, C), torch.bfloat16))
        assert torch.equal(y[-3:], (weights[-3:] * rows).bfloat16())
