from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, gradcheck

from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.rms_norm import rms_norm, rms_norm_reference

SHAPES = st.tuples(st.sampled_from([(), (1,), (3,), (2, 5)]), st.sampled_from([1, 2, 31, 33, 128]))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(shape=SHAPES)
def test_equals_pytorch(shape):
    x = torch.randn(*shape[0], shape[1])
    weight = torch.randn(shape[1])
    expected = torch.nn.functional.rms_norm(x.double(), (shape[1],), weight.double(), 1e-6)
    assert_close(rms_norm(x, weight, eps=1e-6), expected, terms=shape[1])


@pytest.mark.parametrize("cast", ["once", "before_weight"])
def test_gradcheck(cast):
    gradcheck(lambda x, w: rms_norm(x, w, eps=1e-3, cast=cast), [torch.randn(3, 5), torch.randn(5)])


@given(shape=SHAPES, factor=st.sampled_from([1e-3, 2.0, 1e3]))
def test_scale_invariance_and_gradient_orthogonal_to_x(shape, factor):
    x = torch.randn(*shape[0], shape[1], dtype=torch.float64, requires_grad=True)
    weight = torch.ones(shape[1], dtype=torch.float64)
    y = rms_norm(x, weight, eps=0.0)
    assert_close(rms_norm(x * factor, weight, eps=0.0), y, terms=shape[1])
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    terms = dx * x
    along = terms.sum(-1)
    scale = terms.abs().max().item() + 1
    assert_close(along, torch.zeros_like(along), terms=shape[1], scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_dtype_of_x_is_kept(dtype, weight_dtype):
    y = rms_norm(torch.ones(2, 4, dtype=dtype), torch.ones(4, dtype=weight_dtype))
    assert y.dtype == dtype


def test_large_half_precision_values_do_not_overflow():
    y = rms_norm(torch.full((4,), 300.0, dtype=torch.float16), torch.ones(4), eps=1e-6)
    assert torch.equal(y, torch.ones(4, dtype=torch.float16))


def test_cast_orders_are_what_they_say():
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, cast="once"), (wide * weight.float()).bfloat16())
    assert torch.equal(rms_norm(x, weight, cast="before_weight"), wide.bfloat16() * weight)


def test_autocast_changes_nothing():
    x, weight = torch.randn(3, 8), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rms_norm(x, weight), rms_norm_reference(x, weight))


def test_strided_expanded_empty_and_meta():
    weight = torch.randn(4)
    wide = torch.randn(3, 8)
    for x in (wide[:, ::2], wide.t()[:4].t(), torch.randn(1, 4).expand(3, 4)):
        assert torch.equal(rms_norm(x, weight), rms_norm(x.contiguous(), weight))
    assert rms_norm(torch.empty(0, 4), weight).shape == (0, 4)
    assert rms_norm(torch.empty(2, 4, device="meta"), weight.to("meta")).shape == (2, 4)


def test_compiles_to_one_graph():
    x, weight = torch.randn(3, 8), torch.randn(8)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, weight), rms_norm(x, weight), terms=8)


def test_errors():
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"weight must have shape \(C,\) .* as in x, got \(5,\)"):
        rms_norm(x, torch.ones(5))
    with pytest.raises(ValueError, match=r"x must be floating point, got torch\.int64"):
        rms_norm(x.long(), torch.ones(4))
    with pytest.raises(ValueError, match=r"cast must be one of .* got 'later'"):
        rms_norm(x, torch.ones(4), cast="later")
    with pytest.raises(ValueError, match=r"eps must be a finite number of at least 0, got -1\.0"):
        rms_norm(x, torch.ones(4), eps=-1.0)
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        rms_norm(x, torch.ones(4), backend="fast")
    with pytest.raises(BackendUnavailable, match="rms_norm has no backend 'mamba_ssm'"):
        rms_norm(x, torch.ones(4), backend="mamba_ssm")
