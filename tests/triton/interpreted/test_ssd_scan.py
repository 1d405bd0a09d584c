from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import assert_well_behaved, count_bytes, sparse_tensor
from scans import OPTIONS, PADDINGS, call, packing_ids, padding_mask
from support import assert_close, assert_same_function, gradients

from brickwork.kernels import ssd_scan_triton as ops
from brickwork.kernels import ssd_scan_triton_launch as launches
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.ssd_scan import ssd_scan

NAMES = ("D", "z", "delta_bias", "initial_state", "softplus", "reverse")
ALL = dict.fromkeys(NAMES, True)
FORWARD = {**ALL, "reverse": False}


def make(B=1, T=5, H=2, P=3, N=4, G=1, D="HP"):
    """The nine tensors of the scan, with step sizes that are positive even without softplus."""
    sizes = [(B, T, H, P), (B, T, H), (H,), (B, T, G, N), (B, T, G, N)]
    sizes += [(H, P) if D == "HP" else (H,), (B, T, H, P), (H,), (B, H, P, N)]
    x, delta, A, Bm, C, D, z, bias, state = (torch.randn(size) for size in sizes)
    return [x, delta.abs(), -A.exp(), Bm, C, D, z, bias.abs(), state]


def where(padding, packed, B, T):
    return {"mask": padding_mask(padding, B, T), "seq_ids": packing_ids(packed, B, T)}


def check(inputs, options=ALL, **fixed):
    B, T, H, P = inputs[0].shape
    assert_same_function(
        call(ssd_scan, options, **fixed, backend="triton"),
        call(ssd_scan, options, **fixed, backend="torch"),
        inputs,
        terms=B * T * max(H, P, inputs[3].shape[-1]),
        one_scale=True,
    )


@pytest.mark.parametrize(("T", "options"), [(1, ALL), (15, FORWARD), (16, ALL), (33, FORWARD)])
def test_lengths(T, options):
    """mamba#352, mamba#368: around a chunk, which is a tile; padding and packing at its borders."""
    for packed in (False, True):
        check(
            make(T=T), options, chunk_size=16, **where("interior" if packed else None, packed, 1, T)
        )


@pytest.mark.parametrize(
    "size",
    [
        {"P": 1, "N": 1, "H": 1},
        {"P": 16, "N": 17, "G": 2},
        {"P": 33, "N": 64, "H": 3},
        {"P": 65, "N": 16, "H": 4, "G": 2, "D": "H"},
    ],
)
def test_sizes(size):
    """mamba#547, transformers#37533: groups; any width of a head and of the state."""
    check(make(T=20, **size), chunk_size=17)


@given(
    options=OPTIONS,
    T=st.integers(1, 12),
    G=st.sampled_from([1, 2]),
    D=st.sampled_from(["H", "HP"]),
    padding=PADDINGS,
    packed=st.booleans(),
    chunk=st.sampled_from([3, 4, 7, 16, None]),
)
@settings(max_examples=6)
def test_every_combination(options, T, G, D, padding, packed, chunk):
    check(make(T=T, G=G, D=D), options, chunk_size=chunk, **where(padding, packed, 1, T))


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_states_walked_and_apart(monkeypatch, carry, reverse):
    """Both ways from chunk to chunk, a group's heads split or not; over a border of tiles."""
    monkeypatch.setattr(launches, "_carries", lambda *_: carry)
    monkeypatch.setattr(launches, "_splits", lambda *_: 2 if carry else 1)
    inputs = make(B=2, T=34, H=3, P=5, N=3)
    options = {**ALL, "reverse": reverse}
    check(inputs, options, chunk_size=16, **where("both", True, 2, 34))


def test_several_tiles_to_a_chunk():
    """The pairs of a chunk above, on and below the diagonal of tiles (of 32 tokens in float32)."""
    T = 75
    check(make(T=T, H=1), chunk_size=70, **where("interior", True, 1, T))
    assert launches.tiles_of(1, 3, 4, 70, "ieee")["ROWS"] < 70


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["narrow", "wide"])
def test_dtypes(dtype, parameters):
    """fla#1264: x, B, C and z narrow, the others in either; against the reference in float64.

    Rounded to x's dtype on the way are the gradient behind the gate and, in bfloat16, the operands
    of products, among them decays times C Bᵀ and states."""
    inputs = make(T=20, P=16, N=16)
    narrow = [
        t.to(dtype) if parameters == "narrow" or i in (0, 3, 4, 6) else t
        for i, t in enumerate(inputs)
    ]
    fixed = {"chunk_size": 16, "seq_ids": packing_ids(True, 1, 20)}
    values, grads = gradients(call(ssd_scan, ALL, **fixed, backend="triton"), narrow)
    wide = [t.double() for t in narrow]
    expected, expected_grads = gradients(call(ssd_scan, ALL, **fixed, backend="torch"), wide)
    assert [t.dtype for t in values] == [dtype, torch.float32]
    assert [t.dtype for t in grads] == [t.dtype for t in narrow]
    for i, (a, e) in enumerate(zip([*values, *grads], [*expected, *expected_grads])):
        assert_close(a, e, terms=20 * 16, compute=dtype, name=f"result {i}")


@pytest.mark.parametrize("layout", ["transposed", "stepped", "sliced"])
def test_strides(layout):
    """mamba#345, mamba#537, fla#871: any strides, in every argument and gradient."""
    inputs = make(B=2, T=5)
    run = call(ssd_scan, ALL, chunk_size=4, backend="triton")
    expected, expected_grads = gradients(run, inputs)

    def strided(t):
        """The same values with other strides."""
        if layout == "transposed" and t.dim() > 1:
            return t.mT.contiguous().mT
        if layout == "sliced":
            return torch.cat([t, t], -1).chunk(2, -1)[1]
        return t.repeat_interleave(2, -1)[..., ::2]

    leaves = [strided(t).detach().requires_grad_() for t in inputs]
    found = run(*leaves)
    upstream = torch.Generator().manual_seed(1)
    dy = [strided(torch.randn(o.shape, generator=upstream)) for o in found]
    grads = torch.autograd.grad(found, leaves, dy)
    for a, e in zip([*found, *grads], [*expected, *expected_grads]):
        assert torch.equal(a, e)


def test_expanded_inputs_and_gradients():
    """fla#1138: y.sum().backward() hands back a gradient with stride 0."""
    inputs = make(B=2)[:5]
    inputs[0] = inputs[0][:1, :, :1].expand(2, 5, 2, 3)
    inputs[3] = inputs[3][:1].expand(2, 5, 1, 4)
    found = []
    for backend in ("triton", "torch"):
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = ssd_scan(*leaves, backend=backend).y
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for a, e in zip(*found):
        assert_close(a, e, terms=2 * 5 * 4)


@pytest.mark.parametrize("size", [{"T": 0}, {"P": 0}, {"N": 0}])
def test_empty(size):
    inputs = make(**size)
    values, grads = gradients(call(ssd_scan, ALL, backend="triton"), inputs)
    expected, expected_grads = gradients(call(ssd_scan, ALL, backend="torch"), inputs)
    for a, e in zip(values, expected):
        assert_close(a, e)
    for a, e, t in zip(grads, expected_grads, inputs):
        assert_close(a, torch.zeros_like(t) if e is None else e, terms=20)


def test_masked_tokens_may_hold_anything():
    """fla#1272, mamba#66: padding is passed over, whatever it or its gradient holds."""
    inputs, mask = make(B=2, T=9, H=1), torch.rand(2, 9) > 0.3
    run = call(ssd_scan, ALL, mask=mask, chunk_size=4, backend="triton")
    values, grads = gradients(run, inputs)
    inputs = [
        t.masked_fill(~mask.view(2, 9, *[1] * (t.dim() - 2)), torch.nan)
        if t.shape[:2] == (2, 9)
        else t
        for t in inputs
    ]
    again, again_grads = gradients(run, inputs)
    for a, e in zip([*again, *again_grads], [*values, *grads]):
        assert torch.equal(a, e)
    assert (again[0][~mask] == 0).all()
    leaves = [t.requires_grad_() for t in inputs]
    y = run(*leaves).y
    upstream = torch.ones_like(y).masked_fill(~mask[..., None, None], torch.nan)
    for grad in torch.autograd.grad(y, leaves, upstream):
        assert grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # NumPy's
def test_extreme_steps_and_decays():
    """mamba#574, mamba#353: softplus from -30 to 30 and decays up to exp(-1e6); growing states."""
    inputs = make(T=24)
    inputs[1] = torch.linspace(-30, 30, 48).reshape(1, 24, 2)[:, torch.randperm(24)]
    inputs[2] = torch.tensor([-3e4, 0.01])
    check(inputs, chunk_size=16, **where("interior", True, 1, 24))


def test_small_steps_after_a_large_one_are_kept():
    """Differences of the running sums, which reach 3e5, must not lose steps of 1e-3; nor may the
    gradient of A, that of the exponents times 3e5, get what such differences leave over."""
    inputs = make(T=20, H=1)
    inputs[1] = torch.full((1, 20, 1), 1e-3).index_fill(1, torch.tensor([3]), 3e5)
    inputs[2] = -torch.ones(1)
    check(inputs, {}, chunk_size=32)


def test_only_one_result_used():
    inputs = make(T=6)
    for index in (0, 1):
        found = []
        for backend in ("triton", "torch"):
            leaves = [t.clone().requires_grad_() for t in inputs]
            result = call(ssd_scan, ALL, backend=backend)(*leaves)[index]
            grads = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
            found.append([torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves)])
        for a, e in zip(*found):
            assert_close(a, e, terms=6 * 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_behaves(dtype):
    """D1 1, D1 3, D1 5, D1 28; mamba#137: no atomics."""
    run = call(ssd_scan, ALL, mask=torch.rand(1, 5) > 0.2, chunk_size=4, backend="triton")
    assert_well_behaved(run, [t.to(dtype) for t in make(H=1)])


def test_the_ops_are_well_registered():
    leaves = [t.requires_grad_() for t in make(H=1)]
    flags = (torch.rand(1, 5) > 0.2, torch.rand(1, 5) > 0.7, True, True, 4)
    torch.library.opcheck(ops._op, (*leaves, *flags))
    plain = [t.detach() for t in leaves]
    dy, dfinal = torch.randn_like(plain[0]), torch.randn_like(plain[-1])
    torch.library.opcheck(ops._backward_op, (dy, dfinal, *plain, *flags))
    torch.library.opcheck(
        ops._backward_op, (None, dfinal, *plain[:5], *[None] * 6, False, False, 4)
    )


def test_bytes():
    """What the launcher's docstring states."""
    B, T, H, P, N, G, Q = 2, 32, 2, 16, 16, 1, 16
    inputs = make(B=B, T=T, H=H, P=P, N=N, G=G)
    x, delta, A, Bm, C, D, z, _, _ = (
        t.bfloat16() if i in (0, 3, 4, 6) else t for i, t in enumerate(inputs)
    )
    with count_bytes() as moved:
        y, state = ssd_scan(x, delta, A, Bm, C, D=D, z=z, chunk_size=Q, backend="triton")
    between = B * T * (12 * H + 4 * G * Q) + B * (T // Q) * H * (4 * P * N + 4)
    given = sum(t.nbytes for t in (x, delta, A, Bm, C, D, z))
    assert moved.written == y.nbytes + state.nbytes + between
    assert moved.read == given + between


def test_bytes_of_the_backward_pass():
    """What the launcher's docstring states, for chunks of one tile."""
    B, T, H, P, N, G, Q = 2, 32, 2, 16, 16, 1, 16
    inputs = make(B=B, T=T, H=H, P=P, N=N, G=G)[:8]
    leaves = [
        (t.bfloat16() if i in (0, 3, 4, 6) else t).requires_grad_() for i, t in enumerate(inputs)
    ]
    named = dict(zip(("D", "z", "delta_bias"), leaves[5:]))
    options = {**named, "softplus": True, "chunk_size": Q, "backend": "triton"}
    y, _ = ssd_scan(*leaves[:5], **options)
    dy = torch.randn(y.shape).bfloat16()
    with count_bytes() as moved:
        grads = torch.autograd.grad(y, leaves, dy)
    chunks = B * T // Q * H
    between = 28 * B * T * H + 8 * Q * B * T * G + chunks * (8 * P * N + 8) + dy.nbytes
    unread = 4 * chunks  # of the sums that belong one token on, the first place of a tile
    assert moved.read == sum(t.nbytes for t in (*leaves, dy)) + between - unread
    by_token = [g.nbytes for g, t in zip(grads, leaves) if t.shape[:2] == (B, T)]
    states, shares = 2 * 4 * B * H * P * N, 4 * chunks * (2 + P)
    assert moved.written == sum(by_token) + between + states + shares


@pytest.mark.parametrize("operand", ["x", "B"])
def test_offsets_past_two_to_the_31(operand):
    """mamba#503 and others: tokens far apart in memory that is mostly not there."""
    size = {"x": (1, 5, 2, 3), "B": (1, 5, 1, 4)}[operand]
    apart = sparse_tensor((1, 5, 2**29), torch.float32)[..., : size[2] * size[3]]
    apart = apart.unflatten(2, size[2:])
    apart.copy_(torch.randn(size))
    inputs = make()
    found = []
    for tensor in (apart, apart.contiguous()):
        inputs[{"x": 0, "B": 3}[operand]] = tensor.detach()
        leaves = [t.requires_grad_() for t in inputs]
        y = call(ssd_scan, ALL, chunk_size=4, backend="triton")(*leaves).y
        found.append([y, *torch.autograd.grad(y.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_what_it_refuses():
    inputs = make()[:5]
    with pytest.raises(BackendUnavailable, match="got float64"):
        ssd_scan(*(t.double() for t in inputs), backend="triton")
    with pytest.raises(BackendUnavailable, match="transforms differentiate and batch plain"):
        torch.func.vmap(lambda row: ssd_scan(row[None], *inputs[1:], backend="triton").y)(inputs[0])


def test_the_interpreter_runs_on_request_only(monkeypatch):
    called = []
    run = ops._op
    monkeypatch.setattr(ops, "_op", lambda *a: called.append(a) or run(*a))
    ssd_scan(*make()[:5])
    assert not called
    with prefer("triton"):
        ssd_scan(*make()[:5])
    assert len(called) == 1
