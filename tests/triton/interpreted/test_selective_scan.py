from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import assert_well_behaved, count_bytes, sparse_tensor
from problems import SCAN_OPTIONS, ScanProblem
from support import assert_close, assert_same_function, gradients

from brickwork.kernels import selective_scan_triton as ops
from brickwork.kernels import selective_scan_triton_launch as launches
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.selective_scan import selective_scan

ALL = frozenset(SCAN_OPTIONS)
HALVES = [torch.bfloat16, torch.float16]
CHUNK = 4


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Chunks of 4 tokens, walked through 4 at a time (backward 2 where threads have 2 channels)."""
    monkeypatch.setattr(launches, "chunk_of", lambda state: CHUNK)
    monkeypatch.setattr(launches, "Q_FORWARD", 4)
    monkeypatch.setattr(launches, "Q_BACKWARD", 2)


@pytest.fixture(params=["one segment", "segments"])
def segments(request, monkeypatch):
    """With the interpreter's three multiprocessors every chunk is a segment; or all are one."""
    monkeypatch.setattr(launches, "ENOUGH", 0 if request.param == "one segment" else 4)


class Problem(ScanProblem):
    def check(self):
        assert_same_function(self.scan("triton"), self.scan("torch"), self.floats, terms=self.terms)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [1, 3, 5, 9])
def test_lengths(T, reverse):
    """mamba#352, mamba#368: lengths that are no multiple of the chunk, with bias and softplus."""
    Problem(2, T, 3, 2, reverse=reverse).check()
    Problem(1, T, 3, 2, options=(), reverse=reverse, softplus=False).check()


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_of_two_groups(monkeypatch, reverse):
    """Of four tokens, backward too."""
    monkeypatch.setattr(launches, "chunk_of", lambda state: 8)
    Problem(2, 19, 3, 2, reverse=reverse).check()


@pytest.mark.parametrize(
    "size", [(1, 1, 1), (3, 5, 1), (6, 2, 3), (66, 1, 1), (70, 1, 2), (33, 1, 1)]
)
def test_sizes(size):
    """mamba PR#547, transformers PR#37533: groups of B and C; mamba#643: any channel count."""
    E, N, G = size
    Problem(2, 5, E, N, G).check()


@given(
    T=st.integers(1, 9),
    G=st.sampled_from([1, 2]),
    options=st.sets(st.sampled_from(SCAN_OPTIONS)),
    softplus=st.booleans(),
    reverse=st.booleans(),
    enough=st.sampled_from([0, 4]),
)
@settings(max_examples=10)
def test_every_combination(T, G, options, softplus, reverse, enough):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "ENOUGH", enough)
        Problem(1, T, 2, 2, G, options, softplus=softplus, reverse=reverse).check()


def test_many_states_and_real_chunks(monkeypatch):
    """As dispatched: N = 17, chunks of 64 tokens, 8 and 4 at a time."""
    monkeypatch.undo()
    assert [launches.chunk_of(N) for N in (1, 16, 17, 40, 64, 256)] == [64, 64, 64, 128, 256, 256]
    Problem(1, 19, 2, 17, options={"z", "seq_ids"}).check()


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("reverse", [False, True])
def test_extreme_steps_and_decays(reverse):
    """mamba PR#574, mamba#353: softplus from -30 to 30 and decays up to exp(-1e6)."""
    p = Problem(1, 13, 4, 3, reverse=reverse)
    p.floats[1] = torch.linspace(-30, 30, 13 * 4).reshape(1, 13, 4)
    p.floats[2] = -(torch.linspace(0, 15, 4 * 3).exp().reshape(4, 3))
    p.check()


def test_small_steps_keep_their_precision():
    """softplus(-30) = 9.4e-14 and its slope, relative to itself."""
    raw = torch.linspace(-30, 30, 61).reshape(1, 1, 61)
    one, zero = torch.ones_like(raw), torch.zeros(61, 1)
    for backend in ("triton", "torch"):
        delta = raw.clone().requires_grad_()
        wide = delta.double() if backend == "torch" else delta
        y = selective_scan(one.to(wide), wide, zero, one[..., :1], one[..., :1], softplus=True,
                           backend=backend).y  # fmt: skip
        (slope,) = torch.autograd.grad(y.sum(), delta)
        found = torch.stack([y.double().detach(), slope.double()])
        expected = found if backend == "torch" else None
        if backend == "triton":
            ours = found
    assert ((ours - expected).abs() <= 4e-6 * expected).all()


@pytest.mark.usefixtures("segments")
def test_growing_states():
    p = Problem(1, 9, 3, 2)
    p.floats[2] = torch.rand(3, 2) * 0.1
    p.check()


@pytest.mark.parametrize("split", [1, 4, 5])
def test_split_anywhere_is_the_whole(split):
    """vLLM PR#22034, mamba#536: a state carried over equals one scan."""
    x, delta, A, B, C = Problem(2, 9, 3, 2, options=()).floats
    whole = selective_scan(x, delta, A, B, C, softplus=True, backend="triton")
    parts, state = [], None
    for at in (slice(0, split), slice(split, None)):
        part = [t[:, at] for t in (x, delta, B, C)]
        options = {"softplus": True, "initial_state": state, "backend": "triton"}
        y, state = selective_scan(*part[:2], A, *part[2:], **options)
        parts.append(y)
    assert_close(torch.cat(parts, 1), whole.y, terms=9)
    assert_close(state, whole.final_state, terms=9)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (1, 3, 5)])
def test_packed_is_separate(lengths, reverse):
    """mamba#383, mamba PR#746: packed rows equal each sequence alone, on and off chunk borders."""
    T = sum(lengths)
    p = Problem(1, T, 3, 2, options={"D", "z", "delta_bias"}, reverse=reverse)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]

    def packed(*floats):
        p.flags["seq_ids"] = ids
        return p.scan("triton")(*floats).y

    def separate(*floats):
        p.flags["seq_ids"] = None
        by_token = [t.dim() == 3 for t in floats]
        split = [t.split(lengths, 1) if b else [t] * len(lengths) for t, b in zip(floats, by_token)]
        return torch.cat([p.scan("torch")(*part).y for part in zip(*split)], 1)

    assert_same_function(packed, separate, p.floats, terms=T)


@pytest.mark.usefixtures("segments")
def test_masked_tokens_may_hold_anything():
    """fla#1272, mamba#66: padding is passed over, whatever it holds, and gets no gradient; a
    sequence gets nothing of the one packed before it, whatever that became."""
    p = Problem(2, 9, 3, 2, options=ALL - {"seq_ids"})
    mask = p.flags["mask"]
    values, grads = gradients(p.scan("triton"), p.floats)
    for i, t in enumerate(p.floats):
        if t.shape[:2] == mask.shape:
            p.floats[i] = t.masked_fill(~mask[..., None], torch.nan)
    again, again_grads = gradients(p.scan("triton"), p.floats)
    for a, e in zip([*again, *again_grads], [*values, *grads]):
        assert torch.equal(a, e)
    assert (again[0][~mask] == 0).all()
    leaves = [t.requires_grad_() for t in p.floats]
    y, state = p.scan("triton")(*leaves)
    upstream = torch.ones_like(y).masked_fill(~mask[..., None], torch.nan)
    poisoned = torch.full_like(state, torch.nan)
    for dy, dstate in [(upstream, torch.ones_like(state)), (torch.ones_like(y), poisoned)]:
        grads = torch.autograd.grad([y, state], leaves, [dy, dstate], retain_graph=True)
        for t, grad in zip(p.floats, grads):
            if t.shape[:2] == mask.shape:
                assert (grad[~mask] == 0).all()
                assert grad.isfinite().all() or dstate is poisoned


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's
@pytest.mark.usefixtures("segments")
def test_a_sequence_gets_nothing_of_the_one_before_it():
    p = Problem(1, 9, 3, 2, options={"D"})
    p.flags["seq_ids"] = (torch.arange(9) > 4).long()[None]
    values, grads = gradients(p.scan("triton"), p.floats)
    p.floats[0] = p.floats[0].clone()
    p.floats[0][:, 2] = torch.inf
    again, again_grads = gradients(p.scan("triton"), p.floats)
    assert torch.equal(again[0][:, 5:], values[0][:, 5:])
    assert torch.equal(again_grads[1][:, 5:], grads[1][:, 5:])


def layouts(tensor):
    """The same values with other strides."""
    yield tensor.mT.contiguous().mT
    yield tensor.repeat_interleave(2, -1)[..., ::2]
    yield tensor.repeat_interleave(2, 0)[::2]
    yield torch.cat([tensor, tensor], -1).chunk(2, -1)[1]


@pytest.mark.parametrize("turn", range(5))
def test_strides(turn):
    """mamba#345, mamba PR#537, fla PR#871: any strides, in every argument and gradient, each of
    another kind."""
    p = Problem(2, 2, 3, 2)
    expected, expected_grads = gradients(p.scan("triton"), p.floats)
    upstream = torch.Generator().manual_seed(1)
    dy = [torch.randn(o.shape, generator=upstream) for o in expected]

    def strided(i, given):
        kinds = [given.clone(), given.repeat_interleave(2, -1)[..., ::2]]
        kinds += [] if given.dim() == 1 else list(layouts(given))
        return kinds[(i + turn) % len(kinds)].detach()

    floats = [strided(i, t).requires_grad_() for i, t in enumerate(p.floats)]
    found = p.scan("triton")(*floats)
    grads = torch.autograd.grad(found, floats, [strided(i + 4, g) for i, g in enumerate(dy)])
    for a, e in zip([*found, *grads], [*expected, *expected_grads]):
        assert torch.equal(a, e)


def test_expanded_inputs_and_gradients():
    """fla PR#1138: y.sum().backward() hands back a gradient with stride 0."""
    p = Problem(2, 5, 3, 2, options=())
    row = [t[:1].expand(2, *t.shape[1:]) if t.dim() > 2 else t for t in p.floats]
    row[1] = row[1][..., :1].expand(2, 5, 3)
    results = []
    for backend in ("triton", "torch"):
        leaves = [t.detach().requires_grad_() for t in row]
        y = p.scan(backend)(*leaves).y
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for a, e in zip(*results):
        assert_close(a, e, terms=5)


@pytest.mark.parametrize(
    ("B", "T", "E", "N"), [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)]
)
def test_empty(B, T, E, N):
    p = Problem(B, T, E, N)
    values, grads = gradients(p.scan("triton"), p.floats)
    expected, expected_grads = gradients(p.scan("torch"), p.floats)
    for a, e in zip(values, expected):
        assert_close(a, e)
    for a, e, t in zip(grads, expected_grads, p.floats):
        assert_close(a, torch.zeros_like(t) if e is None else e)


@pytest.mark.parametrize("index", [0, 1])
def test_only_one_result_used(index):
    p = Problem(2, 6, 3, 2)
    leaves = [t.clone().requires_grad_() for t in p.floats]
    found, expected = (
        torch.autograd.grad(p.scan(backend)(*leaves)[index].sum(), leaves, allow_unused=True)
        for backend in ("triton", "torch")
    )
    for a, e, t in zip(found, expected, p.floats):
        assert_close(a, torch.zeros_like(t) if e is None else e, terms=6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wide", [(), (2, 5, 7), (0, 1, 3, 4, 6)])
def test_dtypes(dtype, wide):
    """fla#1264: parameters in float32, activations narrow, or the other way round; one rounding."""
    p = Problem(1, 6, 3, 2)
    mixed = [t if i in wide else t.to(dtype) for i, t in enumerate(p.floats)]
    leaves = [t.requires_grad_() for t in mixed]
    exact = [t.detach().double().requires_grad_() for t in mixed]
    found, expected = p.scan("triton")(*leaves), p.scan("torch")(*exact)
    assert found.final_state.dtype == torch.float32
    upstream = [torch.randn(o.shape).to(o.dtype) for o in found]
    grads = torch.autograd.grad(found, leaves, upstream)
    exact_grads = torch.autograd.grad(expected, exact, [u.double() for u in upstream])
    inputs = [mixed[0], found.final_state, *mixed]
    for a, e, like in zip([*found, *grads], [*expected, *exact_grads], inputs):
        assert a.dtype == like.dtype
        assert_close(a, e, terms=p.terms, compute=torch.float32)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_behaves(dtype):
    """D1 1, D1 3, D1 5, D1 28; mamba#137: no atomics."""
    p = Problem(1, 6, 3, 2)
    assert_well_behaved(p.scan("triton"), [t.to(dtype) for t in p.floats])


def test_the_ops_are_well_registered():
    p = Problem(2, 2, 3, 2, 3)
    leaves = [t.requires_grad_() for t in p.floats]
    flags = (torch.randint(0, 2, (2, 2)).to(torch.uint8), True, False)
    torch.library.opcheck(ops._forward_op, (*leaves, *flags, True))
    x, delta, A, B, C = leaves[:5]
    torch.library.opcheck(ops._forward_op, (x, delta, A, B, C, *[None] * 5, False, True, False))
    plain = [t.detach() for t in leaves]
    _, final, states = ops._forward_op(*plain, *flags, True)
    upstream = (torch.randn(2, 2, 3), torch.randn_like(final))
    torch.library.opcheck(ops._backward_op, (*upstream, states, *plain, *flags))


def test_kept_states_are_a_quarter_of_x(monkeypatch):
    """Extra memory is not proportional to T · N: the states kept, in relation to x."""
    monkeypatch.undo()
    for N in (1, 16, 40, 64):
        x, A = torch.randn(1, 1024, 16), torch.randn(16, N)
        states = ops._empty_results(x, A, True)[2]
        assert states.numel() <= x.numel() * max(N, 16) / 64
        assert ops._empty_results(x, A, False)[2].numel() == 0


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_bytes(way, monkeypatch):
    """What the launcher's docstring states: every value of a token once from memory."""
    monkeypatch.setattr(launches, "ENOUGH", 0)
    B, T, E, N = 1, 8, 5, 3
    p = Problem(B, T, E, N, options={"D", "z", "delta_bias"})
    leaves = [t.bfloat16() if t.dim() == 3 else t for t in p.floats]
    leaves = [t.requires_grad_() for t in leaves]
    size = 2 * B * T * E
    kept = 4 * N * E * T // CHUNK
    once = leaves[2].nbytes + 2 * 4 * E  # A, D and the bias
    numbers = 2 * 2 * B * T * N  # B and C as they come; prepared they are float32
    carried = 4 * B * N * E
    with count_bytes() as moved:
        y = p.scan("triton")(*leaves).y
    if way == "forward":
        assert moved.read == 3 * size + once + numbers + 2 * numbers + carried
        assert moved.written == size + kept + 2 * numbers + carried
        return
    dy = torch.randn(y.shape).bfloat16()
    with count_bytes() as moved:
        torch.autograd.grad(y, leaves, dy)
    scratch = CHUNK // 4 * 4 * N * E
    rates = carried
    assert moved.read == 4 * size + once + numbers + 2 * numbers + carried + kept + scratch + rates
    sums = 2 * 4 * E
    shares = 2 * numbers
    assert moved.written == 3 * size + 2 * numbers + carried + scratch + rates + sums + shares


@pytest.mark.parametrize("which", [0, 1, 3, 4, 6, "dy"])
def test_offsets_past_two_to_the_31(which):
    """mamba#503 and others: tokens far apart in memory that is mostly not there."""
    p = Problem(1, 4, 4, 4, options={"D", "z"}, reverse=True)
    apart = sparse_tensor((1, 4, 2**30), torch.bfloat16)[..., :4]
    apart.copy_(torch.randn(1, 4, 4))
    results = []
    for compact in (False, True):
        given = apart.contiguous() if compact else apart
        floats = [given if i == which else t for i, t in enumerate(p.floats)]
        leaves = [t.detach().requires_grad_() for t in floats]
        y = p.scan("triton")(*leaves).y
        dy = given if which == "dy" else torch.ones_like(y)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_segments_fill_the_gpu(monkeypatch):
    """Whole chunks, none empty, and one where the channels are enough, as they are for blocks of
    more than 32 channels forward."""
    monkeypatch.undo()
    monkeypatch.setattr(launches.triton_support, "multiprocessors", lambda x: 132)
    x, blocks = torch.empty(0), set()
    for B, T, E in (
        *((8, 2048, 3072), (1, 2048, 3072), (1, 65, 64), (1, 100_000, 32)),
        *((64, 1, 8192), (24, 9, 3072)),
    ):
        forward = launches.block_of_forward(E, B, x)
        blocks.add(forward)
        for block in (forward, launches.block_of_backward(E)):
            programs = B * -(-E // block)
            count, tokens = launches.segments_of(programs, T, 64, 132)
            assert tokens % 64 == 0
            assert (count - 1) * tokens < T <= count * tokens
            assert (count == 1) == (programs >= 4 * 132 or T <= 64)
            assert count * programs <= 8 * 132 + programs
            assert count == 1 or block < 64 or block != forward
    assert blocks == {32, 64, 128}


def test_what_it_refuses():
    p = Problem(1, 3, 2, 2, options=())
    with pytest.raises(BackendUnavailable, match="got float64"):
        p.scan("triton")(*(t.double() for t in p.floats))
    with pytest.raises(BackendUnavailable, match="transforms differentiate and batch plain"):
        torch.func.grad(lambda x: p.scan("triton")(x, *p.floats[1:]).y.sum())(p.floats[0])


def test_the_interpreter_runs_on_request_only():
    p = Problem(1, 3, 2, 2, options=())
    with pytest.MonkeyPatch.context() as patch:
        called = []
        run = ops._forward_op
        patch.setattr(ops, "_forward_op", lambda *a: called.append(a) or run(*a))
        p.scan("auto")(*p.floats)
        assert not called
        with prefer("triton"):
            p.scan("auto")(*p.floats)
        assert len(called) == 1
