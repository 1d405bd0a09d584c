from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, assert_same_function, gradcheck
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from brickwork.blocks import MoE, SigmoidRouter, SwiGLU
from brickwork.blocks.moe_layout import run_modules


def make(**options):
    return MoE(6, **({"hidden_dim": 5, "num_experts": 4, "top_k": 2} | options))


ROUTERS = {
    "softmax": lambda: None,
    "sigmoid": lambda: SigmoidRouter(6, num_experts=4, num_groups=2, top_groups=1, scale=2.5),
    "any": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)),
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_from_dense_gives_the_dense_output(router, dtype):
    """Whatever the router says, and for replayed choices; the dense layer is left alone."""
    dense = SwiGLU(6, hidden_dim=5).to(dtype).eval()
    before = copy.deepcopy(dense.state_dict())
    moe = MoE.from_dense(
        dense, num_experts=4, top_k=2, router=ROUTERS[router](), selection_bias=True
    )
    assert not moe.training
    x = torch.randn(3, 9, 6, dtype=dtype)
    for scale in (1.0, 10.0):
        assert_close(moe(x * scale).y, dense(x * scale), terms=64)
    routing = torch.randint(4, (3, 9, 2))
    assert_close(moe(x, routing=routing).y, dense(x), terms=64)
    for parameter in (moe.gate_up, moe.down):
        assert parameter.dtype == dtype
        assert parameter.requires_grad
        parameter.data.add_(1.0)
    assert all(torch.equal(t, before[name]) for name, t in dense.state_dict().items())


def test_from_dense_learns_apart():
    dense = SwiGLU(6, hidden_dim=5)
    moe = MoE.from_dense(dense, num_experts=4, top_k=2)
    moe(torch.randn(5, 6)).y.square().sum().backward()
    assert not torch.equal(moe.gate_up.grad[0], moe.gate_up.grad[1])
    total = moe.gate_up.grad.sum(0)
    dense.zero_grad()
    assert total.abs().max() > 0


def test_from_dense_with_one_choice_warns():
    """D4 71."""
    dense, x = SwiGLU(6, hidden_dim=5), torch.randn(5, 6)
    with pytest.warns(UserWarning, match="router gets no gradient"):
        moe = MoE.from_dense(dense, num_experts=4, top_k=1)
    assert_close(moe(x).y, dense(x), terms=64)


def test_from_dense_on_meta_and_in_bfloat16():
    with torch.device("meta"):
        empty = SwiGLU(6, hidden_dim=5)
    assert MoE.from_dense(empty, num_experts=4, top_k=2).gate_up.is_meta
    narrow = MoE.from_dense(SwiGLU(6, hidden_dim=5).bfloat16(), num_experts=4, top_k=2)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


def test_from_dense_errors():
    dense = SwiGLU(6, hidden_dim=5)
    with pytest.raises(ValueError, match=r"normalize must be True, .* got False"):
        MoE.from_dense(dense, num_experts=4, top_k=2, normalize=False)
    with pytest.raises(ValueError, match="shared must be None"):
        MoE.from_dense(dense, num_experts=4, top_k=2, shared=dense)
    with pytest.raises(ValueError, match="dense must have no biases"):
        MoE.from_dense(SwiGLU(6, hidden_dim=5, bias=True), num_experts=4, top_k=2)
    with pytest.raises(ValueError, match=r"dense must be a SwiGLU of two nn.Linear, got Linear"):
        MoE.from_dense(nn.Linear(6, 6), num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="top_k must be at most"):
        MoE.from_dense(dense, num_experts=4, top_k=5)


@given(
    top_k=st.sampled_from([1, 2, 4]),
    tokens=st.sampled_from([0, 1, 9]),
    normalize=st.booleans(),
)
def test_unstacked_is_the_same_function(top_k, tokens, normalize):
    """M10: values and gradients, for idle experts and empty input too."""
    stacked = make(top_k=top_k, normalize=normalize and top_k > 1)
    apart = copy.deepcopy(stacked).unstack()
    x = torch.randn(2, tokens, 6)
    indices = stacked(x).indices
    assert_same_function(
        lambda t: apart(t, routing=indices)[:2], lambda t: stacked(t, routing=indices)[:2], [x],
        terms=64,
    )  # fmt: skip
    for moe in (stacked, apart):
        moe(x).y.square().sum().backward()
    for name, parameter in apart.named_parameters():
        _, e, part, _ = name.split(".") if name.startswith("experts") else (0, None, "router", 0)
        whole = stacked.router.weight if e is None else getattr(stacked, part)
        expected = whole.grad if e is None else whole.grad[int(e)]
        assert_close(parameter.grad, expected, terms=256, scale=whole.grad.abs().max().item())


def test_round_trip_is_exact():
    """State dicts of both layouts, frozen parameters, dtypes and modes."""
    moe = make(shared=SwiGLU(6, hidden_dim=3), selection_bias=True).bfloat16().eval()
    moe.down.requires_grad_(False)
    before = {name: t.clone() for name, t in moe.state_dict().items()}
    assert moe.unstack() is moe
    state = moe.state_dict()
    rest = {name for name in before if name not in ("gate_up", "down")}
    assert set(state) == rest | {
        f"experts.{e}.{part}.weight" for e in range(4) for part in ("gate_up", "down")
    }
    for e in range(4):
        assert torch.equal(state[f"experts.{e}.gate_up.weight"], before["gate_up"][e])
        assert torch.equal(state[f"experts.{e}.down.weight"], before["down"][e])
    assert not any(module.training for module in moe.modules())
    trained = {name: p.requires_grad for name, p in moe.named_parameters()}
    assert trained["experts.0.gate_up.weight"]
    assert not trained["experts.3.down.weight"]
    other = make(shared=SwiGLU(6, hidden_dim=3), selection_bias=True).unstack()
    other.load_state_dict(state)
    assert torch.equal(other.restack().gate_up, before["gate_up"].float())
    assert moe.restack() is moe
    after = moe.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert not moe.down.requires_grad
    assert moe.gate_up.requires_grad


def test_unstacked_gradcheck():
    moe = MoE(3, hidden_dim=2, num_experts=3, top_k=2, normalize=True).unstack().double()
    names, parameters = zip(*moe.named_parameters())
    gradcheck(
        lambda x, *p: functional_call(moe, dict(zip(names, p)), (x,))[::3],
        [torch.randn(4, 3), *parameters],
    )


def test_unstacked_serves_other_routings():
    """M11: exported, compiled, on meta; and under checkpointing."""
    moe = make().unstack()
    x = torch.randn(7, 6)
    program = torch.export.export(moe, (x,)).module()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        other = torch.randn(7, 6)
        assert_close(program(other)[0], moe(other).y, terms=16)
        assert_close(compiled(other).y, moe(other).y, terms=16)
    leaf = x.clone().requires_grad_()
    checkpoint(lambda t: moe(t).y, leaf, use_reentrant=False).sum().backward()
    again = x.clone().requires_grad_()
    moe(again).y.sum().backward()
    assert torch.equal(leaf.grad, again.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert moe(x).y.dtype == torch.float32
    assert moe.to("meta")(x.to("meta")).y.shape == (7, 6)


def test_what_others_compute_of_an_expert_never_shows():
    """D4 52: an expert that is NaN everywhere touches only the tokens that chose it."""
    moe = make(top_k=1).unstack()
    moe.experts[2].down.weight.data.fill_(float("nan"))
    x = torch.randn(8, 6)
    routing = torch.tensor([0, 1, 3, 0, 1, 3, 0, 1])[:, None]
    weights = torch.ones(8, 1)
    for run in (run_modules, torch.compile(run_modules, backend="aot_eager", fullgraph=True)):
        assert run(moe.experts, x, routing, weights).isfinite().all()


def test_reset_parameters_in_both_layouts():
    moe = make().unstack()
    before = {name: p.clone() for name, p in moe.named_parameters()}
    moe.reset_parameters()
    for name, parameter in moe.named_parameters():
        assert not torch.equal(parameter, before[name])
        assert parameter.abs().max() <= parameter.shape[1] ** -0.5


def test_layout_errors():
    moe = make()
    with pytest.raises(ValueError, match="restack must follow unstack"):
        moe.restack()
    moe.unstack()
    with pytest.raises(ValueError, match="unstack was called before"):
        moe.unstack()
    kept = moe.experts[1]
    moe.experts[1] = nn.Sequential(kept)
    with pytest.raises(ValueError, match=r"experts\.1 must be a SwiGLU .* got Sequential"):
        moe.restack()
    moe.experts[1] = kept
    moe.experts[0].down.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad must be the same in all experts"):
        moe.restack()
    assert len(moe.experts) == 4
