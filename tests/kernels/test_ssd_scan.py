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
    ssd_scan_oracle,
)
from support import assert_close, assert_same_function, gradcheck, gradients
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import ssd_scan_chunked, ssd_scan_cpu
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.ssd_scan import segment_sums, ssd_scan, ssd_scan_reference

NO_CPU = ssd_scan_cpu.unavailable_here()
CPU = pytest.param("cpu", marks=pytest.mark.skipif(NO_CPU is not None, reason=str(NO_CPU)))
BACKENDS = ["torch", "chunked", CPU]
GROUPS = st.sampled_from([1, 2, 4])


def make(B=2, T=5, H=4, P=2, N=3, G=1, D="HP", dtype=torch.float64):
    """The nine tensors of the scan, with step sizes that are positive even without softplus."""
    sizes = [(B, T, H, P), (B, T, H), (H,), (B, T, G, N), (B, T, G, N)]
    sizes += [(H, P) if D == "HP" else (H,), (B, T, H, P), (H,), (B, H, P, N)]
    x, delta, A, Bm, C, D, z, bias, state = (torch.randn(size, dtype=dtype) for size in sizes)
    return [x, delta.abs(), -A.exp(), Bm, C, D, z, bias.abs(), state]


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    options=OPTIONS,
    T=LENGTHS.filter(bool),
    G=GROUPS,
    D=st.sampled_from(["H", "HP"]),
    padding=PADDINGS,
    packed=st.booleans(),
)
def test_equals_the_closed_form(backend, options, T, G, D, padding, packed):
    """Padded = unpadded, packed = separate, reverse = flipped, any length and chunk, groups, D per
    head or channel: the oracle takes each sequence alone. B4; field notes, Mamba: padding, seq_idx
    (values and gradients, #746), #352, #547 and transformers#37533 (groups)."""
    where = {"mask": padding_mask(padding, 2, T), "seq_ids": packing_ids(packed, 2, T)}
    assert_same_function(
        call(ssd_scan, options, **where, backend=backend, chunk_size=4),
        call(ssd_scan_oracle, options, **where),
        make(T=T, G=G, D=D),
        terms=2 * T * T * 24,
        one_scale=True,
    )


@given(
    options=OPTIONS,
    T=LENGTHS.filter(bool),
    G=GROUPS,
    padding=PADDINGS,
    packed=st.booleans(),
    chunk=st.sampled_from([1, 3, 64]),
    block=st.sampled_from([1, 500]),
)
def test_chunked_equals_reference(options, T, G, padding, packed, chunk, block):
    where = {"mask": padding_mask(padding, 3, T), "seq_ids": packing_ids(packed, 3, T)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssd_scan_chunked, "ELEMENTS", block)
        assert_same_function(
            call(ssd_scan, options, **where, backend="chunked", chunk_size=chunk),
            call(ssd_scan_reference, options, **where, chunk_size=5),
            make(B=3, T=T, G=G),
            terms=3 * T * 24,
            one_scale=True,
        )


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("reverse", [False, True])
def test_lengths_at_the_default_chunk(T, reverse):
    options = {**CHOICES[-1], "reverse": reverse}
    where = {"mask": torch.rand(2, T) < 0.9, "seq_ids": (torch.rand(2, T) < 0.02).cumsum(1)}
    inputs = make(T=T)
    inputs[1] = inputs[1] * 4 - 6
    assert_same_function(
        call(ssd_scan, options, **where, backend="chunked"),
        call(ssd_scan_reference, options, **where),
        inputs,
        terms=2 * T * 24,
        one_scale=True,
    )


@pytest.mark.parametrize("choice", range(len(CHOICES)))
def test_gradcheck_of_the_reference(choice):
    options = CHOICES[choice]
    where = {"mask": padding_mask("interior", 2, 3) if options.get("mask") else None}
    where["seq_ids"] = torch.tensor([[0, 0, 1], [0, 1, 1]]) if options.get("seq_ids") else None
    inputs = make(T=3, H=2, N=2, G=2, D="H" if choice == 2 else "HP")
    gradcheck(call(ssd_scan_reference, options, **where, chunk_size=2), inputs)


@pytest.mark.parametrize("choice", range(len(CHOICES)))
def test_gradcheck_of_the_chunked_backend(choice):
    options = CHOICES[choice]
    where = {"mask": padding_mask("interior", 1, 5) if options.get("mask") else None}
    where["seq_ids"] = torch.tensor([[0, 0, 1, 1, 1]]) if options.get("seq_ids") else None
    leaves = make(B=1, T=5, H=2, N=2, G=2, D="H" if choice == 2 else "HP")
    leaves = [t.requires_grad_() for t in leaves]
    function = call(ssd_scan, options, **where, backend="chunked", chunk_size=2)
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@given(T=st.integers(1, 9), cut=st.integers(0, 9), reverse=st.booleans(), padding=PADDINGS)
def test_split_anywhere_equals_whole(backend, T, cut, reverse, padding):
    """Values and gradients, the latter through the state handed over. Field notes, Mamba: initial
    states (vLLM#22034, #23279: decay from the start of the sequence, not of the chunk)."""
    cut = min(cut, T)
    mask = padding_mask(padding, 2, T)
    ids = None if padding else (torch.arange(T) > cut).long().expand(2, T)
    options = {**CHOICES[-1], "reverse": reverse}

    def part(at, x, delta, A, B, C, D, z, bias, state):
        where = {n: None if t is None else t[:, at] for n, t in (("mask", mask), ("seq_ids", ids))}
        run = call(ssd_scan, options, **where, backend=backend, chunk_size=3)
        return run(x[:, at], delta[:, at], A, B[:, at], C[:, at], D, z[:, at], bias, state)

    def halves(*tensors):
        parts = [slice(0, cut), slice(cut, T)]
        first, second = parts[::-1] if reverse else parts
        one = part(first, *tensors)
        two = part(second, *tensors[:-1], one.final_state)
        return torch.cat([two.y, one.y] if reverse else [one.y, two.y], 1), two.final_state

    def whole(*tensors):
        return part(slice(None), *tensors)

    assert_same_function(halves, whole, make(T=T), terms=2 * T * 24, one_scale=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_holds_anything(backend):
    """What stands at padding reaches no result and no gradient, not even NaN."""
    mask = torch.tensor([[True, False, True, True, False]])
    inputs = make(B=1)
    dirty = [t.clone() for t in inputs]
    for i in (0, 1, 3, 4, 6):
        dirty[i][:, ~mask[0]] = torch.nan
    run = call(ssd_scan, CHOICES[-1], mask=mask, backend=backend, chunk_size=2)
    leaves = [t.requires_grad_() for t in dirty]
    y, state = run(*leaves)
    expected = run(*inputs)
    assert torch.equal(y, expected.y)
    assert torch.equal(state, expected.final_state)
    assert not y[:, ~mask[0]].any()
    for grad in torch.autograd.grad(y.sum() + state.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("A", [-1e37, -torch.inf])
def test_a_decay_that_forgets_at_once(backend, A):
    """The sum of a chunk's exponents is infinite in float32."""
    x = torch.ones(1, 3, 1, 1)
    y, state = ssd_scan(x, x[..., 0] * 30, torch.tensor([A]), x, x, backend=backend)
    assert (y == 30).all()
    assert (state == 30).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_give_what_they_give_without_the_others(backend):
    """Without D there is no product with it, and padding is 0 whatever the state is."""
    x = torch.full((1, 1, 1, 1), torch.inf)
    one = torch.ones(1, 1, 1)
    five = (x, one, -one[0, 0], one[..., None], one[..., None])
    assert ssd_scan(*five, backend=backend).y.item() == torch.inf
    y, state = ssd_scan(*five, initial_state=x, mask=one[0] < 0, backend=backend)
    assert (y.item(), state.item()) == (0, torch.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_large_decay_and_step_sizes_from_minus_30_to_30(backend, reverse):
    """Float32 against float64, small steps after large ones. Field notes, Mamba: #352, #353, #445,
    #713, Bi-Mamba2#1 (exp of positive differences in the masked half), softplus beyond 20."""
    inputs = make(T=80)
    raw = torch.linspace(-30, 30, 2 * 80 * 4, dtype=torch.float64).reshape(2, 80, 4)
    inputs[1] = raw[:, torch.randperm(80)]
    inputs[2] = -torch.linspace(1, 16, 4, dtype=torch.float64)
    options = {**CHOICES[-1], "reverse": reverse}
    narrow = [t.float() for t in inputs]
    assert_same_function(
        lambda *t: [r.double() for r in call(ssd_scan, options, backend=backend)(*t)],
        lambda *t: call(ssd_scan_oracle_by_steps, options)(*(s.double() for s in t)),
        narrow,
        terms=2 * 80 * 24,
        compute=torch.float32,
        one_scale=True,
    )


def ssd_scan_oracle_by_steps(
    x, delta, A, B, C, *, D, z, delta_bias, softplus, reverse, initial_state
):
    """The recurrence itself, one token after the other."""
    assert softplus
    step = torch.logaddexp(delta + delta_bias, torch.zeros_like(delta))
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state, y = initial_state, [x[:, 0]] * x.shape[1]
    for t in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        push = (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = torch.exp(step[:, t] * A)[..., None, None] * state + push
        out = (state * C[:, t, :, None, :]).sum(-1) + D * x[:, t]
        y[t] = out * torch.nn.functional.silu(z[:, t])
    return torch.stack(y, 1), state


def test_small_steps_after_a_large_one_keep_their_precision():
    """A difference of running sums would be off by 3e-3 here."""
    decay = torch.full((1, 1, 64), -1e-3)
    decay[..., 20] = -3e4
    expected = segment_sums(decay.double(), None, False)[0].exp()
    for pairs in (
        segment_sums(decay, None, False)[0].exp(),
        ssd_scan_chunked._decays(decay * ssd_scan_chunked.LOG2E, None, False)[0],
    ):
        assert_close(pairs, expected, terms=64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_within_its_tolerance_of_float64(backend):
    inputs = make(T=70, dtype=torch.float32)
    run = call(ssd_scan, CHOICES[-1], mask=padding_mask("both", 2, 70), backend=backend)
    actual, expected = run(*inputs), run(*(t.double() for t in inputs))
    assert actual.final_state.dtype == torch.float32
    assert_close(actual.y, expected.y, terms=70)
    assert_close(actual.final_state, expected.final_state, terms=70)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_float32_inside(backend, dtype):
    inputs = make(dtype=torch.float32)
    narrow = [t if i in (2, 5, 7, 8) else t.to(dtype) for i, t in enumerate(inputs)]
    run = call(ssd_scan, CHOICES[2], backend=backend)
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
    run = call(ssd_scan, CHOICES[2], backend=backend)
    inputs = make(dtype=torch.float32)
    values, grads = gradients(run, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        values_inside, grads_inside = gradients(run, inputs)
    assert all(torch.equal(a, b) for a, b in zip(values, values_inside))
    if backend != "torch":
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, grads_inside))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_expanded_input_and_gradients(backend):
    """Field notes, Mamba: fla#871, fla#1138 (dy expanded by a sum; parts of one tensor)."""
    x, delta, A, B, C, D, z, bias, state = make(T=6)
    joined = torch.cat([x.flatten(2), B.flatten(2), C.flatten(2)], -1).split([8, 3, 3], -1)
    strided = [
        joined[0].unflatten(-1, (4, 2)),
        delta[:, :, :1].expand(-1, -1, 4),
        A,
        joined[1].unsqueeze(2),
        joined[2].unsqueeze(2),
        D.mT.contiguous().mT,
        z.transpose(1, 2).contiguous().transpose(1, 2),
        bias[:1].expand(4),
        state.mT.contiguous().mT,
    ]
    run = call(ssd_scan, CHOICES[-1], backend=backend, chunk_size=4)
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
    upstream = torch.randn_like(inputs[0])
    kept = upstream.clone()
    y = call(ssd_scan, CHOICES[-1], mask=padding_mask("both", 2, 5), backend=backend)(*leaves).y
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(upstream, kept)
    assert all(torch.equal(a, b) for a, b in zip(leaves, inputs))


def test_double_backward_of_the_chunked_backend_raises():
    leaves = [t.requires_grad_() for t in make()]
    y = call(ssd_scan, CHOICES[2], backend="chunked")(*leaves).y
    (dx,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    for sizes in ({"B": 0}, {"T": 0}):
        inputs = make(**sizes)
        y, state = call(ssd_scan, CHOICES[-1], backend=backend)(*inputs)
        assert y.shape == inputs[0].shape
        assert torch.equal(state, inputs[-1])


@pytest.mark.parametrize("backend", ["auto", "torch", "chunked"])
def test_meta(backend):
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    run = call(ssd_scan, CHOICES[-1], mask=ids > 0, seq_ids=ids, backend=backend)
    y, state = run(*(t.to("meta") for t in make()))
    assert (y.shape, state.shape) == ((2, 5, 4, 2), (2, 4, 2, 3))
    assert y.is_meta


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph_and_checkpoints(backend):
    run = call(ssd_scan, CHOICES[-1], backend=backend, chunk_size=2)
    inputs = make(T=3)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled, run, inputs, terms=72)

    def again(*tensors):
        return checkpoint(run, *tensors, use_reentrant=False)

    assert_same_function(again, run, inputs, terms=72)


def test_registered_ops_pass_opcheck():
    mask = padding_mask("both", 2, 5)
    starts = torch.rand(2, 5) < 0.3
    leaves = [t.float().requires_grad_() for t in make()]
    arguments = (*leaves, mask, starts, True, True, 2)
    torch.library.opcheck(ssd_scan_chunked._forward, (*arguments, True))
    with torch.no_grad():
        y, state, kept = ssd_scan_chunked._forward(*arguments, True)
    arguments = (*(t.detach() for t in leaves), mask, starts, True, True, 2)
    torch.library.opcheck(ssd_scan_chunked._backward, (y, state, kept, *arguments))


def test_func_transforms_take_plain_operators():
    x, delta, A, B, C, *_ = make(B=3)

    def one(x, delta, B, C):
        return ssd_scan(x[None], delta[None], A, B[None], C[None]).y[0]

    mapped = torch.func.vmap(one)(x, delta, B, C)
    assert_close(mapped, ssd_scan(x, delta, A, B, C).y, terms=15)
    with pytest.raises(BackendUnavailable, match=r"torch\.func"):
        torch.func.vmap(
            lambda x: ssd_scan(x[None], delta[:1], A, B[:1], C[:1], backend="chunked").y
        )(x)


def test_chunk_size_changes_nothing_else():
    inputs = make(T=9)
    whole = call(ssd_scan, CHOICES[-1], chunk_size=9)(*inputs)
    for chunk in (1, 2, 4, 100):
        for a, b in zip(call(ssd_scan, CHOICES[-1], chunk_size=chunk)(*inputs), whole):
            assert_close(a, b, terms=54)


def test_errors():
    x, delta, A, B, C, D, _, _, state = make()
    with pytest.raises(ValueError, match=r"delta must have shape \(B, T, H\) with H = 4 as in x"):
        ssd_scan(x, delta[..., :3], A, B, C)
    with pytest.raises(
        ValueError, match=r"A must have shape \(H,\) with H = 4 as in x, got \(3,\)"
    ):
        ssd_scan(x, delta, A[:3], B, C)
    with pytest.raises(ValueError, match=r"B must have shape \(B, T, G, N\), got \(2, 5, 3\)"):
        ssd_scan(x, delta, A, B[:, :, 0], C)
    with pytest.raises(
        ValueError, match="groups of B must divide the heads of x, got G = 3, H = 4"
    ):
        ssd_scan(x, delta, A, B.expand(-1, -1, 3, -1), C.expand(-1, -1, 3, -1))
    with pytest.raises(
        ValueError, match=r"D must have shape \(H, P\) with P = 2 as in x, got \(4, 1\)"
    ):
        ssd_scan(x, delta, A, B, C, D=D[:, :1])
    with pytest.raises(
        ValueError, match=r"initial_state must have shape \(B, H, P, N\) with B = 2"
    ):
        ssd_scan(x, delta, A, B, C, initial_state=state[:1])
    with pytest.raises(ValueError, match=r"A must be floating point, got torch\.int64"):
        ssd_scan(x, delta, A.long(), B, C)
    with pytest.raises(ValueError, match="chunk_size must be an integer of at least 1, got 0"):
        ssd_scan(x, delta, A, B, C, chunk_size=0)
    with pytest.raises(ValueError, match="softplus must be True or False, got 1"):
        ssd_scan(x, delta, A, B, C, softplus=1)
    with pytest.raises(ValueError, match="seq_ids must be integers"):
        ssd_scan(x, delta, A, B, C, seq_ids=delta[..., 0])
    with pytest.raises(BackendUnavailable, match="ssd_scan has no backend 'grouped'"):
        ssd_scan(x, delta, A, B, C, backend="grouped")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", ["chunked", CPU])
def test_gradients_beside_a_step_that_dwarfs_the_others(backend, reverse):
    """The gradients of A and of the steps around one that is 3e8 times as large: none may be lost
    in a difference of sums that hold those of the large one."""
    x, _, A, B, C, *_ = make(B=1, T=40)
    delta = torch.full(x.shape[:3], 1e-3)
    delta[:, 20] = 3e5

    def run(scan, dtype, **where):
        leaves = [t.float().to(dtype).requires_grad_() for t in (x, delta, A, B, C)]
        y = scan(*leaves, reverse=reverse, **where).y
        return torch.autograd.grad(y.sum(), leaves)

    found = run(ssd_scan, torch.float32, backend=backend)
    expected = run(ssd_scan_reference, torch.float64)
    for a, e in zip(found, expected):
        assert_close(a, e, terms=40 * 24)
    small = torch.arange(40) != 20
    assert_close(found[1][:, small], expected[1][:, small], terms=40 * 24)
