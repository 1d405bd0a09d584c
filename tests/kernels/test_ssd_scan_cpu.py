from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_close, gradients

from brickwork.kernels import cpu_extension, ssd_scan_cpu
from brickwork.kernels.backend import prefer
from brickwork.kernels.ssd_scan import ssd_scan

pytestmark = pytest.mark.skipif(
    ssd_scan_cpu.unavailable_here() is not None, reason=str(ssd_scan_cpu.unavailable_here())
)

OPTIONS = ("D", "z", "delta_bias", "initial_state", "mask", "seq_ids")
ALL = frozenset(OPTIONS)
# heads around a tile (4), widths and states around vectors and panels (8, 16 and 32 numbers) and
# the rows that a product takes (6 or 14)
SIZES = [
    (1, 1, 1, 1),
    (2, 3, 5, 2),
    (4, 16, 13, 1),
    (5, 17, 14, 1),
    (9, 8, 15, 1),
    (6, 31, 33, 2),
    (3, 33, 32, 1),
    (8, 64, 29, 2),
    (4, 66, 66, 4),
]
CHUNKS = [1, 2, 13, 14, 15, 28, 33, 64]


class Problem:
    """Random arguments; `scan(backend)` is the scan as a function of `floats`."""

    def __init__(
        self,
        B,
        T,
        H,
        P,
        N,
        G=1,
        options=ALL,
        *,
        skips="HP",
        softplus=True,
        reverse=False,
        chunk=None,
        starts=0.1,
    ):
        self.terms = T * max(N, P)
        self.flags = {"softplus": softplus, "reverse": reverse, "chunk_size": chunk}
        if "mask" in options:
            self.flags["mask"] = torch.rand(B, T) > 0.2
        if "seq_ids" in options:
            self.flags["seq_ids"] = (torch.rand(B, T) > 1 - starts).cumsum(1)
        delta = torch.randn(B, T, H)
        self.floats = [
            torch.randn(B, T, H, P),
            delta if softplus else delta.abs(),
            -torch.rand(H) * 3,
            torch.randn(B, T, G, N),
            torch.randn(B, T, G, N),
        ]
        shapes = {"D": (H, P) if skips == "HP" else (H,), "z": (B, T, H, P)}
        shapes |= {"delta_bias": (H,), "initial_state": (B, H, P, N)}
        self.names = [name for name in shapes if name in options]
        named = {name: torch.randn(shapes[name]) for name in self.names}
        if "delta_bias" in named and not softplus:
            named["delta_bias"].abs_()
        self.floats += named.values()

    def scan(self, backend):
        def run(*floats):
            named = dict(zip(self.names, floats[5:]))
            return ssd_scan(*floats[:5], **named, **self.flags, backend=backend)

        return run

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
@pytest.mark.parametrize("T", [1, 2, 13, 14, 15, 63, 64, 65, 129])
def test_lengths(T, reverse):
    """mamba#352, mamba#368: lengths that are no multiple of the chunk, with bias and softplus."""
    Problem(2, T, 6, 5, 7, 2, reverse=reverse).check()


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    """mamba PR#547, transformers PR#37533: groups of B and C; mamba#643: any width."""
    Problem(2, 66, *size).check()


@pytest.mark.parametrize("chunk", [*CHUNKS, 1000])
def test_chunks(chunk):
    Problem(1, 66, 5, 6, 7, chunk=chunk).check()


@pytest.mark.parametrize("reverse", [False, True])
def test_long(reverse):
    Problem(1, 1000, 5, 20, 16, reverse=reverse, starts=0.01).check()


@given(
    T=st.integers(1, 70),
    size=st.sampled_from(SIZES),
    options=st.sets(st.sampled_from(OPTIONS)),
    skips=st.sampled_from(["H", "HP"]),
    softplus=st.booleans(),
    reverse=st.booleans(),
    chunk=st.sampled_from(CHUNKS),
)
@settings(max_examples=40)
def test_every_combination(T, size, options, **choices):
    Problem(1, T, *size, options, **choices).check()


@pytest.mark.parametrize("option", OPTIONS)
def test_single_options(option):
    Problem(2, 67, 5, 17, 6, 1, {option}).check()
    Problem(2, 67, 5, 17, 6, 1, ALL - {option}, reverse=True).check()


def test_growing_states():
    p = Problem(1, 40, 5, 3, 4)
    p.floats[2] = torch.rand(5) * 0.1
    p.check()


def test_slow_decays_keep_their_memory():
    """Errors of decays near 1 do not pile up over thousands of steps."""
    T, step = 8192, 2.0**-13
    one = torch.ones(1, T, 1, 1)
    y = ssd_scan(one, one[..., 0] * step, -torch.ones(1), one, one, backend="cpu").y.flatten()
    past = torch.arange(1, T + 1, dtype=torch.float64)
    exact = step * torch.expm1(-step * past) / torch.expm1(torch.tensor(-step).double())
    assert_close(y, exact, terms=T)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [(64, 64), (1, 63, 65), (30, 100, 2)])
def test_packed_is_separate(lengths, reverse):
    """mamba#383, mamba PR#746: packed rows equal each sequence alone, on and off chunk borders."""
    p = Problem(1, sum(lengths), 5, 6, 7, 1, {"D", "z", "delta_bias"}, reverse=reverse)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]

    def packed(*floats):
        p.flags["seq_ids"] = ids
        return p.scan("cpu")(*floats).y

    def separate(*floats):
        p.flags["seq_ids"] = None
        by_token = [i in (0, 1, 3, 4, 6) for i in range(len(floats))]
        split = [t.split(lengths, 1) if b else [t] * len(lengths) for t, b in zip(floats, by_token)]
        return torch.cat([p.scan("cpu")(*part).y for part in zip(*split)], 1)

    (y,), grads = gradients(packed, p.floats)
    (expected,), expected_grads = gradients(separate, p.floats)
    for a, e in zip([y, *grads], [expected, *expected_grads]):
        assert_close(a, e, terms=p.terms)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sick", [0, 1, 2])
def test_a_sequence_of_nan_stays_alone(sick, reverse):
    """In a packed row it reaches no result and no gradient of a token of another sequence."""
    lengths = torch.tensor([5, 66, 30])
    ids = torch.repeat_interleave(torch.arange(3), lengths)[None]
    p = Problem(1, 101, 5, 17, 6, 1, {"D", "z", "delta_bias", "initial_state"}, reverse=reverse)
    p.flags["seq_ids"] = ids
    by_token = [t.shape[:2] == ids.shape for t in p.floats]
    for t in (t for t, by in zip(p.floats, by_token) if by):
        t[ids == sick] = torch.nan
    leaves = [t.requires_grad_() for t in p.floats]
    y, state = p.scan("cpu")(*leaves)
    assert y[ids != sick].isfinite().all()
    assert state.isfinite().all() or sick == (0 if reverse else 2)
    grads = torch.autograd.grad([y.sum(), state.sum()], leaves)
    for grad in (g for g, by in zip(grads, by_token) if by):
        assert grad[ids != sick].isfinite().all()
    assert grads[-1].isfinite().all() or sick == (2 if reverse else 0)


def test_sums_over_many_tokens_and_rows_do_not_drift():
    """Gradients of parameters are sums of sums, not one running sum in float32."""
    for B, T in [(1, 2**14), (2**12, 4)]:
        x = torch.full((B, T, 1, 1), 0.1)
        one = torch.ones(1)
        leaves = [t.requires_grad_() for t in (-one, one.clone(), one.clone())]

        def run(backend, dtype, x=x, leaves=leaves):
            A, D, bias = (t.to(dtype) for t in leaves)
            wide = x.to(dtype)
            y, _ = ssd_scan(
                wide, wide[..., 0], A, wide, wide, D=D, delta_bias=bias, backend=backend
            )
            return torch.autograd.grad(y.sum(), leaves)

        for a, e in zip(run("cpu", torch.float32), run("torch", torch.float64)):
            assert_close(a, e, terms=64)


def test_half_precision_is_kept_for_backward_as_it_came():
    p = Problem(2, 40, 4, 18, 5)
    kept = []
    leaves = [t.bfloat16().requires_grad_() for t in p.floats]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        p.scan("cpu")(*leaves)
    wide = [t for t in kept if t.dtype == torch.float32]
    assert [t.shape for t in wide] == [(2, 4, 5, 18)]  # the states at the start of the one chunk


def test_masked_tokens_may_hold_anything():
    """fla#1272, mamba#66: padding is passed over, whatever it holds, and gets no gradient."""
    p = Problem(2, 70, 5, 17, 6, 1, ALL - {"seq_ids"})
    mask = p.flags["mask"]
    values, grads = gradients(p.scan("cpu"), p.floats)
    by_token = [t.shape[:2] == mask.shape for t in p.floats]
    for i in (i for i, by in enumerate(by_token) if by):
        p.floats[i] = p.floats[i].clone()
        p.floats[i][~mask] = torch.nan
    again, again_grads = gradients(p.scan("cpu"), p.floats)
    for a, e in zip([*again, *again_grads], [*values, *grads]):
        assert torch.equal(a, e)
    assert (again[0][~mask] == 0).all()
    leaves = [t.requires_grad_() for t in p.floats]
    y, state = p.scan("cpu")(*leaves)
    upstream = torch.ones_like(y)
    upstream[~mask] = torch.nan
    poisoned = torch.full_like(state, torch.nan)
    for dy, dstate in [(upstream, torch.ones_like(state)), (torch.ones_like(y), poisoned)]:
        grads = torch.autograd.grad([y, state], leaves, [dy, dstate], retain_graph=True)
        for grad in (g for g, by in zip(grads, by_token) if by):
            assert (grad[~mask] == 0).all()
            assert grad.isfinite().all() or dstate is poisoned


@pytest.mark.parametrize("which", range(9))
def test_strides(which):
    """mamba#345, mamba PR#537, fla PR#871: any strides, in every argument."""
    p = Problem(2, 40, 4, 18, 5)
    expected, expected_grads = gradients(p.scan("cpu"), p.floats)
    given = p.floats[which]
    others = [given.repeat_interleave(2, -1)[..., ::2], given.repeat_interleave(2, 0)[::2]]
    if given.dim() > 1:
        others.append(given.mT.contiguous().mT)
    for other in others:
        floats = [t.clone().requires_grad_() for t in p.floats]
        floats[which] = other.requires_grad_()
        found = p.scan("cpu")(*floats)
        upstream = torch.Generator().manual_seed(1)
        dy = [torch.randn(o.shape, generator=upstream) for o in found]
        grads = torch.autograd.grad(found, floats, [g.mT.contiguous().mT for g in dy])
        for a, e in zip([*found, *grads], [*expected, *expected_grads]):
            assert torch.equal(a, e)


@pytest.mark.parametrize("sizes", [(0, 3, 4, 2, 2), (2, 0, 4, 2, 2), (2, 3, 4, 0, 2)])
def test_empty(sizes):
    p = Problem(*sizes)
    values, grads = gradients(p.scan("cpu"), p.floats)
    expected, expected_grads = gradients(p.scan("torch"), p.floats)
    for a, e in zip(values, expected):
        assert_close(a, e)
    for a, e, t in zip(grads, expected_grads, p.floats):
        assert_close(a, torch.zeros_like(t) if e is None else e)


def test_without_a_state_another_backend_runs():
    p = Problem(2, 3, 4, 2, 0)
    for a, e in zip(p.scan("auto")(*p.floats), p.scan("torch")(*p.floats)):
        assert_close(a, e)


def test_only_one_result_used():
    p = Problem(2, 66, 5, 4, 3)
    for index in (0, 1):
        leaves = [t.clone().requires_grad_() for t in p.floats]
        got = torch.autograd.grad(p.scan("cpu")(*leaves)[index].sum(), leaves, allow_unused=True)
        expected = torch.autograd.grad(
            p.scan("torch")(*leaves)[index].sum(), leaves, allow_unused=True
        )
        for a, e, t in zip(got, expected, p.floats):
            assert_close(a, torch.zeros_like(t) if e is None else e, terms=p.terms)


def test_results_do_not_depend_on_threads():
    """mamba#137: no atomics; the same bits on every run and for every number of threads."""
    p = Problem(3, 130, 10, 9, 6, 2)
    library = cpu_extension.load("ssd_scan_cpu")
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


def test_mixed_dtypes():
    """fla#1264: parameters in float32, activations in bfloat16; any float64 makes all wide."""
    p = Problem(1, 20, 6, 3, 2)
    mixed = [t.bfloat16() if t.dim() > 2 else t for t in p.floats]
    for floats in (mixed, [*mixed[:2], mixed[2].double(), *mixed[3:]]):
        values, grads = gradients(p.scan("cpu"), floats)
        expected, expected_grads = gradients(p.scan("torch"), floats)
        for a, e in zip([*values, *grads], [*expected, *expected_grads]):
            assert a.dtype == e.dtype
            assert_close(a, e, terms=p.terms, compute=torch.float32)


def test_opcheck():
    forward = torch.ops.brickwork.ssd_scan_cpu.default
    backward = torch.ops.brickwork.ssd_scan_cpu_backward.default
    p = Problem(2, 10, 4, 3, 5, 2)
    x, delta, A, B, C, *options = (t.requires_grad_() for t in p.floats)
    flags = (p.flags["mask"], torch.rand(2, 10) > 0.9, True, False, 4)
    torch.library.opcheck(forward, (x, delta, A, B, C, *options, *flags, True))
    bare = (x, delta, A, B, C, *(None,) * 6, False, True, 4, False)
    torch.library.opcheck(forward, bare)
    inputs = [t.detach() for t in (x, delta, A, B, C, *options)]
    y, final, states = forward(*inputs, *flags, True)
    upstream = (torch.randn_like(y), torch.randn_like(final))
    torch.library.opcheck(backward, (*upstream, states, *inputs, *flags))


def test_double_backward_raises():
    p = Problem(1, 5, 3, 2, 1)
    leaves = [t.requires_grad_() for t in p.floats]
    y = p.scan("cpu")(*leaves).y
    (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.sum(), leaves[1])


def test_offsets_past_two_to_the_31():
    """mamba#503 and others: pointer arithmetic in 64 bits, on memory that is mostly not there."""
    step = 2**30 + 3
    try:
        buffer = torch.empty(2 * step + 8)
    except RuntimeError:
        pytest.skip("no address space for the buffer")
    x = buffer.as_strided((1, 3, 4, 2), (1, step, 2, 1))
    x.copy_(torch.randn(1, 3, 4, 2))
    others = Problem(1, 3, 4, 2, 2, 1, set()).floats[1:]
    for reverse in (False, True):
        got = ssd_scan(x, *others, reverse=reverse, backend="cpu")
        expected = ssd_scan(x.clone(), *others, reverse=reverse, backend="torch")
        assert_close(got.y, expected.y, terms=6)


def test_choice_of_backend(monkeypatch):
    p = Problem(1, 5, 3, 2, 1)
    called = []
    run = cpu_extension.run
    monkeypatch.setattr(cpu_extension, "run", lambda *a: (called.append(a[1:3]), run(*a)))
    p.scan("auto")(*p.floats)
    assert called == [("ssd", "forward")]
    with prefer("chunked"):
        p.scan("auto")(*p.floats)
    assert called == [("ssd", "forward")]
