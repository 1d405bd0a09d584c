from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support import assert_close, gradcheck
from torch import Tensor, nn

from brickwork.blocks import Attention, MoE, MoEOutput, Residual, RMSNorm, RoPE


class Routed(NamedTuple):
    y: Tensor
    router_logits: Tensor


class Branch(nn.Module):
    """Scales by a keyword argument; returns a tensor or a tuple."""

    def __init__(self, *, routed: bool = False) -> None:
        super().__init__()
        self.routed = routed
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor | Routed:
        y = self.linear(x) * factor
        return Routed(y, x[..., :2]) if self.routed else y


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("post", [False, True])
def test_is_the_equation(pre, post):
    norm = RMSNorm(6) if pre else None
    post_norm = RMSNorm(6) if post else None
    if post_norm is not None:
        nn.init.normal_(post_norm.weight)
    branch = Branch()
    block = Residual(branch, norm=norm, post_norm=post_norm)
    x = torch.randn(2, 3, 6)
    inner = branch(norm(x) if norm else x)
    assert torch.equal(block(x), x + (post_norm(inner) if post_norm else inner))


def test_gradcheck():
    block = Residual(Branch(), norm=RMSNorm(6), post_norm=RMSNorm(6)).double()
    names, parameters = zip(*block.named_parameters())
    gradcheck(
        lambda x, *p: torch.func.functional_call(block, dict(zip(names, p)), (x,)),
        [torch.randn(3, 6), *parameters],
    )


def test_keyword_arguments_reach_the_branch_and_unknown_ones_raise():
    block = Residual(Branch())
    x = torch.randn(2, 6)
    assert_close(block(x, factor=-2.0), x - 2.0 * block.branch(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        block(x, mask=None)


def test_every_field_of_a_tuple_is_kept():
    block = Residual(Branch(routed=True), post_norm=RMSNorm(6))
    x = torch.randn(2, 6)
    output, inner = block(x), block.branch(x)
    assert isinstance(output, Routed)
    assert torch.equal(output.y, x + block.post_norm(inner.y))
    assert torch.equal(output.router_logits, inner.router_logits)


def test_around_attention_and_experts():
    """Rish's block: the norm on each branch's output, masks passed through, routing returned."""
    attention = Attention(8, num_heads=2, rope=RoPE(4), causal=True)
    experts = MoE(8, hidden_dim=4, num_experts=3, top_k=2)
    first = Residual(attention, post_norm=RMSNorm(8))
    second = Residual(experts, post_norm=RMSNorm(8))
    x, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    middle = first(x, mask=mask)
    assert torch.equal(middle, x + first.post_norm(attention(x, mask=mask)))
    output, inner = second(middle), experts(middle)
    assert isinstance(output, MoEOutput)
    assert torch.equal(output.y, middle + second.post_norm(inner.y))
    assert torch.equal(second(middle, routing=inner.indices).y, output.y)
    for kept, original in zip(output[1:], inner[1:]):
        assert torch.equal(kept, original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stream_keeps_its_dtype(dtype):
    """N2: a branch computed in float32 must not widen the stream."""

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float() / 3

    x = torch.randn(4, 6).to(dtype)
    y = Residual(Wide())(x)
    assert y.dtype == dtype
    assert torch.equal(y, (x + x.float() / 3).to(dtype))


def test_reset_parameters_reaches_every_part():
    block = Residual(
        nn.Sequential(nn.Linear(6, 6), nn.SiLU(), Branch()),
        norm=RMSNorm(6),
        post_norm=nn.LayerNorm(6),
    )
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(float("nan"))
    block.reset_parameters()
    assert all(p.isfinite().all() for p in block.parameters())
    assert torch.equal(block.norm.weight, torch.ones(6))


def test_empty_input_and_one_graph():
    block = Residual(Branch(), norm=RMSNorm(6))
    assert block(torch.empty(0, 6)).shape == (0, 6)
    x = torch.randn(2, 6)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, factor=2.0), block(x, factor=2.0), terms=6)


def test_parameter_names():
    block = Residual(nn.Linear(6, 6, bias=False), norm=RMSNorm(6), post_norm=RMSNorm(6))
    assert set(block.state_dict()) == {"branch.weight", "norm.weight", "post_norm.weight"}


def test_errors():
    with pytest.raises(ValueError, match="branch must be a module, got None"):
        Residual(None)
    with pytest.raises(ValueError, match="norm must be a module, got 6"):
        Residual(nn.Identity(), norm=6)
    with pytest.raises(ValueError, match="post_norm must be a module, got 'rms'"):
        Residual(nn.Identity(), post_norm="rms")
    with pytest.raises(
        ValueError, match=r"branch must return the shape of x, \(2, 6\), got \(2, 1\)"
    ):
        Residual(nn.Linear(6, 1))(torch.randn(2, 6))

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(ValueError, match=r"a tensor or a NamedTuple with a field y, got .*tuple"):
        Residual(Pair())(torch.randn(2, 6))

    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

    with pytest.raises(ValueError, match="Forgetful has parameters but no reset_parameters"):
        Residual(Forgetful()).reset_parameters()
