from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, gradcheck

from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.swiglu import swiglu, swiglu_reference

SHAPES = st.sampled_from([(), (1,), (3,), (2, 33), (2, 3, 5), (0, 4), (4, 0)])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CASTS = ["once", "before_up"]


@given(shape=SHAPES)
def test_is_the_equation(shape):
    gate, up = torch.randn(shape), torch.randn(shape)
    wide = gate.double()
    assert_close(swiglu(gate, up), wide / (1 + torch.exp(-wide)) * up.double())


@pytest.mark.parametrize("cast", CASTS)
def test_gradcheck(cast):
    gradcheck(lambda g, u: swiglu(g, u, cast=cast), [torch.randn(3, 5), torch.randn(3, 5)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cast", CASTS)
def test_cast_orders_are_what_they_say(dtype, cast):
    gate, up = torch.randn(64, 96).to(dtype), torch.randn(64, 96).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    silu = torch.nn.functional.silu(gate.to(wide))
    expected = (silu * up.to(wide)).to(dtype) if cast == "once" else silu.to(dtype) * up
    y = swiglu(gate, up, cast=cast)
    assert y.dtype == dtype
    assert torch.equal(y, expected)


def test_cast_orders_differ_where_rounding_does():
    gate, up = torch.randn(64, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    once, twice = (swiglu(gate, up, cast=cast) for cast in CASTS)
    assert not torch.equal(once, twice)
    assert ((once - twice).abs() <= 2**-7 * once.abs()).all()


def test_large_values_neither_overflow_nor_give_nan():
    gate = torch.tensor([-3e4, -100.0, 100.0, 3e4], dtype=torch.float16, requires_grad=True)
    y = swiglu(gate, torch.ones_like(gate))
    assert torch.equal(y, torch.tensor([0.0, 0.0, 100.0, 3e4], dtype=torch.float16))
    (grad,) = torch.autograd.grad(y.sum(), gate)
    assert torch.equal(grad, torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float16))


def test_autocast_changes_nothing():
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(swiglu(gate, up), swiglu_reference(gate, up))


def test_strided_expanded_meta_and_halves_of_one_tensor():
    both = torch.randn(3, 16)
    gate, up = both.chunk(2, -1)
    expected = swiglu(gate.contiguous(), up.contiguous())
    assert torch.equal(swiglu(gate, up), expected)
    every_other = torch.stack((gate, up), -1).flatten(-2)
    assert torch.equal(swiglu(every_other[:, ::2], every_other[:, 1::2]), expected)
    row = gate[:1].expand(3, 8)
    assert torch.equal(swiglu(row, up), swiglu(row.contiguous(), up))
    assert swiglu(gate.to("meta"), up.to("meta")).shape == (3, 8)


def test_compiles_checkpoints_and_batches():
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    expected = swiglu(gate, up)
    (grad,) = torch.autograd.grad(expected.sum(), gate)
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager")
    assert_close(compiled(gate, up), expected)
    y = torch.utils.checkpoint.checkpoint(swiglu, gate, up, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), gate)[0], grad)
    assert_close(torch.func.vmap(swiglu)(gate, up), expected)


def test_errors():
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"up must have the shape of gate, \(2, 4\), got \(2, 1\)"):
        swiglu(x, torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"up must have the dtype of gate, .*32, got .*float64"):
        swiglu(x, x.double())
    with pytest.raises(ValueError, match=r"gate must be floating point, got torch\.int64"):
        swiglu(x.long(), x)
    with pytest.raises(ValueError, match=r"cast must be one of .* got 'later'"):
        swiglu(x, x, cast="later")
    with pytest.raises(BackendUnavailable, match="swiglu has no backend 'grouped'"):
        swiglu(x, x, backend="grouped")
