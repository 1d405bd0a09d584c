from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import assert_close, assert_same_function
from torch import nn
from torch.nn import functional as F

from brickwork.blocks import AddNorm, RMSNorm
from brickwork.kernels.add_norm import AddNormOutput, add_norm
from brickwork.kernels.rms_norm import rms_norm

NARROW = [torch.bfloat16, torch.float16]
BUILDERS = {
    "RMSNorm": lambda: RMSNorm(8),
    "AddNorm-rms": lambda: AddNorm(8),
    "AddNorm-layer": lambda: AddNorm(8, kind="layer"),
}
every_norm = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())


def first(output):
    return output.y if isinstance(output, AddNormOutput) else output


def randomise(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("cast", ["once", "before_weight"])
def test_rms_norm_is_the_op(cast):
    norm = randomise(RMSNorm(8, eps=1e-3, cast=cast))
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(norm(x), rms_norm(x, norm.weight, eps=1e-3, cast=cast))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_add_norm_is_the_op(kind, residual_in_fp32, dtype):
    norm = randomise(AddNorm(8, kind=kind, eps=1e-3, residual_in_fp32=residual_in_fp32))
    wide = torch.float32 if residual_in_fp32 else dtype
    x, residual = torch.randn(3, 8).to(dtype), torch.randn(3, 8)
    for given in (None, residual):
        y, total = norm(x, given)
        expected = add_norm(
            x, given, norm.weight, norm.bias, kind=kind, eps=1e-3, residual_dtype=wide
        )
        assert (y.dtype, total.dtype) == (dtype, wide)
        assert torch.equal(y, expected.y)
        assert torch.equal(total, expected.residual)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("with_mlp", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_of_fused_norms_is_the_unfused_stack(kind, residual_in_fp32, with_mlp, dtype):
    """N4: blocks that carry (hidden, residual) equal `x = x + branch(norm(x))`, gradients too."""
    per_block = 2 if with_mlp else 1
    branches = [nn.Linear(8, 8, bias=False).to(dtype) for _ in range(2 * per_block)]
    norms = [
        randomise(AddNorm(8, kind=kind, residual_in_fp32=residual_in_fp32))
        for _ in range(2 * per_block + 1)
    ]

    def fused(x):
        residual = None
        for norm, branch in zip(norms, branches):
            x, residual = norm(x, residual)
            x = branch(x)
        return norms[-1](x, residual)

    def unfused(x):
        stream = x.float() if residual_in_fp32 else x
        for norm, branch in zip(norms, branches):
            stream = stream + branch(plain(norm, stream))
        return plain(norms[-1], stream), stream

    def plain(norm, stream):
        wide = stream.float()
        if kind == "rms":
            return F.rms_norm(wide, (8,), norm.weight, norm.eps).to(dtype)
        return F.layer_norm(wide, (8,), norm.weight, norm.bias, norm.eps).to(dtype)

    # In bfloat16 a value on its way may fall to either neighbour, and every layer after sees it.
    compute = None if dtype == torch.float32 else dtype
    terms = 8 * len(norms) if dtype == torch.float32 else 1
    x = torch.randn(3, 5, 8).to(dtype)
    assert_same_function(fused, unfused, [x], terms=terms, compute=compute)


@every_norm
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_float32_norm_between_narrow_layers(build, dtype, autocast):
    """N2: the stream stays narrow, so that the layer after the norm runs."""
    norm, linear = build(), nn.Linear(8, 8).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = first(norm(linear(torch.randn(3, 8).to(dtype))))
        assert y.dtype == (torch.bfloat16 if autocast else dtype)
        assert linear(y).dtype == y.dtype


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
def test_casting_the_module_casts_its_parameters_only(build, dtype):
    norm, x = randomise(build()), torch.randn(3, 8)
    casted = copy.deepcopy(norm).to(dtype)
    rounded = copy.deepcopy(norm)
    rounded.load_state_dict({k: v.to(dtype).float() for k, v in norm.state_dict().items()})
    assert_close(first(casted(x)), first(rounded(x)), terms=8)
    assert first(casted(x)).dtype == torch.float32


@every_norm
def test_reset_parameters_and_loading_without_memory(build):
    norm = randomise(build())
    norm.reset_parameters()
    fresh = build().state_dict()
    assert all(torch.equal(v, fresh[k]) for k, v in norm.state_dict().items())
    with torch.device("meta"):
        empty = build()
    empty.to_empty(device="cpu").reset_parameters()
    x = torch.randn(3, 8)
    assert torch.equal(first(empty(x)), first(build()(x)))


@every_norm
def test_state_dict_copies_and_pickles(build):
    norm, x = randomise(build()), torch.randn(3, 8)
    names = {"weight", "bias"} if getattr(norm, "kind", "") == "layer" else {"weight"}
    assert set(norm.state_dict()) == names
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(first(other(x)), first(norm(x)))
    loaded = build()
    loaded.load_state_dict(norm.state_dict(), strict=True)
    assert torch.equal(first(loaded(x)), first(norm(x)))


def test_representation_is_the_call_that_makes_it():
    assert repr(RMSNorm(8, eps=0.1, cast="before_weight")) == (
        "RMSNorm(8, eps=0.1, cast='before_weight')"
    )
    assert repr(AddNorm(8, kind="layer")) == (
        "AddNorm(8, kind='layer', eps=1e-05, residual_in_fp32=True)"
    )
    for norm in (RMSNorm(8), AddNorm(8)):
        assert repr(eval(repr(norm))) == repr(norm)


@every_norm
def test_compiles_to_one_graph(build):
    norm, x = randomise(build()), torch.randn(3, 8)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert_close(first(compiled(x)), first(norm(x)), terms=8)


def test_errors():
    for dim in (0, -1, True, 8.0, None):
        for block in (RMSNorm, AddNorm):
            with pytest.raises(ValueError, match="dim must be an integer of at least 1, got"):
                block(dim)
    for block in (RMSNorm, AddNorm):
        with pytest.raises(ValueError, match=r"eps must be a finite number .* got -1\.0"):
            block(8, eps=-1.0)
        with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
            block(8)(torch.randn(2, 8), mask=None)
        with pytest.raises(TypeError, match="positional argument"):
            block(8, 1e-6)
        with pytest.raises(ValueError, match=r"weight must have shape \(C,\) with C = 4 as in x"):
            block(8)(torch.randn(2, 4))
    with pytest.raises(ValueError, match="cast must be one of"):
        RMSNorm(8, cast="never")
    with pytest.raises(ValueError, match="kind must be one of"):
        AddNorm(8, kind="batch")
    with pytest.raises(ValueError, match="residual_in_fp32 must be True or False, got 1"):
        AddNorm(8, residual_in_fp32=1)
    with pytest.raises(ValueError, match="residual must have the shape of x"):
        AddNorm(8)(torch.randn(2, 8), torch.randn(1, 8))
