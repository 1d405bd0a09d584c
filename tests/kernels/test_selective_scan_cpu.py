from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import SCAN_OPTIONS, ScanProblem
from support import assert_close, gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import cpu_extension, selective_scan_cpu
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.selective_scan import selective_scan

pytestmark = pytest.mark.skipif(
    selective_scan_cpu.unavailable_here() is not None,
    reason=str(selective_scan_cpu.unavailable_here()),
)

ALL = frozenset(SCAN_OPTIONS)
# around the vectors (4, 8, 16 channels), the blocks (4 states), the tiles (64 channels)
SIZES = [(1, 1, 1), (3, 2, 1), (15, 3, 1), (16, 4, 2), (17, 5, 1), (66, 16, 2), (130, 17, 1)]
# around the chunks: 64 tokens up to N = 16
LENGTHS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 129]


class Problem(ScanProblem):
    starts = 0.1

    def check(self, dtypes=(torch.float32, torch.float64)):
        """Values and every gradient in each dtype against the float64 reference."""
        wide = [t.double() for t in self.floats]
        values, grads = gradients(self.scan("torch"), wide)
        for dtype in dtypes:
            got, got_grads = gradients(self.scan("cpu"), [t.to(dtype) for t in self.floats])
            for i, (a, e) in enumerate(zip([*got, *got_grads], [*values, *grads])):
                assert a.dtype == dtype
                assert_close(a, e, terms=self.terms, name=f"{dtype} result {i}")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
def test_lengths(T, reverse):
    """mamba#352, mamba#368: lengths that are no multiple of the chunk, with bias and softplus."""
    Problem(2, T, 18, 5, 1, reverse=reverse).check()


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    """mamba PR#547, transformers PR#37533: groups of B and C; mamba#643: any channel count."""
    Problem(2, 66, *size).check()


@pytest.mark.parametrize("reverse", [False, True])
def test_long(reverse):
    Problem(1, 1000, 20, 16, 1, reverse=reverse).check()


def test_many_states():
    """A chunk has more tokens when there are more states."""
    Problem(1, 150, 5, 33, 1).check()
    Problem(1, 260, 3, 70, 1).check()


@given(
    T=st.integers(1, 140),
    size=st.sampled_from(SIZES),
    options=st.sets(st.sampled_from(SCAN_OPTIONS)),
    softplus=st.booleans(),
    reverse=st.booleans(),
)
@settings(max_examples=40)
def test_every_combination(T, size, options, softplus, reverse):
    Problem(1, T, *size, options, softplus=softplus, reverse=reverse).check()


@pytest.mark.parametrize("option", SCAN_OPTIONS)
def test_single_options(option):
    Problem(2, 67, 17, 5, 1, {option}).check()
    Problem(2, 67, 17, 5, 1, ALL - {option}, reverse=True).check()


def test_exponential_within_its_bound():
    exponents = torch.cat([torch.linspace(-100, 80, 300_001), torch.linspace(-0.1, 0.1, 100_001)])
    got = decay(exponents)
    exact = exponents.double().exp()
    bound = (2e-7 + 2e-7 * exponents.double().abs()) * exact
    bound += torch.finfo(torch.float32).smallest_normal
    assert ((got.double() - exact).abs() <= bound).all()


def test_exponential_at_the_ends():
    ends = torch.tensor([-torch.inf, -3e38, -1e5, -200.0, 0.0, 200.0, 1e5, torch.inf, torch.nan])
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, torch.inf, torch.inf, torch.inf, torch.nan])
    torch.testing.assert_close(decay(ends), expected, rtol=0, atol=0, equal_nan=True)
    payload = torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert decay(payload).isnan().all()
    for wide in (decay(ends.double()), decay(torch.tensor([-800.0, 800.0]).double())):
        assert wide[0] == 0
    assert decay(torch.tensor([-700.0, 700.0]).double()).isfinite().all()


def decay(exponents):
    """exp of each exponent, as the state that is left of 1 after one step of size 1."""
    A = exponents[:, None]
    step, nothing = torch.ones_like(A).reshape(1, 1, -1), A.new_zeros(1, 1, 1)
    arguments = (torch.zeros_like(step), step, A, nothing, nothing)
    start = torch.ones_like(A)[None]
    return selective_scan(*arguments, initial_state=start, backend="cpu").final_state.flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reverse", [False, True])
def test_extreme_steps_and_decays(dtype, reverse):
    """mamba PR#574, mamba#353: softplus from -30 to 30 and decays up to exp(-1e6)."""
    p = Problem(1, 130, 16, 5, 1, reverse=reverse)
    p.floats[1] = torch.linspace(-30, 30, 130 * 16).reshape(1, 130, 16)
    p.floats[2] = -(torch.linspace(0, 15, 16 * 5).exp().reshape(16, 5))
    p.check([dtype])


def test_growing_states():
    p = Problem(1, 40, 5, 3, 1)
    p.floats[2] = torch.rand(5, 3) * 0.1
    p.check()


def test_slow_decays_keep_their_memory():
    """Errors of decays near 1 do not pile up over thousands of steps."""
    T, step = 8192, 2.0**-13
    one = torch.ones(1, T, 1)
    y = selective_scan(one, one * step, -one[0, :1], one, one, backend="cpu").y.flatten()
    past = torch.arange(1, T + 1, dtype=torch.float64)
    exact = step * torch.expm1(-step * past) / torch.expm1(torch.tensor(-step).double())
    assert_close(y, exact, terms=T)


@pytest.mark.parametrize("split", [1, 63, 64, 65, 100])
def test_split_anywhere_is_the_whole(split):
    """vLLM PR#22034, mamba#536: a state carried over equals one scan."""
    x, delta, A, B, C = Problem(2, 130, 20, 4, 1, set()).floats
    whole = selective_scan(x, delta, A, B, C, softplus=True, backend="cpu")
    parts, state = [], None
    for at in (slice(0, split), slice(split, None)):
        part = [t[:, at] for t in (x, delta, B, C)]
        y, state = selective_scan(
            *part[:2], A, *part[2:], softplus=True, initial_state=state, backend="cpu"
        )
        parts.append(y)
    assert_close(torch.cat(parts, 1), whole.y, terms=130)
    assert_close(state, whole.final_state, terms=130)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [(64, 64), (1, 63, 65), (30, 100, 2)])
def test_packed_is_separate(lengths, reverse):
    """mamba#383, mamba PR#746: packed rows equal each sequence alone, on and off chunk borders."""
    T = sum(lengths)
    p = Problem(1, T, 18, 4, 1, {"D", "z", "delta_bias"}, reverse=reverse)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]

    def packed(*floats):
        p.flags["seq_ids"] = ids
        return p.scan("cpu")(*floats).y

    def separate(*floats):
        p.flags["seq_ids"] = None
        by_token = [t.dim() == 3 for t in floats]
        split = [t.split(lengths, 1) if b else [t] * len(lengths) for t, b in zip(floats, by_token)]
        return torch.cat([p.scan("cpu")(*part).y for part in zip(*split)], 1)

    (y,), grads = gradients(packed, p.floats)
    (expected,), expected_grads = gradients(separate, p.floats)
    for a, e in zip([y, *grads], [expected, *expected_grads]):
        assert_close(a, e, terms=T)


def test_masked_tokens_may_hold_anything():
    """fla#1272, mamba#66: padding is passed over, whatever it holds, and gets no gradient."""
    p = Problem(2, 70, 17, 5, 1, ALL - {"seq_ids"})
    mask = p.flags["mask"]
    values, grads = gradients(p.scan("cpu"), p.floats)
    for i, t in enumerate(p.floats):
        if t.shape[:2] == mask.shape:
            p.floats[i] = t.masked_fill(~mask[..., None], torch.nan)
    again, again_grads = gradients(p.scan("cpu"), p.floats)
    for a, e in zip([*again, *again_grads], [*values, *grads]):
        assert torch.equal(a, e)
    assert (again[0][~mask] == 0).all()
    leaves = [t.requires_grad_() for t in p.floats]
    y, state = p.scan("cpu")(*leaves)
    upstream = torch.ones_like(y).masked_fill(~mask[..., None], torch.nan)
    poisoned = torch.full_like(state, torch.nan)
    for dy, dstate in [(upstream, torch.ones_like(state)), (torch.ones_like(y), poisoned)]:
        grads = torch.autograd.grad([y, state], leaves, [dy, dstate], retain_graph=True)
        for t, grad in zip(p.floats, grads):
            if t.shape[:2] == mask.shape:
                assert (grad[~mask] == 0).all()
                assert grad.isfinite().all() or dstate is poisoned


def layouts(tensor):
    """The same values with other strides."""
    yield tensor.mT.contiguous().mT
    yield tensor.repeat_interleave(2, -1)[..., ::2]
    yield tensor.repeat_interleave(2, 0)[::2]
    yield torch.cat([tensor, tensor], -1).chunk(2, -1)[1]


@pytest.mark.parametrize("which", range(9))
def test_strides(which):
    """mamba#345, mamba PR#537, fla PR#871: any strides, in every argument."""
    p = Problem(2, 66, 18, 5, 1)
    expected, expected_grads = gradients(p.scan("cpu"), p.floats)
    given = p.floats[which]
    shapes = [given] if given.dim() == 1 else list(layouts(given))
    for other in [*shapes, given.repeat_interleave(2, -1)[..., ::2]]:
        floats = [t.clone().requires_grad_() for t in p.floats]
        floats[which] = other.requires_grad_()
        found = p.scan("cpu")(*floats)
        upstream = torch.Generator().manual_seed(1)
        dy = [torch.randn(o.shape, generator=upstream) for o in found]
        grads = torch.autograd.grad(found, floats, [g.mT.contiguous().mT for g in dy])
        for a, e in zip([*found, *grads], [*expected, *expected_grads]):
            assert torch.equal(a, e)


def test_expanded_inputs_and_gradients():
    """fla PR#1138: y.sum().backward() hands back a gradient with stride 0."""
    p = Problem(2, 66, 18, 5, 1, set())
    row = [t[:1].expand(2, *t.shape[1:]) if t.dim() > 2 else t for t in p.floats]
    row[1] = row[1][..., :1].expand(2, 66, 18)
    for dy in (lambda y: y.sum(), lambda y: (y * torch.ones_like(y)).sum()):
        leaves = [t.detach().requires_grad_() for t in row]
        got = torch.autograd.grad(dy(p.scan("cpu")(*leaves).y), leaves)
        wide = [t.detach().double().requires_grad_() for t in row]
        expected = torch.autograd.grad(dy(p.scan("torch")(*wide).y), wide)
        for a, e in zip(got, expected):
            assert_close(a, e, terms=66)


@pytest.mark.parametrize(
    ("B", "T", "E", "N"), [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)]
)
def test_empty(B, T, E, N):
    p = Problem(B, T, E, N, 1)
    values, grads = gradients(p.scan("cpu"), p.floats)
    expected, expected_grads = gradients(p.scan("torch"), p.floats)
    for a, e in zip(values, expected):
        assert_close(a, e)
    for a, e, t in zip(grads, expected_grads, p.floats):
        assert_close(a, torch.zeros_like(t) if e is None else e)


def test_only_one_result_used():
    p = Problem(2, 66, 18, 5, 1)
    for index in (0, 1):
        leaves = [t.clone().requires_grad_() for t in p.floats]
        got = torch.autograd.grad(p.scan("cpu")(*leaves)[index].sum(), leaves, allow_unused=True)
        expected = torch.autograd.grad(
            p.scan("torch")(*leaves)[index].sum(), leaves, allow_unused=True
        )
        for a, e, t in zip(got, expected, p.floats):
            assert_close(a, torch.zeros_like(t) if e is None else e, terms=66)


def test_inputs_are_never_written_and_backward_repeats():
    p = Problem(2, 66, 18, 5, 2)
    leaves = [t.clone().requires_grad_() for t in p.floats]
    y, state = p.scan("cpu")(*leaves)
    upstream = [torch.randn_like(y), torch.randn_like(state)]
    kept = [t.clone() for t in upstream]
    first = torch.autograd.grad([y, state], leaves, upstream, retain_graph=True)
    second = torch.autograd.grad([y, state], leaves, upstream)
    for a, b in zip([*first, *leaves, *upstream], [*second, *p.floats, *kept]):
        assert torch.equal(a, b)


def test_results_do_not_depend_on_threads():
    """mamba#137: no atomics; the same bits on every run and for every number of threads."""
    p = Problem(3, 130, 150, 6, 2)
    library = cpu_extension.load("selective_scan_cpu")
    before = torch.get_num_threads()
    found = []
    try:
        for threads, team in [(1, True), (2, True), (3, True), (3, False)]:
            torch.set_num_threads(threads)
            # without the OpenMP runtime of PyTorch: plain threads
            library.brickwork_team_start(cpu_extension._team_start() if team else None)
            values, grads = gradients(p.scan("cpu"), p.floats)
            found.append([*values, *grads])
    finally:
        torch.set_num_threads(before)
        library.brickwork_team_start(cpu_extension._team_start())
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_float32(dtype):
    p = Problem(2, 66, 18, 5, 1)
    narrow = [t.to(dtype) for t in p.floats]
    values, grads = gradients(p.scan("cpu"), narrow)
    (y, state), wide_grads = gradients(p.scan("cpu"), [t.float() for t in narrow])
    assert values[0].dtype == dtype
    assert values[1].dtype == torch.float32
    assert torch.equal(values[0], y.to(dtype))
    assert torch.equal(values[1], state)
    for grad, t in zip(grads, narrow):
        assert grad.dtype == t.dtype
    expected = gradients(p.scan("torch"), narrow)[1]
    for a, e in zip(grads, expected):
        assert_close(a, e, terms=66)
    assert wide_grads[0].dtype == torch.float32


def test_mixed_dtypes():
    """fla#1264: parameters in float32, activations in bfloat16; any float64 makes all wide."""
    p = Problem(1, 20, 6, 3, 1)
    mixed = [t.bfloat16() if t.dim() == 3 else t for t in p.floats]
    for floats in (mixed, [*mixed[:2], mixed[2].double(), *mixed[3:]]):
        values, grads = gradients(p.scan("cpu"), floats)
        expected, expected_grads = gradients(p.scan("torch"), floats)
        for a, e in zip([*values, *grads], [*expected, *expected_grads]):
            assert a.dtype == e.dtype
            assert_close(a, e, terms=20, compute=torch.float32)


def test_autocast_changes_nothing():
    p = Problem(1, 20, 6, 3, 1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = p.scan("cpu")(*p.floats)
    for a, b in zip(inside, p.scan("cpu")(*p.floats)):
        assert torch.equal(a, b)


def test_opcheck():
    forward = torch.ops.brickwork.selective_scan_cpu.default
    backward = torch.ops.brickwork.selective_scan_cpu_backward.default
    p = Problem(2, 66, 18, 5, 2)
    x, delta, A, B, C, *options = (t.requires_grad_() for t in p.floats)
    starts = torch.rand(2, 66) > 0.9
    flags = (p.flags["mask"], starts, True, False)
    torch.library.opcheck(forward, (x, delta, A, B, C, *options, *flags, True))
    bare = (x, delta, A, B, C, None, None, None, None, None, None, False, True, False)
    torch.library.opcheck(forward, bare)
    inputs = [t.detach() for t in (x, delta, A, B, C, *options)]
    _, final, states = forward(*inputs, *flags, True)
    upstream = (torch.randn(2, 66, 18), torch.randn_like(final))
    torch.library.opcheck(backward, (*upstream, states, *inputs, *flags))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_to_one_graph(backend):
    if backend == "inductor":
        pytest.importorskip("triton")
    p = Problem(2, 66, 18, 5, 1)
    compiled = torch.compile(p.scan("auto"), fullgraph=True, backend=backend)
    values, grads = gradients(compiled, p.floats)
    expected, expected_grads = gradients(p.scan("cpu"), p.floats)
    for a, e in zip([*values, *grads], [*expected, *expected_grads]):
        assert_close(a, e, terms=66)


def test_checkpoint():
    p = Problem(2, 66, 18, 5, 1)
    again = gradients(lambda *t: checkpoint(p.scan("cpu"), *t, use_reentrant=False), p.floats)
    for a, e in zip(again[1], gradients(p.scan("cpu"), p.floats)[1]):
        assert torch.equal(a, e)


def test_double_backward_raises():
    p = Problem(1, 5, 3, 2, 1)
    leaves = [t.requires_grad_() for t in p.floats]
    y = p.scan("cpu")(*leaves).y
    (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.sum(), leaves[1])


def test_kept_states_are_a_quarter_of_x():
    """Extra memory is not proportional to T · N: the states kept, in relation to x."""
    for N in (1, 16, 40, 64):
        x = torch.randn(1, 1024, 16)
        A = torch.randn(16, N)
        _, _, states = selective_scan_cpu._empty_results(x, A, True)
        assert states.numel() <= x.numel() / 4 + A.numel()
    assert selective_scan_cpu._empty_results(x, A, False)[2].numel() == 0


def test_offsets_past_two_to_the_31():
    """mamba#503 and others: pointer arithmetic in 64 bits, on memory that is mostly not there."""
    step = 2**30 + 3
    try:
        buffer = torch.empty(2 * step + 8)
    except RuntimeError:
        pytest.skip("no address space for the buffer")
    x = buffer.as_strided((1, 3, 4), (1, step, 1))
    x.copy_(torch.randn(1, 3, 4))
    others = Problem(1, 3, 4, 2, 1, set()).floats[1:]
    for reverse in (False, True):
        got = selective_scan(x, *others, reverse=reverse, backend="cpu")
        expected = selective_scan(x.clone(), *others, reverse=reverse, backend="torch")
        assert_close(got.y, expected.y, terms=3)


def test_choice_of_backend():
    p = Problem(1, 5, 3, 2, 1)
    with pytest.MonkeyPatch.context() as patch:
        called = []
        run = selective_scan_cpu.run
        patch.setattr(selective_scan_cpu, "run", lambda *a: (called.append(a[0]), run(*a)))
        p.scan("auto")(*p.floats)
        assert called == ["forward"]
        with prefer("chunked"):
            p.scan("auto")(*p.floats)
        assert called == ["forward"]
    with FakeTensorMode():
        x = torch.empty(1, 5, 3, device="cuda")
        A, B = torch.empty(3, 2, device="cuda"), torch.empty(1, 5, 2, device="cuda")
        with pytest.raises(BackendUnavailable, match="it takes CPU tensors, got cuda"):
            selective_scan(x, x, A, B, B, backend="cpu")
        assert selective_scan(x, x, A, B, B).y.device.type == "cuda"


def test_functional_transforms_take_the_reference():
    x, delta, A, B, C = Problem(1, 5, 3, 2, 1, set()).floats

    def loss(x):
        return selective_scan(x, delta.abs(), A, B, C).y.square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert_close(torch.func.grad(loss)(x), expected, terms=5)
