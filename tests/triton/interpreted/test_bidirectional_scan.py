from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import assert_well_behaved, count_bytes
from support import assert_close, assert_same_function, gradients

from brickwork.kernels import bidirectional_scan_triton as ops
from brickwork.kernels import selective_scan_triton_launch as launches
from brickwork.kernels.backend import prefer
from brickwork.kernels.bidirectional_scan import ScanInputs, bidirectional_scan
from brickwork.kernels.selective_scan import selective_scan

OPTIONS = ("D", "delta_bias", "z", "mask", "seq_ids")
EACH = len(ScanInputs._fields)
CHUNK = 4


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Chunks of 4 tokens, walked through 4 at a time (backward 2 where threads have 2 channels)."""
    monkeypatch.setattr(launches, "chunk_of", lambda state: CHUNK)
    monkeypatch.setattr(launches, "Q_FORWARD", 4)
    monkeypatch.setattr(launches, "Q_BACKWARD", 2)


class Problem:
    """Random arguments of both directions; `scan(backend)` is it as a function of `floats`."""

    def __init__(self, B, T, E, N, G=1, options=OPTIONS, *, softplus=True):
        self.terms = max(T, N)
        self.flags = {"softplus": softplus}
        if "mask" in options:
            self.flags["mask"] = torch.rand(B, T) > 0.2
        if "seq_ids" in options:
            self.flags["seq_ids"] = (torch.rand(B, T) > 0.8).cumsum(1)
        self.floats = []
        for _ in range(2):
            pair = (B, T, G, N) if G > 1 else (B, T, N)
            steps = torch.randn(B, T, E)
            self.floats += [torch.randn(B, T, E), steps if softplus else steps.abs()]
            self.floats += [-torch.rand(E, N) * 3, torch.randn(pair), torch.randn(pair)]
            self.floats.append(torch.randn(E) if "D" in options else None)
            self.floats.append(torch.rand(E) if "delta_bias" in options else None)
        self.floats.append(torch.randn(B, T, E) if "z" in options else None)

    def scan(self, backend):
        def run(*given):
            sides = ScanInputs(*given[:EACH]), ScanInputs(*given[EACH:-1])
            return bidirectional_scan(*sides, z=given[-1], **self.flags, backend=backend)

        return run

    def check(self):
        assert_same_function(self.scan("triton"), self.scan("torch"), self.floats, terms=self.terms)


@pytest.mark.parametrize("enough", [0, 4])
@pytest.mark.parametrize("T", [1, 5, 9])
def test_lengths(monkeypatch, T, enough):
    """All chunks as one segment, or each as one."""
    monkeypatch.setattr(launches, "ENOUGH", enough)
    Problem(2, T, 3, 2).check()


@given(
    T=st.integers(1, 6),
    G=st.sampled_from([1, 2]),
    options=st.sets(st.sampled_from(OPTIONS)),
    softplus=st.booleans(),
    enough=st.sampled_from([0, 4]),
)
@settings(max_examples=5)
def test_every_combination(T, G, options, softplus, enough):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "ENOUGH", enough)
        Problem(1, T, 2, 2, G, options, softplus=softplus).check()


def test_several_blocks_of_channels():
    Problem(1, 3, 70, 1).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_two_scans_bit_by_bit(dtype):
    """In narrow activations with wide parameters; in one launch of each kernel."""
    p = Problem(2, 6, 3, 2)
    wide = {2, 5, 6, 9, 12, 13}  # A, D and the bias of each direction
    floats = [t if i in wide else t.to(dtype) for i, t in enumerate(p.floats)]

    def two(*given):
        ways = []
        for way in (0, 1):
            x, delta, A, B, C, D, bias = given[way * EACH : (way + 1) * EACH]
            options = {"D": D, "delta_bias": bias, "z": given[-1], "reverse": bool(way), **p.flags}
            ways.append(selective_scan(x, delta, A, B, C, **options, backend="triton").y)
        return ways[0] + ways[1]

    results = [gradients(f, floats) for f in (p.scan("triton"), two)]
    for a, e in zip(*([*values, *grads] for values, grads in results)):
        assert a.dtype == e.dtype
        assert_close(a, e, terms=p.terms, compute=torch.float32)
    assert torch.equal(results[0][0][0], results[1][0][0])


def test_one_launch_of_each_kernel(monkeypatch):
    """What two scans launch once each, one launches for both."""
    launched = []
    for name in [n for n in vars(launches) if n.endswith("_kernel")]:

        class Watched:
            def __init__(self, kernel):
                self.kernel = kernel

            def __getitem__(self, grid):
                launched.append(self.kernel.__name__)
                return self.kernel[grid]

        monkeypatch.setattr(launches, name, Watched(getattr(launches, name)))
    p = Problem(1, 9, 3, 2)
    gradients(p.scan("triton"), p.floats)
    forward = ["prepare_kernel", "forward_kernel", "combine_kernel", "forward_kernel"]
    backward = ["prepare_kernel", "backward_summary_kernel", "combine_kernel", "backward_kernel"]
    assert launched == [*forward, *backward]


def test_directions_that_differ():
    """Other strides are copied; other shapes and dtypes scanned one after the other."""
    p = Problem(2, 5, 4, 2)
    p.floats[1] = p.floats[1].mT.contiguous().mT
    p.floats[EACH] = p.floats[EACH].repeat_interleave(2, 1)[:, ::2]
    p.floats[3] = torch.cat([p.floats[3]] * 2, -1)[..., 2:]
    p.check()
    p.floats[5] = None
    p.floats[EACH + 2] = -torch.rand(4, 3)
    p.floats[EACH + 3 : EACH + 5] = torch.randn(2, 2, 5, 3)
    p.check()


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0)])
def test_empty(B, T):
    p = Problem(B, T, 4, 2)
    values, grads = gradients(p.scan("triton"), p.floats)
    assert values[0].shape == (B, T, 4)
    assert all((g == 0).all() for g in grads)


def test_masked_tokens_may_hold_anything():
    p = Problem(2, 9, 3, 2, options={"D", "z", "delta_bias", "mask"})
    mask = p.flags["mask"]
    values, grads = gradients(p.scan("triton"), p.floats)
    p.floats = [
        t.masked_fill(~mask[..., None], torch.nan) if t.shape[:2] == mask.shape else t
        for t in p.floats
    ]
    again, again_grads = gradients(p.scan("triton"), p.floats)
    for a, e in zip([*again, *again_grads], [*values, *grads]):
        assert torch.equal(a, e)


def test_behaves():
    """D1 1, D1 3, D1 5, D1 28; mamba#137: no atomics."""
    p = Problem(1, 5, 3, 1)
    assert_well_behaved(p.scan("triton"), [t.to(torch.bfloat16) for t in p.floats])


def test_the_ops_are_well_registered():
    p = Problem(1, 2, 2, 1, 2)
    flags = torch.randint(0, 4, (2, 2)).to(torch.uint8)
    torch.library.opcheck(
        ops._forward_op, (*[t.requires_grad_() for t in p.floats], flags, True, True)
    )
    plain = [t.detach() for t in p.floats]
    y, states = ops._forward_op(*plain, flags, True, True)
    torch.library.opcheck(ops._backward_op, (torch.randn_like(y), states, *plain, flags, True))


def test_bytes(monkeypatch):
    """What the docstrings state: every value of a token once, but for the gate's, once each way,
    and the sums, which are not kernels'."""
    monkeypatch.setattr(launches, "ENOUGH", 0)
    B, T, E, N = 1, 8, 5, 3
    p = Problem(B, T, E, N, options={"D", "z", "delta_bias"})
    leaves = [t.bfloat16() if t.dim() == 3 else t for t in p.floats]
    leaves = [t.requires_grad_() for t in leaves]
    size = 2 * B * T * E
    kept, once, carried = 4 * N * E * T // CHUNK, 4 * N * E + 2 * 4 * E, 4 * B * N * E
    numbers = 2 * 2 * B * T * N  # B and C as they come; prepared they are float32
    with count_bytes() as moved:
        y = p.scan("triton")(*leaves)
    each = 2 * size + once + 3 * numbers + carried
    assert moved.read == 2 * each + size
    assert moved.written == 2 * (size + kept + 2 * numbers + carried)
    with count_bytes() as moved:
        torch.autograd.grad(y, leaves, torch.randn(y.shape).bfloat16())
    scratch, rates, sums, shares = CHUNK // 4 * 4 * N * E, carried, 2 * 4 * E, 2 * numbers
    each = 2 * size + once + 3 * numbers + carried + kept + scratch + rates
    assert moved.read == 2 * each + 2 * size  # dy and z are both directions'
    each = 3 * size + 2 * numbers + carried + scratch + rates + sums + shares
    assert moved.written == 2 * each


def test_auto_takes_it_where_the_scan_would():
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
