from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import (
    CHOICES,
    LENGTHS,
    OPTIONS,
    PADDINGS,
    call,
    packing_ids,
    padding_mask,
    selective_scan_oracle,
)
from support import assert_close, assert_same_function, gradcheck, gradients
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import selective_scan_chunked
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.selective_scan import selective_scan, selective_scan_reference

BACKENDS = ["torch", "chunked"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(selective_scan_chunked, "TOKENS", 4)


def make(B=2, T=5, E=4, N=3, G=1, dtype=torch.float64):
    """The nine tensors of the scan, with step sizes that are positive even without softplus."""
    sizes = [(B, T, E), (B, T, E), (E, N), (B, T, G, N), (B, T, G, N), (E,), (B, T, E), (E,)]
    x, delta, A, Bm, C, D, z, bias = (torch.randn(size, dtype=dtype) for size in sizes)
    state = torch.randn(B, E, N, dtype=dtype)
    return [x, delta.abs(), -A.exp(), Bm, C, D, z, bias.abs(), state]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    options=OPTIONS,
    T=LENGTHS.filter(bool),
    G=st.sampled_from([1, 2, 4]),
    padding=PADDINGS,
    packed=st.booleans(),
)
def test_equals_the_closed_form(backend, options, T, G, padding, packed):
    """Padded = unpadded, packed = separate, reverse = flipped, groups: the oracle takes each
    sequence alone. Field notes, Mamba: left, right and interior padding, seq_idx, groups."""
    mask, seq_ids = padding_mask(padding, 2, T), packing_ids(packed, 2, T)
    where = {"mask": mask, "seq_ids": seq_ids}
    assert_same_function(
        call(selective_scan, options, **where, backend=backend),
        call(selective_scan_oracle, options, **where),
        make(T=T, G=G),
        terms=2 * T * T * 12,
        one_scale=True,
    )


@given(
    options=OPTIONS,
    T=LENGTHS.filter(bool),
    G=st.sampled_from([1, 2]),
    padding=PADDINGS,
    packed=st.booleans(),
    tile=st.sampled_from([1, 7, 1000]),
)
def test_chunked_equals_reference(options, T, G, padding, packed, tile):
    where = {"mask": padding_mask(padding, 3, T), "seq_ids": packing_ids(packed, 3, T)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selective_scan_chunked, "ELEMENTS", tile)
        assert_same_function(
            call(selective_scan, options, **where, backend="chunked"),
            call(selective_scan_reference, options, **where),
            make(B=3, T=T, G=G),
            terms=3 * T * 12,
            one_scale=True,
        )


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize("reverse", [False, True])
def test_lengths_at_the_real_chunk(monkeypatch, T, reverse):
    """Field notes, Mamba: #37, #368 (length no multiple of the block, with bias and softplus)."""
    monkeypatch.setattr(selective_scan_chunked, "TOKENS", 32)
    options = {**CHOICES[-1], "reverse": reverse}
    where = {"mask": torch.rand(2, T) < 0.9, "seq_ids": (torch.rand(2, T) < 0.02).cumsum(1)}
    inputs = make(T=T)
    inputs[1] = inputs[1] * 4 - 6
    assert_same_function(
        call(selective_scan, options, **where, backend="chunked"),
        call(selective_scan_reference, options, **where),
        inputs,
        terms=2 * T * 12,
        one_scale=True,
    )


@pytest.mark.parametrize("choice", range(len(CHOICES)))
def test_gradcheck_of_the_reference(choice):
    options = CHOICES[choice]
    where = {"mask": padding_mask("interior", 2, 3) if options.get("mask") else None}
    where["seq_ids"] = torch.tensor([[0, 0, 1], [0, 1, 1]]) if options.get("seq_ids") else None
    gradcheck(call(selective_scan_reference, options, **where), make(T=3, E=2, N=2, G=2))


@pytest.mark.parametrize("choice", range(len(CHOICES)))
def test_gradcheck_of_the_chunked_backend(choice):
    options = CHOICES[choice]
    where = {"mask": padding_mask("interior", 1, 5) if options.get("mask") else None}
    where["seq_ids"] = torch.tensor([[0, 0, 1, 1, 1]]) if options.get("seq_ids") else None
    leaves = [t.requires_grad_() for t in make(B=1, T=5, E=2, N=2, G=2)]
    function = call(selective_scan, options, **where, backend="chunked")
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@given(T=st.integers(1, 9), cut=st.integers(0, 9), reverse=st.booleans(), padding=PADDINGS)
def test_split_anywhere_equals_whole(backend, T, cut, reverse, padding):
    """Values and gradients, the latter through the state handed over. Field notes, Mamba: initial
    states. Without padding also packed, with a boundary elsewhere than at the cut."""
    cut = min(cut, T)
    mask = padding_mask(padding, 2, T)
    ids = None if padding else (torch.arange(T) > cut).long().expand(2, T)
    options = {**CHOICES[-1], "reverse": reverse}

    def part(at, x, delta, A, B, C, D, z, bias, state):
        where = {n: None if t is None else t[:, at] for n, t in (("mask", mask), ("seq_ids", ids))}
        run = call(selective_scan, options, **where, backend=backend)
        return run(x[:, at], delta[:, at], A, B[:, at], C[:, at], D, z[:, at], bias, state)

    def halves(*tensors):
        parts = [slice(0, cut), slice(cut, T)]
        first, second = parts[::-1] if reverse else parts
        one = part(first, *tensors)
        two = part(second, *tensors[:-1], one.final_state)
        return torch.cat([two.y, one.y] if reverse else [one.y, two.y], 1), two.final_state

    def whole(*tensors):
        return part(slice(None), *tensors)

    assert_same_function(halves, whole, make(T=T), terms=2 * T * 12, one_scale=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_holds_anything(backend):
    """What stands at padding reaches no result and no gradient, not even NaN."""
    mask = torch.tensor([[True, False, True, True, False]])
    inputs = make(B=1)
    dirty = [t.clone() for t in inputs]
    for i in (0, 1, 3, 4, 6):
        dirty[i][:, ~mask[0]] = torch.nan
    run = call(selective_scan, CHOICES[-1], mask=mask, backend=backend)
    leaves = [t.requires_grad_() for t in dirty]
    y, state = run(*leaves)
    expected = run(*inputs)
    assert torch.equal(y, expected.y)
    assert torch.equal(state, expected.final_state)
    assert torch.equal(y[:, ~mask[0]], torch.zeros(1, 2, 4, dtype=y.dtype))
    for grad in torch.autograd.grad(y.sum() + state.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_sequence_of_nan_stays_alone(backend, reverse):
    """In a packed row it reaches no result and no gradient of a token of another sequence; and
    where padding stands after it, the result and the gradient of the gate are 0."""
    inputs = make(B=1, T=9)
    sick = slice(0, 4) if not reverse else slice(5, 9)
    well = slice(5, 9) if not reverse else slice(0, 4)
    inputs[0][:, sick] = torch.nan
    ids = torch.tensor([[0] * 4 + [1] * 5 if not reverse else [0] * 5 + [1] * 4])
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[:, 3 if not reverse else 5] = False  # padding that the NaN's state passes
    options = {**CHOICES[-1], "reverse": reverse}
    options.pop("mask"), options.pop("seq_ids")
    run = call(selective_scan, options, mask=mask, seq_ids=ids, backend=backend)
    leaves = [t.requires_grad_() for t in inputs]
    y = run(*leaves).y
    assert y[:, well].isfinite().all()
    assert (y[:, ~mask[0]] == 0).all()
    grads = torch.autograd.grad(y.sum(), leaves)
    for i in (0, 1, 3, 4, 6):
        assert grads[i][:, well].isfinite().all(), i
        assert (grads[i][:, ~mask[0]] == 0).all(), i


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_large_decay_and_step_sizes_from_minus_30_to_30(backend, reverse):
    """Field notes, Mamba: NaN at large decay; softplus beyond 20 (#574, #713)."""
    inputs = make(T=40, dtype=torch.float64)
    inputs[1] = torch.linspace(-30, 30, 2 * 40 * 4, dtype=torch.float64).reshape(2, 40, 4)
    inputs[1] = inputs[1][:, torch.randperm(40)]
    inputs[2] = -torch.linspace(1, 16, 12, dtype=torch.float64).reshape(4, 3)
    options = {**CHOICES[-1], "reverse": reverse}
    narrow = [t.float() for t in inputs]
    wide = [t.double() for t in narrow]
    assert_same_function(
        lambda *t: [r.double() for r in call(selective_scan, options, backend=backend)(*t)],
        lambda *t: call(selective_scan_reference, options)(*(s.double() for s in t)),
        narrow,
        terms=2 * 40 * 12,
        compute=torch.float32,
        one_scale=True,
    )
    for result in call(selective_scan, options, backend=backend)(*wide):
        assert result.isfinite().all()


def test_softplus_has_no_step():
    """Value and slope from -30 to 45, relative to the exact ones."""
    from brickwork.kernels.selective_scan import step_sizes

    raw = torch.linspace(-30, 45, 1501, dtype=torch.float64, requires_grad=True)
    step = step_sizes(raw, None, True)
    (slope,) = torch.autograd.grad(step.sum(), raw)
    assert_close(step / torch.logaddexp(raw, torch.zeros_like(raw)), torch.ones_like(raw))
    assert_close(slope / torch.sigmoid(raw), torch.ones_like(raw))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_within_its_tolerance_of_float64(backend):
    inputs = make(T=70, dtype=torch.float32)
    run = call(selective_scan, CHOICES[-1], mask=padding_mask("both", 2, 70), backend=backend)
    actual, expected = run(*inputs), run(*(t.double() for t in inputs))
    assert actual.final_state.dtype == torch.float32
    assert_close(actual.y, expected.y, terms=70)
    assert_close(actual.final_state, expected.final_state, terms=70)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_float32_inside(backend, dtype):
    inputs = make(dtype=torch.float32)
    narrow = [t if i in (2, 5, 7, 8) else t.to(dtype) for i, t in enumerate(inputs)]
    run = call(selective_scan, CHOICES[2], backend=backend)
    actual, expected = run(*narrow), run(*(t.float() for t in narrow))
    assert (actual.y.dtype, actual.final_state.dtype) == (dtype, torch.float32)
    assert_close(actual.y, expected.y, terms=15)
    assert_close(actual.final_state, expected.final_state, terms=15)
    leaves = [t.requires_grad_() for t in narrow]
    grads = torch.autograd.grad(run(*leaves).y.float().sum(), leaves, allow_unused=True)
    assert all(g is None or g.dtype == t.dtype for g, t in zip(grads, leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend):
    """Field notes, Mamba: fla#1264. The backward of plain operators is PyTorch's own affair, and
    meant to be called outside autocast."""
    run = call(selective_scan, CHOICES[2], backend=backend)
    inputs = make(dtype=torch.float32)
    values, grads = gradients(run, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        values_inside, grads_inside = gradients(run, inputs)
    assert all(torch.equal(a, b) for a, b in zip(values, values_inside))
    if backend != "torch":
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, grads_inside))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_expanded_input_and_gradients(backend):
    """Field notes, Mamba: fla#871, fla#1138 (dy expanded by a sum), mamba#537 (strides of A)."""
    x, delta, A, B, C, D, z, bias, state = make(B=2, T=6, E=4, N=3, dtype=torch.float64)
    strided = [
        x.transpose(1, 2).contiguous().transpose(1, 2),
        delta[:, :, :1].expand(-1, -1, 4),
        A.mT.contiguous().mT,
        torch.stack([B, C], -1)[..., 0],
        torch.stack([B, C], -1)[..., 1],
        D,
        torch.cat([z, x], -1).chunk(2, -1)[0],
        bias[:1].expand(4),
        state.mT.contiguous().mT,
    ]
    run = call(selective_scan, CHOICES[-1], backend=backend)
    leaves = [t.detach().requires_grad_() for t in strided]  # detach keeps the strides
    same = [t.contiguous().requires_grad_() for t in strided]
    assert not any(t.is_contiguous() for t in leaves if t.dim() > 2)
    actual, expected = run(*leaves), run(*same)
    assert_close(actual.y, expected.y, terms=24)
    found = torch.autograd.grad(actual.y.sum(), leaves)
    wanted = torch.autograd.grad(expected.y, same, torch.ones_like(expected.y))
    for a, e in zip(found, wanted):
        assert_close(a, e, terms=6 * 48)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_stay_and_a_second_backward_gives_the_same(backend):
    inputs = make()
    leaves = [t.clone().requires_grad_() for t in inputs]
    upstream = torch.randn(2, 5, 4, dtype=torch.float64)
    kept = upstream.clone()
    y = call(selective_scan, CHOICES[-1], mask=padding_mask("both", 2, 5), backend=backend)(
        *leaves
    ).y
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(upstream, kept)
    assert all(torch.equal(a, b) for a, b in zip(leaves, inputs))


def test_double_backward_of_the_chunked_backend_raises():
    leaves = [t.requires_grad_() for t in make()]
    y = call(selective_scan, CHOICES[2], backend="chunked")(*leaves).y
    (dx,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_and_meta(backend):
    for sizes in ({"B": 0}, {"T": 0}):
        inputs = make(**sizes)
        y, state = call(selective_scan, CHOICES[-1], backend=backend)(*inputs)
        assert y.shape == inputs[0].shape
        assert torch.equal(state, inputs[-1])
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    run = call(selective_scan, CHOICES[-1], mask=ids > 0, seq_ids=ids, backend=backend)
    y, state = run(*(t.to("meta") for t in make()))
    assert (y.shape, state.shape) == ((2, 5, 4), (2, 4, 3))
    assert y.is_meta


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph_and_checkpoints(backend):
    run = call(selective_scan, CHOICES[-1], backend=backend)
    inputs = make(T=3)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled, run, inputs, terms=36)
    again = lambda *tensors: checkpoint(run, *tensors, use_reentrant=False)  # noqa: E731
    assert_same_function(again, run, inputs, terms=36)


def test_registered_ops_pass_opcheck():
    mask = padding_mask("both", 2, 5)
    starts = torch.rand(2, 5) < 0.3
    leaves = [t.float().requires_grad_() for t in make()]
    arguments = (*leaves, mask, starts, True, True)
    torch.library.opcheck(selective_scan_chunked._forward, (*arguments, True))
    with torch.no_grad():
        y, state, kept = selective_scan_chunked._forward(*arguments, True)
        plain = [t.detach() for t in leaves]
    arguments = (*plain, mask, starts, True, True)
    torch.library.opcheck(selective_scan_chunked._backward, (y, state, kept, *arguments))


def test_func_transforms_take_plain_operators():
    x, delta, A, B, C, *_ = make(B=3)
    one = lambda *t: selective_scan(*(s[None] for s in t[:2]), A, *(s[None] for s in t[2:])).y[0]  # noqa: E731
    mapped = torch.func.vmap(one)(x, delta, B, C)
    assert_close(mapped, selective_scan(x, delta, A, B, C).y, terms=15)
    with pytest.raises(BackendUnavailable, match=r"torch\.func"):
        torch.func.vmap(
            lambda x, d: selective_scan(x[None], d[None], A, B[:1], C[:1], backend="chunked").y
        )(x, delta)


def test_only_boundary_states_are_kept_for_backward(monkeypatch):
    monkeypatch.setattr(selective_scan_chunked, "TOKENS", 32)
    x, delta, A, B, C, *_ = make(B=1, T=256, E=8, N=16, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        selective_scan(x.requires_grad_(), delta, A, B, C, backend="chunked")
    assert (
        sum(t.numel() for t in saved) <= 2 * x.numel() + 2 * B.numel() + A.numel() + x.numel() // 2
    )


def test_errors():
    x, delta, A, B, C, D, z, bias, state = make()
    with pytest.raises(ValueError, match=r"delta must have shape \(B, T, E\) with E = 4 as in x"):
        selective_scan(x, delta[..., :3], A, B, C)
    with pytest.raises(
        ValueError, match=r"A must have shape \(E, N\) with E = 4 as in x, got \(3, 3\)"
    ):
        selective_scan(x, delta, A[:3], B, C)
    with pytest.raises(ValueError, match=r"C must have shape \(B, T, G, N\) with N = 3 as in A"):
        selective_scan(x, delta, A, B, C[..., :2])
    with pytest.raises(ValueError, match=r"C must have shape \(B, T, N\), got \(2, 5, 1, 3\)"):
        selective_scan(x, delta, A, B[:, :, 0], C)
    with pytest.raises(
        ValueError, match="groups of B must divide the channels of x, got G = 3, E = 4"
    ):
        selective_scan(x, delta, A, B.expand(-1, -1, 3, -1), C.expand(-1, -1, 3, -1))
    with pytest.raises(ValueError, match=r"initial_state must have shape \(B, E, N\) with B = 2"):
        selective_scan(x, delta, A, B, C, initial_state=state[:1])
    with pytest.raises(ValueError, match=r"D must have shape \(E,\)"):
        selective_scan(x, delta, A, B, C, D=D[:2], z=z, delta_bias=bias)
    with pytest.raises(ValueError, match=r"A must be floating point, got torch\.complex128"):
        selective_scan(x, delta, A.to(torch.complex128), B, C)
    with pytest.raises(ValueError, match="softplus must be True or False, got 1"):
        selective_scan(x, delta, A, B, C, softplus=1)
    with pytest.raises(ValueError, match="reverse must be True or False, got None"):
        selective_scan(x, delta, A, B, C, reverse=None)
    with pytest.raises(ValueError, match=r"mask must have shape \(B, T\) = \(2, 5\)"):
        selective_scan(x, delta, A, B, C, mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        selective_scan(x, delta, A, B, C, backend="fast")
    with pytest.raises(BackendUnavailable, match="selective_scan has no backend 'grouped'"):
        selective_scan(x, delta, A, B, C, backend="grouped")
