from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, gradcheck
from torch import nn
from torch.func import functional_call

from brickwork.blocks import MoE, SigmoidRouter, SwiGLU
from brickwork.blocks.router import Router, SigmoidRule, SoftmaxRule
from brickwork.kernels.backend import prefer


def make(dim=6, *, num_experts=8, num_groups=4, top_groups=2, scale=1.0, **options):
    router = SigmoidRouter(
        dim, num_experts=num_experts, num_groups=num_groups, top_groups=top_groups, scale=scale
    )
    options = {"hidden_dim": 5, "top_k": 2, "normalize": True} | options
    return MoE(dim, num_experts=num_experts, router=router, **options)


def choice_by_definition(scores, bias, top_k, num_groups, top_groups):
    """One token: its groups, then its experts, by sorting Python numbers."""
    preferences = [s + b for s, b in zip(scores, bias)]
    size = len(scores) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    best = max(1, top_k // top_groups)
    ranks = [sum(sorted((preferences[e] for e in g), reverse=True)[:best]) for g in groups]
    taken = sorted(range(num_groups), key=lambda g: (-ranks[g], g))[:top_groups]
    allowed = [e for g in taken for e in groups[g]]
    return sorted(allowed, key=lambda e: (-preferences[e], e))[:top_k]


@given(
    num_groups=st.sampled_from([1, 2, 3]),
    group_size=st.sampled_from([2, 4]),
    top_groups=st.sampled_from([1, 2, 3]),
    top_k=st.sampled_from([1, 2, 3, 4]),
    biased=st.booleans(),
    normalize=st.booleans(),
)
def test_is_the_equation(num_groups, group_size, top_groups, top_k, biased, normalize):
    """Sigmoid scores; groups first; the bias chooses only; normalised, then scaled."""
    top_groups = min(top_groups, num_groups)
    top_k = min(top_k, group_size * top_groups)
    normalize = normalize and top_k > 1
    sizes = {"num_groups": num_groups, "top_groups": top_groups}
    moe = make(
        num_experts=num_groups * group_size,
        top_k=top_k,
        normalize=normalize,
        scale=2.5,
        selection_bias=biased,
        **sizes,
    ).double()
    if biased:
        moe.selection_bias.bias.copy_(torch.randn(moe.num_experts))
    x = torch.randn(7, 6, dtype=torch.float64)
    out = moe(x)
    scores = torch.sigmoid(x @ moe.router.weight.T)
    bias = moe.selection_bias.bias.tolist() if biased else [0.0] * moe.num_experts
    expected = [choice_by_definition(s, bias, top_k, **sizes) for s in scores.tolist()]
    assert out.indices.tolist() == expected
    weights = scores.gather(-1, out.indices)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    assert_close(out.weights, 2.5 * weights, terms=8)


def test_equals_deepseek_v3():
    """transformers' DeepSeek-V3 block: bias, groups, normalisation, scale and a shared expert;
    values and gradients."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=8,
        moe_intermediate_size=5,
        n_routed_experts=12,
        num_local_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    theirs = DeepseekV3MoE(config)
    moe = make(
        8,
        num_experts=12,
        num_groups=4,
        top_groups=2,
        scale=2.5,
        top_k=4,
        selection_bias=True,
        shared=SwiGLU(8, hidden_dim=10),
    )
    theirs.gate.weight.data.copy_(moe.router.weight.data)
    bias = torch.randn(12) / 4
    theirs.gate.e_score_correction_bias.copy_(bias)
    moe.selection_bias.bias.copy_(bias)
    theirs.experts.gate_up_proj.data.copy_(moe.gate_up.data)
    theirs.experts.down_proj.data.copy_(moe.down.data)
    moe.shared.load_state_dict(theirs.shared_experts.state_dict())
    x = torch.randn(3, 9, 8)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    y, expected = moe(mine).y, theirs(other)
    assert_close(y, expected, terms=64)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream)
    for ours, their in (
        (mine, other),
        (moe.router.weight, theirs.gate.weight),
        (moe.gate_up, theirs.experts.gate_up_proj),
        (moe.down, theirs.experts.down_proj),
    ):
        assert_close(ours.grad, their.grad, terms=512)


def test_gradcheck():
    """Every option at once, fp64, twice differentiable through the reference."""
    moe = make(
        3, num_groups=2, top_groups=1, num_experts=6, hidden_dim=2, scale=1.5, top_k=2,
        selection_bias=True, shared=SwiGLU(3, hidden_dim=2),
    ).eval().double()  # fmt: skip
    names = [name for name, p in moe.named_parameters() if p.requires_grad]
    inputs = [torch.randn(4, 3), *(moe.get_parameter(name) for name in names)]

    def call(x, *parameters):
        return functional_call(moe, dict(zip(names, parameters)), (x,))[::3]

    with prefer("torch"):
        gradcheck(call, inputs)


def test_the_bias_moves_choices_and_no_weights():
    """D4 73: weights are those of the scores alone, and the bias gets no gradient."""
    moe = MoE(6, hidden_dim=5, num_experts=8, top_k=2, selection_bias=True)
    x = torch.randn(40, 6)
    before = moe(x)
    moe.selection_bias.bias[3] = 2.0
    after = moe(x)
    assert not (before.indices == 3).any(-1).all()
    assert (after.indices == 3).any(-1).all()
    p = after.router_logits.softmax(-1)
    assert torch.equal(after.weights, p.gather(-1, after.indices))
    assert torch.equal(before.router_logits, after.router_logits)
    moe.requires_grad_(True)
    moe(x).y.sum().backward()
    assert moe.selection_bias.bias.grad is None


def test_one_group_is_no_group_and_all_groups_are_none():
    x = torch.randn(20, 6)
    whole = make(num_groups=1, top_groups=1, top_k=3)
    for sizes in ({"num_groups": 4, "top_groups": 4}, {"num_groups": 2, "top_groups": None}):
        other = make(**sizes, top_k=3)
        other.load_state_dict(whole.state_dict())
        assert torch.equal(other(x).indices, whole(x).indices)
    chosen = make(top_k=2, top_groups=1)(x).indices // 2
    assert (chosen[:, 0] == chosen[:, 1]).all()


def test_biases_below_minus_one_do_not_let_other_groups_in():
    """A group that is out stays out, even if every preference within is negative."""
    rule = SigmoidRule(num_groups=2, top_groups=1)
    preferences = torch.tensor([[-3.0, -4.0, -9.0, -8.0]])
    assert rule.choose(preferences, 2).tolist() == [[0, 1]]


def test_scores_that_underflow():
    """Weights stay finite where every chosen score is 0, for replayed choices of softmax too."""
    moe = make()
    nn.init.constant_(moe.router.weight, -50.0)
    x = torch.ones(3, 6, requires_grad=True)
    out = moe(x)
    assert out.weights.isfinite().all()
    out.y.sum().backward()
    assert all(p.grad.isfinite().all() for p in moe.parameters())
    soft = MoE(6, hidden_dim=5, num_experts=4, top_k=2, normalize=True)
    nn.init.zeros_(soft.router.weight)
    soft.router.weight.data[0] = 100.0
    assert soft(torch.ones(1, 6), routing=torch.tensor([[1, 2]])).weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_float32(dtype):
    """D4 59, 60: whatever the model and autocast are."""
    moe = make(scale=2.0, selection_bias=True, shared=SwiGLU(6, hidden_dim=4)).to(dtype)
    x = torch.randn(9, 6).to(dtype)
    out = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        again = moe(x)
    for found in (out, again):
        assert found.router_logits.dtype == found.weights.dtype == torch.float32
        assert found.y.dtype == dtype
    assert torch.equal(out.indices, again.indices)
    assert torch.equal(out.weights, again.weights)


@given(permutation=st.permutations(range(8)), cut=st.integers(0, 10), data=st.data())
def test_properties(permutation, cut, data):
    """Experts may be renamed within and between whole groups, tokens reordered, batches split."""
    moe = make(selection_bias=True, shared=SwiGLU(6, hidden_dim=3)).eval()
    moe.selection_bias.bias.copy_(torch.randn(8))
    x = torch.randn(10, 6)
    out = moe(x)
    groups = data.draw(st.permutations(range(4)))
    order = torch.tensor(list(itertools.chain(*([2 * g, 2 * g + 1] for g in groups))))
    renamed = make(selection_bias=True, shared=moe.shared).eval()
    stacked = {"gate_up", "down", "router.weight", "selection_bias.bias"}
    state = {n: t[order] if n in stacked else t for n, t in moe.state_dict().items()}
    renamed.load_state_dict(state)
    again = renamed(x)
    assert torch.equal(order[again.indices], out.indices)
    assert_close(again.y, out.y, terms=16)
    tokens = torch.randperm(10)
    assert torch.equal(moe(x[tokens]).indices, out.indices[tokens])
    assert_close(torch.cat((moe(x[:cut]).y, moe(x[cut:]).y)), out.y, terms=16)


def test_a_router_is_a_part():
    """Any module that returns logits; what takes the place of a router keeps its rule."""
    x = torch.randn(5, 6)
    linear = nn.Linear(6, 4)
    moe = MoE(6, hidden_dim=5, num_experts=4, top_k=2, router=linear)
    assert moe.rule == SoftmaxRule()
    assert moe.router is linear
    assert torch.equal(moe(x).weights, linear(x).softmax(-1).topk(2).values)
    kept = linear.weight.clone()
    MoE(6, hidden_dim=5, num_experts=4, top_k=2, router=linear)
    assert torch.equal(linear.weight, kept)
    sigmoid = make(normalize=False, num_groups=1, top_groups=1)
    logits = sigmoid(x).router_logits
    sigmoid.router = nn.Sequential(sigmoid.router)
    assert torch.equal(sigmoid(x).weights, logits.sigmoid().topk(2).values)


def test_reset_parameters_reaches_every_part():
    moe = make(selection_bias=True, shared=SwiGLU(6, hidden_dim=3))
    moe.selection_bias.bias.fill_(7.0)
    before = {name: p.clone() for name, p in moe.named_parameters()}
    moe.reset_parameters()
    assert all(not torch.equal(before[name], p) for name, p in moe.named_parameters())
    assert (moe.selection_bias.bias == 0).all()


def test_the_shared_expert_is_added():
    shared = SwiGLU(6, hidden_dim=3)
    plain, both = make(), make(shared=shared)
    both.load_state_dict(
        plain.state_dict() | {f"shared.{n}": t for n, t in shared.state_dict().items()}
    )
    x = torch.randn(2, 4, 6)
    assert_close(both(x).y, plain(x).y + shared(x), terms=8)
    narrow = make(shared=nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"shared must return shape \(2, 4, 6\), got \(2, 4, 3\)"):
        narrow(x)


def test_default_is_as_it_was():
    """The same draw under the same seed, the same parameters, a rule of its own for no one."""
    torch.manual_seed(3)
    moe = MoE(6, hidden_dim=5, num_experts=4, top_k=2)
    torch.manual_seed(3)
    again = MoE(6, hidden_dim=5, num_experts=4, top_k=2, router=None, shared=None)
    assert set(moe.state_dict()) == {"router.weight", "gate_up", "down"}
    assert all(torch.equal(a, b) for a, b in zip(moe.parameters(), again.parameters()))
    assert type(moe.router) is Router


def test_compiles_exports_and_runs_on_meta():
    moe = make(scale=2.0, selection_bias=True, shared=SwiGLU(6, hidden_dim=3)).eval()
    x = torch.randn(9, 6)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x).y, moe(x).y, terms=16)
    program = torch.export.export(moe.train(), (x,)).module()
    other = torch.randn(9, 6)
    assert_close(program(other)[0], moe.eval()(other).y, terms=16)
    assert moe.to("meta")(x.to("meta")).y.shape == (9, 6)
    assert make()(x[:0]).y.shape == (0, 6)


def test_errors():
    for name in ("dim", "num_experts", "num_groups", "top_groups"):
        sizes = {"dim": 6, "num_experts": 8, "num_groups": 4, "top_groups": 2} | {name: 0}
        dim = sizes.pop("dim")
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            SigmoidRouter(dim, **sizes)
    with pytest.raises(ValueError, match="num_groups must divide the number of experts, 8, got 3"):
        make(num_groups=3)
    with pytest.raises(ValueError, match="top_groups must be at most num_groups, 4, got 5"):
        make(top_groups=5)
    with pytest.raises(ValueError, match=r"top_k must be at most the number .* 2 groups, 4, got 5"):
        make(top_k=5)
    for wrong in (0, -1.0, float("inf"), float("nan"), True, "2"):
        with pytest.raises(ValueError, match="scale must be a finite number above 0, got"):
            make(scale=wrong)
    narrow = MoE(6, hidden_dim=5, num_experts=4, top_k=2, router=nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"router must return logits \(2, 4\) .*, got \(2, 3\)"):
        narrow(torch.randn(2, 6))
    with pytest.raises(ValueError, match="num_groups must divide the number of experts, 6, got 4"):
        MoE(6, hidden_dim=5, num_experts=6, top_k=2, router=make().router)
    with pytest.raises(ValueError, match="selection_bias must be True or False, got 1"):
        make(selection_bias=1)
