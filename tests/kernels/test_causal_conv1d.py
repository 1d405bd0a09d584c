from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import LENGTHS, PADDINGS, packing_ids, padding_mask, sequences
from support import assert_close, assert_same_function, gradcheck, gradients
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import causal_conv1d_chunked, causal_conv1d_cpu
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.causal_conv1d import causal_conv1d, causal_conv1d_reference

NO_CPU = causal_conv1d_cpu.unavailable_here()
CPU = pytest.param("cpu", marks=pytest.mark.skipif(NO_CPU is not None, reason=str(NO_CPU)))
BACKENDS = ["torch", "chunked", CPU]
WIDTHS = st.sampled_from([1, 2, 4, 6])
OPTIONS = st.fixed_dictionaries(
    {
        "bias": st.booleans(),
        "initial_state": st.booleans(),
        "reverse": st.booleans(),
        "activation": st.sampled_from([None, "silu"]),
    }
)
FULL = {"bias": True, "initial_state": True, "reverse": True, "activation": "silu"}


def make(B=2, T=5, C=3, W=4, dtype=torch.float64):
    """x, weight, bias, initial_state."""
    sizes = [(B, T, C), (C, W), (C,), (B, C, W - 1)]
    return [torch.randn(size, dtype=dtype) for size in sizes]


def call(function, given, **fixed):
    def run(x, weight, bias, state):
        return function(
            x,
            weight,
            bias if given["bias"] else None,
            initial_state=state if given["initial_state"] else None,
            reverse=given["reverse"],
            activation=given["activation"],
            **fixed,
        )

    return run


def oracle(x, weight, bias, *, initial_state, reverse, activation, mask, seq_ids):
    """Each sequence's tokens alone, in scan order, through PyTorch's convolution."""
    B, T, C = x.shape
    W = weight.shape[1]
    y, final = torch.zeros_like(x), []
    for row in range(B):
        last = x.new_zeros(C, W - 1) if initial_state is None else initial_state[row]
        for number, tokens in enumerate(sequences(mask, seq_ids, row, T, reverse)):
            before = last if number == 0 else torch.zeros_like(last)
            line = torch.cat([before, x[row, tokens].mT], 1)
            out = torch.nn.functional.conv1d(line[None], weight[:, None], bias, groups=C)[0].mT
            out = torch.nn.functional.silu(out) if activation else out
            y = y.index_put((torch.tensor(row), torch.tensor(tokens)), out)
            last = line[:, len(tokens) :]
        final.append(last)
    nothing = sum((0 * t).sum() for t in (x, weight, bias, initial_state) if t is not None)
    return y + nothing, torch.stack(final) + nothing


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    options=OPTIONS,
    T=LENGTHS,
    W=WIDTHS,
    padding=PADDINGS,
    packed=st.booleans(),
    tile=st.sampled_from([1, 20, 10**6]),
)
def test_equals_pytorch_on_each_sequence_alone(backend, options, T, W, padding, packed, tile):
    """Any width, either direction, padding anywhere, packing, final state from real tokens only.
    Field notes, Mamba: #437 and #393 (truncation, width 1), #383 and #48256 (states, seq_idx)."""
    where = {"mask": padding_mask(padding, 3, T), "seq_ids": packing_ids(packed, 3, T)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_conv1d_chunked, "ELEMENTS", tile)
        actual = call(causal_conv1d, options, **where, backend=backend)
        expected = call(oracle, options, **where)
        inputs = make(B=3, T=T, W=W)
        for a, e in zip(actual(*inputs), expected(*inputs)):
            assert_close(a, e, terms=W)
        leaves = [t.requires_grad_() for t in inputs]
        grads = [
            torch.autograd.grad(
                sum((o * torch.linspace(1, 2, o.numel()).view_as(o)).sum() for o in f(*leaves)),
                leaves,
                allow_unused=True,
                materialize_grads=True,
            )
            for f in (actual, expected)
        ]
        for a, e in zip(*grads):
            assert_close(a, e, terms=3 * (T + W) * W)


@pytest.mark.parametrize("options", [FULL, {**FULL, "reverse": False, "activation": None}])
@pytest.mark.parametrize("padding", [None, "both", "interior"])
def test_gradcheck(options, padding):
    where = {
        "mask": padding_mask(padding, 2, 4),
        "seq_ids": torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]),
    }
    gradcheck(call(causal_conv1d_reference, options, **where), make(T=4, C=2, W=3))
    leaves = [t.requires_grad_() for t in make(T=4, C=2, W=3)]
    fast = call(causal_conv1d, options, **where, backend="chunked")
    assert torch.autograd.gradcheck(fast, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    T=st.integers(0, 8),
    cut=st.integers(0, 8),
    W=WIDTHS,
    reverse=st.booleans(),
    padding=PADDINGS,
)
def test_split_anywhere_equals_whole(backend, T, cut, W, reverse, padding):
    """B7; field notes, Mamba: #46032 (calls of several tokens with a state)."""
    cut = min(cut, T)
    mask = padding_mask(padding, 2, T)
    run = {"reverse": reverse, "activation": "silu", "backend": backend}

    def part(at, x, weight, bias, state):
        here = None if mask is None else mask[:, at]
        return causal_conv1d(x[:, at], weight, bias, initial_state=state, mask=here, **run)

    def halves(*tensors):
        parts = [slice(0, cut), slice(cut, T)]
        first, second = parts[::-1] if reverse else parts
        one = part(first, *tensors)
        two = part(second, *tensors[:-1], one.final_state)
        return torch.cat([two.y, one.y] if reverse else [one.y, two.y], 1), two.final_state

    def whole(*tensors):
        return part(slice(None), *tensors)

    assert_same_function(halves, whole, make(T=T, W=W), terms=4 * (T + W) * W, one_scale=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_holds_anything(backend):
    """Not even NaN at padding reaches a result or a gradient."""
    for mask in (torch.tensor([[0, 1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 1, 0]])):
        inputs = make(B=1)
        dirty = inputs[0].masked_fill(mask[..., None] == 0, torch.nan).requires_grad_()
        run = call(causal_conv1d, FULL, mask=mask, backend=backend)
        actual, expected = run(dirty, *inputs[1:]), run(*inputs)
        for a, e in zip(actual, expected):
            assert_close(a, e)
        weight = inputs[1].requires_grad_()
        loss = run(dirty, weight, *inputs[2:]).y.sum()
        for grad in torch.autograd.grad(loss, [dirty, weight]):
            assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(backend, dtype):
    """y and the state in x's dtype, the sums in float32, for weights of any dtype."""
    inputs = make(T=50, dtype=torch.float32)
    narrow = [inputs[0].to(dtype), inputs[1], inputs[2].to(dtype), inputs[3].to(dtype)]
    run = call(causal_conv1d, FULL, backend=backend)
    actual, expected = run(*narrow), run(*(t.double() for t in narrow))
    assert (actual.y.dtype, actual.final_state.dtype) == (dtype, dtype)
    assert_close(actual.y, expected.y, terms=5)
    assert_close(actual.final_state, expected.final_state)
    leaves = [t.requires_grad_() for t in narrow]
    grads = torch.autograd.grad(run(*leaves).y.float().sum(), leaves)
    assert all(g.dtype == t.dtype for g, t in zip(grads, leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend):
    run = call(causal_conv1d, FULL, backend=backend)
    inputs = make(dtype=torch.float32)
    outside = gradients(run, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(run, inputs)
    assert all(torch.equal(a, b) for x, y in zip(outside, inside) for a, b in zip(x, y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_expanded_input_and_gradients(backend):
    """Any channel count and stride. Field notes, Mamba: fla#871, #345, #413 and others."""
    x, weight, bias, state = make(T=7)
    strided = [
        torch.cat([x, x], -1)[..., 1:4],
        weight.mT.contiguous().mT,
        bias[:1].expand(3),
        state.mT.contiguous().mT,
    ]
    same = [t.contiguous() for t in strided]
    run = call(causal_conv1d, FULL, backend=backend)
    assert_close(run(*strided).y, run(*same).y, terms=5)
    leaf, other = strided[0].detach().requires_grad_(), same[0].detach().requires_grad_()
    (a,) = torch.autograd.grad(run(leaf, *strided[1:]).y.sum(), leaf)
    y = run(other, *same[1:]).y
    (e,) = torch.autograd.grad(y, other, torch.ones_like(y))
    assert_close(a, e, terms=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_stay_and_a_second_backward_gives_the_same(backend):
    inputs = make()
    leaves = [t.clone().requires_grad_() for t in inputs]
    upstream = torch.randn_like(inputs[0])
    kept = upstream.clone()
    y = call(causal_conv1d, FULL, mask=padding_mask("both", 2, 5), backend=backend)(*leaves).y
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(upstream, kept)
    assert all(torch.equal(a, b) for a, b in zip(leaves, inputs))


def test_double_backward_of_the_chunked_backend_raises():
    leaves = [t.requires_grad_() for t in make()]
    y = call(causal_conv1d, FULL, backend="chunked")(*leaves).y
    (dx,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_and_fake(backend):
    for sizes in ({"B": 0}, {"T": 0}, {"W": 1}):
        inputs = make(**sizes)
        y, state = call(causal_conv1d, FULL, backend=backend)(*inputs)
        assert y.shape == inputs[0].shape
        assert state.shape == inputs[3].shape
    meta = [t.to("meta") for t in make()]
    mask = torch.ones(2, 5, dtype=torch.bool, device="meta")
    y, state = call(causal_conv1d, FULL, mask=mask)(*meta)
    assert y.is_meta
    assert (y.shape, state.shape) == ((2, 5, 3), (2, 3, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_to_one_graph_and_checkpoints(backend):
    mask, ids = padding_mask("interior", 2, 5), packing_ids(True, 2, 5)
    run = call(causal_conv1d, FULL, mask=mask, seq_ids=ids, backend=backend)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled, run, make(), terms=20)

    def again(*tensors):
        return checkpoint(run, *tensors, use_reentrant=False)

    assert_same_function(again, run, make(), terms=20)


def test_registered_ops_pass_opcheck():
    mask, starts = padding_mask("interior", 2, 5), torch.rand(2, 5) < 0.3
    leaves = [t.float().requires_grad_() for t in make()]
    torch.library.opcheck(causal_conv1d_chunked._forward, (*leaves, mask, starts, True, True))
    plain = [t.detach() for t in leaves]
    torch.library.opcheck(
        causal_conv1d_chunked._backward,
        (torch.randn(2, 5, 3), *plain, mask, starts, True, True),
    )


def test_func_transforms_take_plain_operators():
    x, weight, bias, _ = make()
    mapped = torch.func.vmap(lambda row: causal_conv1d(row[None], weight, bias).y[0])(x)
    assert_close(mapped, causal_conv1d(x, weight, bias).y, terms=5)
    with pytest.raises(BackendUnavailable, match=r"torch\.func"):
        torch.func.vmap(lambda row: causal_conv1d(row[None], weight, backend="chunked").y)(x)


def test_errors():
    x, weight, bias, state = make()
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, C\), got \(5, 3\)"):
        causal_conv1d(x[0], weight)
    with pytest.raises(ValueError, match=r"weight must have shape \(C, W\) with C = 3 as in x"):
        causal_conv1d(x, weight.mT)
    with pytest.raises(ValueError, match=r"weight must have a width W of at least 1, got \(3, 0\)"):
        causal_conv1d(x, weight[:, :0])
    with pytest.raises(ValueError, match=r"bias must have shape \(C,\)"):
        causal_conv1d(x, weight, bias[:2])
    with pytest.raises(ValueError, match=r"activation must be one of .* got 'swish'"):
        causal_conv1d(x, weight, activation="swish")
    with pytest.raises(
        ValueError, match=r"initial_state must have shape \(B, C, W - 1\) = \(2, 3, 3\)"
    ):
        causal_conv1d(x, weight, initial_state=state[..., :2])
    with pytest.raises(ValueError, match="reverse must be True or False, got 1"):
        causal_conv1d(x, weight, reverse=1)
    with pytest.raises(ValueError, match=r"x must be floating point, got torch\.int64"):
        causal_conv1d(x.long(), weight)
    with pytest.raises(ValueError, match="mask must be bool or integer"):
        causal_conv1d(x, weight, mask=torch.ones(2, 5))
    with pytest.raises(BackendUnavailable, match="causal_conv1d has no backend 'grouped'"):
        causal_conv1d(x, weight, backend="grouped")
    with pytest.raises(BackendUnavailable, match="it takes CPU tensors, got meta"):
        causal_conv1d(x.to("meta"), weight.to("meta"), backend="chunked")
