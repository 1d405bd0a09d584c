from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, assert_same_function, gradcheck
from torch import nn
from torch.func import functional_call

from brickwork.blocks import SwiGLU
from brickwork.blocks.swiglu import fuse_gate_up, split_gate_up


def split(block: SwiGLU, names=("gate", "up")) -> dict[str, torch.Tensor]:
    """The block's state dict with the gate and up rows apart."""
    state = {}
    for key, value in block.state_dict().items():
        kind = key.split(".")[1]
        if key.startswith("gate_up"):
            state |= dict(zip((f"{name}.{kind}" for name in names), split_gate_up(value)))
        else:
            state[key] = value
    return state


@given(
    leading=st.sampled_from([(), (1,), (2, 3), (0,), (2, 0)]),
    dim=st.sampled_from([1, 3, 8]),
    hidden=st.sampled_from([1, 5, 16]),
    bias=st.booleans(),
)
def test_equals_three_linear_layers(leading, dim, hidden, bias):
    """G1: the gate's rows come first."""
    block = SwiGLU(dim, hidden_dim=hidden, bias=bias)
    names, parameters = zip(*block.named_parameters())

    def three(x, *values):
        p = dict(zip(names, values))
        linear = nn.functional.linear
        b = p.get("gate_up.bias")
        gate = linear(x, p["gate_up.weight"][:hidden], b[:hidden] if bias else None)
        up = linear(x, p["gate_up.weight"][hidden:], b[hidden:] if bias else None)
        return linear(gate.sigmoid() * gate * up, p["down.weight"], p.get("down.bias"))

    def fused(x, *values):
        return functional_call(block, dict(zip(names, values)), (x,))

    inputs = [torch.randn(*leading, dim), *parameters]
    assert_same_function(fused, three, inputs, terms=max(dim, hidden, 6))


def test_equals_transformers_llama_mlp():
    """G1: the split names of Llama's checkpoints load strictly, and mean the same."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(hidden_size=6, intermediate_size=10, num_attention_heads=1)
    theirs = LlamaMLP(config)
    ours = SwiGLU(6, hidden_dim=10)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 6)
    assert_close(ours(x), theirs(x), terms=10)


def test_roles_of_the_rows():
    """G1: no gate or no up gives zero; where the gate is open the output is linear in up."""
    block = SwiGLU(4, hidden_dim=6)
    x = torch.rand(5, 4) + 0.5
    weight = block.gate_up.weight.data.clone()
    for rows in (slice(0, 6), slice(6, 12)):
        block.gate_up.weight.data.copy_(weight)
        block.gate_up.weight.data[rows] = 0
        assert (block(x) == 0).all()
    block.gate_up.weight.data[:6] = 100
    block.gate_up.weight.data[6:] = weight[6:]
    y = block(x)
    block.gate_up.weight.data[6:] *= 3
    assert_close(block(x), 3 * y, terms=6)


def test_gradcheck():
    block = SwiGLU(3, hidden_dim=4, bias=True).double()
    names, parameters = zip(*block.named_parameters())
    gradcheck(
        lambda x, *p: functional_call(block, dict(zip(names, p)), (x,)),
        [torch.randn(2, 3), *parameters],
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [("gate", "up"), ("gate_proj", "up_proj")])
@pytest.mark.parametrize("assign", [False, True])
def test_loads_fused_and_split(bias, names, assign):
    """G1: both layouts load strictly, within a larger model too, and the caller's dict stays."""
    source = nn.Sequential(SwiGLU(4, hidden_dim=6, bias=bias))
    apart = {f"0.{key}": value for key, value in split(source[0], names).items()}
    before = list(apart)
    for state in (apart, source.state_dict()):
        with torch.device("meta" if assign else "cpu"):
            target = nn.Sequential(SwiGLU(4, hidden_dim=6, bias=bias))
        target.load_state_dict(state, assign=assign)
        for name, parameter in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], parameter)
    assert list(apart) == before


def test_saves_fused_and_loads_in_a_copy():
    block = SwiGLU(4, hidden_dim=6)
    assert set(block.state_dict()) == {"gate_up.weight", "down.weight"}
    other = copy.deepcopy(SwiGLU(4, hidden_dim=6))
    other.load_state_dict(split(block))
    assert torch.equal(other.gate_up.weight, block.gate_up.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_what_cannot_be_meant_is_an_error(strict):
    """G1: mixtures, halves and halves of other sizes, whose sum would fit."""
    block = SwiGLU(4, hidden_dim=6)
    good = split(block)

    def refused(state, message):
        with pytest.raises(RuntimeError, match=message):
            block.load_state_dict(state, strict=strict)

    fused = block.state_dict()
    refused(good | fused, r"weight of gate and up is given more than once: \['gate_up.weight', ")
    both = good | {f"{k}_proj.weight": v for k, v in zip(("gate", "up"), good.values())}
    refused(both, r"more than once: \['gate.weight', 'up.weight', 'gate_proj.weight', ")
    mixed = {"gate.weight": good["gate.weight"], "up_proj.weight": good["up.weight"]}
    refused(mixed | {"down.weight": good["down.weight"]}, "more than once|is given without")
    half = {k: v for k, v in good.items() if k != "up.weight"}
    refused(half, r"gate\.weight is given without up\.weight")
    half = {k: v for k, v in good.items() if k != "gate.weight"}
    refused(half, r"up\.weight is given without gate\.weight")
    refused(good | {"down_proj.weight": good["down.weight"]}, "weight of down is given more than")
    uneven = good | {"gate.weight": torch.ones(7, 4), "up.weight": torch.ones(5, 4)}
    refused(uneven, r"must have one shape, got \(7, 4\) and \(5, 4\)")
    uneven = good | {"gate.weight": torch.ones(7, 4), "up.weight": torch.ones(7, 4)}
    refused(uneven, r"size mismatch for gate_up\.weight")


def test_strict_loading_still_complains():
    block = SwiGLU(4, hidden_dim=6)
    state = split(block)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*down\.weight"):
        block.load_state_dict({k: v for k, v in state.items() if "down" not in k})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*gate_up\.weight"):
        block.load_state_dict({"down.weight": state["down.weight"]})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*gate_up\.bias"):
        block.load_state_dict(state | {"gate.bias": torch.ones(6), "up.bias": torch.ones(6)})


def test_fuse_and_split_are_inverse():
    for shape in ((6, 4), (5, 6, 4), (6,)):
        gate, up = torch.randn(shape), torch.randn(shape)
        fused = fuse_gate_up(gate, up)
        assert fused.shape[max(fused.ndim - 2, 0)] == 12
        assert all(torch.equal(a, b) for a, b in zip(split_gate_up(fused), (gate, up)))
    with pytest.raises(
        ValueError, match=r"gate and up must have one shape .*\(2, 3\) and \(3, 3\)"
    ):
        fuse_gate_up(torch.ones(2, 3), torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"even number of rows.* got shape \(3, 2\)"):
        split_gate_up(torch.ones(3, 2))


def test_every_weight_is_in_a_linear_module():
    """G2: adapters find all of them by module type."""
    block = SwiGLU(4, hidden_dim=6, bias=True)
    linear = {f"{n}.weight" for n, m in block.named_modules() if isinstance(m, nn.Linear)}
    assert linear == {n for n, p in block.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    block = SwiGLU(8, hidden_dim=16).to(dtype)
    x = torch.randn(4, 8, dtype=dtype, requires_grad=True)
    y = block(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in (x, *block.parameters()))


def test_autocast_meta_compile_checkpoint_and_reset():
    block = SwiGLU(8, hidden_dim=16)
    x = torch.randn(4, 8, requires_grad=True)
    expected = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    assert_close(y, expected, terms=16, compute=torch.bfloat16)
    assert block.to("meta")(x.to("meta")).shape == x.shape
    block = SwiGLU(8, hidden_dim=16)
    expected = block(x)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), expected, terms=16)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)
    other = SwiGLU(8, hidden_dim=16)
    for each in (block, other):
        torch.manual_seed(0)
        each.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(block.parameters(), other.parameters()))
    assert not torch.equal(block(x), expected)


def test_errors():
    block = SwiGLU(4, hidden_dim=6)
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4\), got \(2, 5\)"):
        block(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4\), got \(\)"):
        block(torch.tensor(1.0))
    with pytest.raises(ValueError, match="dim must be an integer of at least 1, got 0"):
        SwiGLU(0, hidden_dim=6)
    with pytest.raises(ValueError, match=r"hidden_dim must be an integer of at least 1, got 2\.5"):
        SwiGLU(4, hidden_dim=2.5)
    with pytest.raises(ValueError, match="bias must be True or False, got 1"):
        SwiGLU(4, hidden_dim=6, bias=1)
    with pytest.raises(TypeError):
        SwiGLU(4, 6)
    with pytest.raises(TypeError):
        block(torch.ones(2, 4), mask=None)
