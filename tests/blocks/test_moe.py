from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, gradcheck, gradients
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from brickwork.blocks import MoE, load_balancing_loss, router_z_loss
from brickwork.blocks.router import Router
from brickwork.kernels.backend import prefer


def make(dim=6, **options):
    return MoE(dim, **{"hidden_dim": 5, "num_experts": 4, "top_k": 2} | options)


def by_token(moe, x):
    """The equation, one token and one expert at a time; also which experts were taken."""
    rows, chosen = [], []
    for token in x.reshape(-1, moe.dim):
        p = torch.softmax(moe.router.weight @ token, -1)
        taken = sorted(range(moe.num_experts), key=lambda e, p=p: (-p[e].item(), e))[: moe.top_k]
        total = p[taken].sum() if moe.normalize else 1
        row = torch.zeros_like(token)
        for e in taken:
            gate, up = moe.gate_up[e][: moe.hidden_dim], moe.gate_up[e][moe.hidden_dim :]
            g = gate @ token
            row = row + p[e] / total * (moe.down[e] @ (g * torch.sigmoid(g) * (up @ token)))
        rows.append(row)
        chosen.append(taken)
    return torch.stack(rows).view(x.shape), torch.tensor(chosen).view(*x.shape[:-1], moe.top_k)


def no_near_ties(moe, x):
    """Whether the choice of every token is clear of rounding."""
    with torch.no_grad():
        p = moe(x).router_logits.softmax(-1).sort(-1, descending=True).values
    return moe.top_k == moe.num_experts or (p.diff(dim=-1).abs() > 1e-5).all()


@given(
    leading=st.sampled_from([(), (1,), (5,), (2, 3), (2, 1, 3)]),
    num_experts=st.sampled_from([1, 2, 5, 16]),
    top_k=st.sampled_from([1, 2, 5]),
    hidden_dim=st.sampled_from([1, 7]),
    normalize=st.booleans(),
)
def test_is_the_equation(leading, num_experts, top_k, hidden_dim, normalize):
    """M1: softmax over all experts, then the choice, then normalisation only if asked for."""
    top_k = min(top_k, num_experts)
    if normalize and top_k == 1:
        top_k, num_experts = 2, max(2, num_experts)
    options = {"hidden_dim": hidden_dim, "num_experts": num_experts, "top_k": top_k}
    moe = make(**options, normalize=normalize).double()
    x = torch.randn(*leading, 6, dtype=torch.float64)
    expected, chosen = by_token(moe, x)
    out = moe(x)
    assert_close(out.y, expected, terms=64)
    assert torch.equal(out.indices, chosen)
    assert_close(out.router_logits, x @ moe.router.weight.T, terms=6)
    p = out.router_logits.softmax(-1).gather(-1, chosen)
    assert_close(out.weights, p / p.sum(-1, keepdim=True) if normalize else p, terms=16)


@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck(normalize):
    moe = make(3, hidden_dim=2, num_experts=3, normalize=normalize).double()
    names, parameters = zip(*moe.named_parameters())
    x = torch.randn(2, 2, 3)
    assert no_near_ties(moe, x.double())
    with prefer("torch"):
        gradcheck(
            lambda x, *p: functional_call(moe, dict(zip(names, p)), (x,))[::3], [x, *parameters]
        )
    inputs = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    assert torch.autograd.gradcheck(
        lambda x, *p: functional_call(moe, dict(zip(names, p)), (x,)).y, inputs
    )


def sparse_block(kind, moe):
    """transformers' block with the weights of ours, as a function x (B, T, C) -> y."""
    from transformers import FlexOlmoConfig, MixtralConfig, OlmoeConfig
    from transformers.models.flex_olmo.modeling_flex_olmo import FlexOlmoSparseMoeBlock
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    sizes = {"hidden_size": moe.dim, "intermediate_size": moe.hidden_dim}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    sizes |= {"num_experts_per_tok": moe.top_k, "pad_token_id": 0, "eos_token_id": 0}
    if kind == "mixtral":
        config = MixtralConfig(**sizes, num_local_experts=moe.num_experts, head_dim=moe.dim)
        block = MixtralSparseMoeBlock(config)
    else:
        config_type, block_type = {
            "flex_olmo": (FlexOlmoConfig, FlexOlmoSparseMoeBlock),
            "olmoe": (OlmoeConfig, OlmoeSparseMoeBlock),
        }[kind]
        block = block_type(
            config_type(**sizes, num_experts=moe.num_experts, norm_topk_prob=moe.normalize)
        )
    block.gate.weight.data.copy_(moe.router.weight.data)
    block.experts.gate_up_proj.data.copy_(moe.gate_up.data)
    block.experts.down_proj.data.copy_(moe.down.data)
    return block


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["flex_olmo", "olmoe", "mixtral"])
def test_equals_transformers(kind, normalize):
    """M1: the peers' blocks, values and every gradient; Mixtral always normalises."""
    if kind == "mixtral" and not normalize:
        return
    moe = make(8, hidden_dim=12, num_experts=6, normalize=normalize)
    theirs = sparse_block(kind, moe)
    x = torch.randn(3, 5, 8)
    assert no_near_ties(moe, x)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    y, expected = moe(mine).y, theirs(other)
    expected = expected[0] if isinstance(expected, tuple) else expected
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
        assert_close(ours.grad, their.grad, terms=256)


def test_softmax_then_choice_normalised_is_choice_then_softmax():
    """M1, D4 69: the two orders agree exactly where the weights are normalised."""
    moe = make(normalize=True, num_experts=8, top_k=3)
    out = moe(torch.randn(20, 6))
    expected = out.router_logits.gather(-1, out.indices).softmax(-1)
    assert_close(out.weights, expected, terms=8)
    assert_close(out.weights.sum(-1), torch.ones(20), terms=8)


def test_normalize_is_used():
    """D4 82: the flag changes the result."""
    x = torch.randn(5, 6)
    plain, normal = make(), make(normalize=True)
    normal.load_state_dict(plain.state_dict())
    a, b = plain(x), normal(x)
    assert not torch.allclose(a.y, b.y)
    assert_close(a.y / a.weights.sum(-1, keepdim=True), b.y, terms=16)


def test_normalize_with_one_choice():
    """D4 71: weights of 1 teach the router nothing; it is said when the block is made."""
    with pytest.warns(UserWarning, match="router gets no gradient"):
        moe = make(top_k=1, normalize=True)
    moe(torch.randn(5, 6)).y.sum().backward()
    assert moe.router.weight.grad.abs().max() < 1e-6
    moe = make(top_k=1)
    moe(torch.randn(5, 6)).y.sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-4
    make(num_experts=1, top_k=1, normalize=True)


def test_rows_of_the_gate_come_first():
    """G1."""
    moe = make()
    moe.gate_up.data[:, :5] = 0
    assert (moe(torch.randn(3, 6)).y == 0).all()


def test_ties_go_to_the_lowest_index():
    """M2: `torch.topk` would take experts 3 and 6 here."""
    moe = make(num_experts=8, top_k=2)
    moe.router.weight.data.zero_()
    moe.router.weight.data[[1, 2, 3, 5, 6], 0] = 1.0
    x = torch.ones(4, 6)
    assert moe(x).indices.tolist() == [[1, 2]] * 4
    assert load_balancing_loss(moe(x).router_logits, top_k=2) > 2


def test_choice_does_not_depend_on_autocast_or_on_the_experts_dtype():
    """M2, D4 59."""
    moe = MoE(32, hidden_dim=4, num_experts=64, top_k=8)
    x = torch.randn(512, 32)
    out = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = moe(x)
    assert torch.equal(out.indices, narrow.indices)
    assert torch.equal(out.router_logits, narrow.router_logits)
    assert torch.equal(out.weights, narrow.weights)
    half = copy.deepcopy(moe)
    half.gate_up.data, half.down.data = moe.gate_up.data.bfloat16(), moe.down.data.bfloat16()
    assert torch.equal(half(x).indices, out.indices)
    whole = copy.deepcopy(moe).bfloat16()
    logits = x.bfloat16().float() @ whole.router.weight.float().T
    assert_close(whole(x.bfloat16()).router_logits, logits, terms=32)
    assert whole(x.bfloat16()).y.dtype == torch.bfloat16


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_dtypes(x_dtype, weight_dtype, autocast):
    """M12: forward and backward in each mixture; y has x's dtype, the routing float32."""
    moe = make().to(weight_dtype)
    x = torch.randn(7, 6).to(x_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = moe(x)
    assert out.y.dtype == x_dtype
    assert out.router_logits.dtype == out.weights.dtype == torch.float32
    (out.y.sum() + router_z_loss(out.router_logits)).backward()
    for t in (x, *moe.parameters()):
        assert t.grad.dtype == t.dtype
        assert t.grad.isfinite().all()


def test_every_parameter_gets_a_gradient():
    """M10, D4 56: few tokens to many experts, and no tokens at all."""
    for x in (torch.randn(1, 2, 6), torch.randn(2, 0, 6), torch.randn(0, 6)):
        moe = make(num_experts=16, top_k=1)
        out = moe(x)
        assert out.y.shape == x.shape
        assert out.indices.shape == (*x.shape[:-1], 1)
        out.y.sum().backward()
        for parameter in moe.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
        idle = set(range(16)) - set(out.indices.flatten().tolist())
        assert (moe.gate_up.grad[sorted(idle)] == 0).all()


def test_routing_is_replayed():
    """D4 62: the choices given are taken, whatever the router says now; weights are its own."""
    moe = make(num_experts=8, top_k=3, normalize=True)
    x = torch.randn(2, 5, 6)
    first = moe(x)
    same = moe(x, routing=first.indices)
    assert all(torch.equal(a, b) for a, b in zip(first, same))
    nn.init.normal_(moe.router.weight)
    moved = moe(x, routing=first.indices)
    assert torch.equal(moved.indices, first.indices)
    assert not torch.equal(moe(x).indices, first.indices)
    p = moved.router_logits.softmax(-1).gather(-1, first.indices)
    assert_close(moved.weights, p / p.sum(-1, keepdim=True), terms=8)
    assert torch.equal(moe(x, routing=first.indices.int()).y, moved.y)
    moved.y.sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0


def test_recomputation_takes_the_same_experts():
    """M13: near-tied router rows, autocast, checkpointing."""
    moe = MoE(16, hidden_dim=8, num_experts=8, top_k=2)
    moe.router.weight.data[1::2] = moe.router.weight.data[::2]
    x = torch.randn(40, 16)
    grads = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        moe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = wrap(moe, leaf)
            loss = out.y.float().square().sum()
        (loss + load_balancing_loss(out.router_logits, top_k=2)).backward()
        grads.append([leaf.grad, *(p.grad.clone() for p in moe.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_a_jittered_router_is_recomputed_by_replay():
    """M13, D4 62: routing noise that recomputation draws anew cannot change the experts."""
    moe = MoE(16, hidden_dim=8, num_experts=8, top_k=2)
    x = torch.randn(40, 16, requires_grad=True)
    routing = moe(x).indices

    def noisy(x):
        moved = functional_call(
            moe, {"router.weight": torch.randn(8, 16)}, (x,), {"routing": routing}
        )
        assert torch.equal(moved.indices, routing)
        return moved.y

    checkpoint(noisy, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert x.grad.isfinite().all()


@given(permutation=st.permutations(range(5)), cut=st.integers(0, 12))
def test_properties(permutation, cut):
    """Experts may be renamed, tokens reordered, batches split."""
    moe = make(num_experts=5)
    x = torch.randn(12, 6)
    out = moe(x)
    renamed = make(num_experts=5)
    order = torch.tensor(permutation)
    renamed.load_state_dict({name: value[order] for name, value in moe.state_dict().items()})
    again = renamed(x)
    assert_close(again.y, out.y, terms=16)
    assert torch.equal(order[again.indices], out.indices)
    tokens = torch.randperm(12)
    assert_close(moe(x[tokens]).y, out.y[tokens], terms=16)
    parts = torch.cat((moe(x[:cut]).y, moe(x[cut:]).y))
    assert_close(parts, out.y, terms=16)


def test_all_experts_is_the_dense_mixture():
    moe = make(top_k=4)
    x = torch.randn(7, 6)
    gate, up = torch.einsum("sc,efc->sef", x, moe.gate_up).chunk(2, -1)
    each = torch.einsum("sef,ecf->sec", nn.functional.silu(gate) * up, moe.down)
    p = (x @ moe.router.weight.T).softmax(-1)
    assert_close(moe(x).y, torch.einsum("se,sec->sc", p, each), terms=64)


def test_router_logits_are_raw():
    """D4 64: their rows are not probabilities."""
    out = make()(torch.randn(30, 6))
    assert (out.router_logits.exp().sum(-1) - 1).abs().min() > 1e-3
    assert (out.router_logits < 0).any()


def test_modules_and_names():
    """G2: what adapters must name: one linear router, and the parameters listed."""
    moe = make()
    assert {n: tuple(p.shape) for n, p in moe.named_parameters()} == {
        "router.weight": (4, 6),
        "gate_up": (4, 10, 6),
        "down": (4, 6, 5),
    }
    linear = {f"{n}.weight" for n, m in moe.named_modules() if isinstance(m, nn.Linear)}
    assert linear | set(MoE.expert_parameters) == set(moe.state_dict())
    seen = []
    moe.router.register_forward_hook(lambda module, args, out: seen.append(out))
    out = moe(torch.randn(3, 6))
    assert seen[0] is out.router_logits  # a module put in the router's place is really called


def test_reset_parameters_is_that_of_a_linear_per_expert():
    moe = MoE(64, hidden_dim=16, num_experts=4, top_k=2)
    for parameter, fan_in in ((moe.gate_up, 64), (moe.down, 16), (moe.router.weight, 64)):
        bound = fan_in**-0.5
        assert parameter.abs().max() <= bound
        assert abs(parameter.std().item() / (bound / 3**0.5) - 1) < 0.1
    before = moe.gate_up.clone()
    moe.reset_parameters()
    assert not torch.equal(before, moe.gate_up)
    with torch.device("meta"):
        empty = make()
    empty.to_empty(device="cpu").reset_parameters()
    assert all(p.abs().max() <= 1 for p in empty.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exports_traces_and_compiles_for_other_routings():
    """M11."""
    moe = make()
    x = torch.randn(2, 7, 6)
    shapes = {"x": {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("tokens", min=2)}}
    program = torch.export.export(moe, (x,), dynamic_shapes=shapes).module()
    traced = torch.jit.trace(moe, (x,), check_trace=False)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (7, 5, 4, 3, 9):
        other = torch.randn(2, tokens, 6)
        expected = moe(other)
        assert_close(compiled(other).y, expected.y, terms=16)
        assert_close(program(other)[0], expected.y, terms=16)
        other = torch.randn(2, 7, 6)
        assert_close(traced(other)[0], moe(other).y, terms=16)


def test_meta():
    moe = make().to("meta")
    out = moe(torch.empty(2, 3, 6, device="meta"))
    assert [t.shape for t in out] == [(2, 3, 6), (2, 3, 4), (2, 3, 2), (2, 3, 2)]


def test_errors():
    moe = make()
    x = torch.randn(2, 3, 6)
    good = moe(x).indices
    for bad in (torch.randn(2, 5), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 6\), got"):
            moe(bad)
    with pytest.raises(ValueError, match=r"x must be floating point, got torch\.int64"):
        moe(x.long())
    with pytest.raises(ValueError, match=r"routing must .* \(2, 3, 2\), got \(2, 3, 1\)"):
        moe(x, routing=good[..., :1])
    with pytest.raises(ValueError, match=r"routing must be int32 or int64, got torch\.float32"):
        moe(x, routing=good.float())
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"routing must be in \[0, 4\).* got {wrong}"):
            moe(x, routing=torch.full((2, 3, 2), wrong))
    with pytest.raises(TypeError):
        moe(x, attention_mask=None)
    with pytest.raises(ValueError, match="top_k must be at most the number of experts, 4, got 5"):
        make(top_k=5)
    for name in ("hidden_dim", "num_experts", "top_k"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            make(**{name: 0})
    with pytest.raises(ValueError, match="dim must be an integer of at least 1, got -1"):
        make(-1)
    with pytest.raises(ValueError, match="normalize must be True or False, got None"):
        make(normalize=None)


def test_router_is_a_linear_layer_in_float32():
    router = Router(6, 4, bias=True)
    x = torch.randn(3, 6)
    assert_close(router(x), nn.functional.linear(x, router.weight, router.bias), terms=6)
    assert router.double()(x).dtype == torch.float64


# The balancing losses.


def balance_by_definition(layers, top_k, masks):
    """Per layer, in float64: E Σ_e (share of choices) (mean probability), over the real rows."""
    losses = []
    for logits, mask in zip(layers, masks):
        p = torch.softmax(logits.double().reshape(-1, logits.shape[-1])[mask.reshape(-1)], -1)
        chosen = torch.zeros_like(p).scatter(1, p.topk(top_k).indices, 1.0)
        losses.append(p.shape[-1] * (chosen.mean(0) * p.mean(0)).sum())
    return torch.stack(losses).mean()


@given(
    experts=st.sampled_from([1, 2, 7]),
    top_k=st.sampled_from([1, 2, 4]),
    layers=st.sampled_from([1, 3]),
)
def test_balance_is_the_definition(experts, top_k, layers):
    """M3, M8, D4 65."""
    top_k = min(top_k, experts)
    logits = [torch.randn(2, 5, experts) * 3 for _ in range(layers)]
    mask = torch.rand(2, 5) < 0.7
    mask[0, 0] = True
    for m in (None, mask):
        masks = [torch.ones(2, 5, dtype=torch.bool) if m is None else m] * layers
        loss = load_balancing_loss(logits, top_k=top_k, mask=m)
        assert_close(loss, balance_by_definition(logits, top_k, masks), terms=70)
        pooled = load_balancing_loss(logits, top_k=top_k, mask=m, balance="pooled")
        expected = balance_by_definition([torch.stack(logits)], top_k, [torch.stack(masks)])
        assert_close(pooled, expected, terms=70)
        flat = [t.flatten(0, 1) for t in logits]
        assert torch.equal(load_balancing_loss(flat, top_k=top_k, mask=m), loss)


@pytest.mark.parametrize("masked", [False, True])
def test_pooled_equals_transformers(masked):
    from transformers.models.flex_olmo.modeling_flex_olmo import load_balancing_loss_func

    logits = tuple(torch.randn(10, 6, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 5)
    mask[1, 2:] = 0
    mask = mask if masked else None
    ours = load_balancing_loss(logits, top_k=2, mask=mask, balance="pooled")
    theirs = load_balancing_loss_func(logits, 6, 2, mask)
    assert_close(ours, theirs, terms=60)
    for a, b in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)):
        assert_close(a, b, terms=60)


@pytest.mark.parametrize("balance", ["per_layer", "pooled"])
def test_balance_of_uniform_random_and_collapsed_routers(balance):
    """M8, D4 65: K, more, and E, each with a gradient through the probabilities."""
    uniform = torch.zeros(64, 8)
    random = torch.randn(64, 8)
    collapsed = torch.zeros(64, 8)
    collapsed[:, 3] = 50.0
    losses = []
    for logits in (uniform, random, collapsed):
        logits.requires_grad_()
        losses.append(load_balancing_loss(logits, top_k=1, balance=balance))
    assert losses[0] == 1.0
    assert losses[0] < losses[1] < losses[2]
    assert abs(losses[2] - 8.0) < 1e-5
    assert torch.autograd.grad(losses[1], random)[0].abs().max() > 1e-4
    assert load_balancing_loss(torch.zeros(5, 8), top_k=3, balance=balance) == 3.0


def test_per_layer_sees_layers_that_collapse_in_opposite_ways():
    """M3: pooled, four layers that each use one expert look balanced."""
    layers = [torch.full((6, 4), -30.0).index_fill(1, torch.tensor([i]), 30.0) for i in range(4)]
    assert abs(load_balancing_loss(layers, top_k=1, balance="pooled") - 1.0) < 1e-6
    assert abs(load_balancing_loss(layers, top_k=1) - 4.0) < 1e-6


@pytest.mark.parametrize("balance", ["per_layer", "pooled"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_padding_changes_nothing(balance, dtype):
    """M4, D4 66: values and router gradient, whatever the padding holds and the mask's dtype."""
    real = [torch.randn(2, 5, 6) for _ in range(2)]
    mask = torch.cat((torch.ones(2, 5), torch.zeros(2, 7)), 1).to(dtype)
    for fill in (0.0, 9.0, float("nan"), float("inf")):
        padded = [torch.cat((t, torch.full((2, 7, 6), fill)), 1) for t in real]

        def losses(*layers, mask=None):
            options = {"top_k": 2, "mask": mask, "balance": balance}
            return load_balancing_loss(layers, **options), router_z_loss(layers, mask=mask)

        values, grads = gradients(lambda *t: losses(*t, mask=mask), padded)
        expected, expected_grads = gradients(losses, real)
        for a, b in zip(values, expected):
            assert_close(a, b, terms=60)
        for a, b in zip(grads, expected_grads):
            assert_close(a[:, :5], b, terms=60)
            assert (a[:, 5:] == 0).all()


def test_nothing_real_is_zero_with_a_graph():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    for x, mask in ((logits, torch.zeros(2, 3)), (logits[:, :0], None)):
        for balance in ("per_layer", "pooled"):
            loss = load_balancing_loss(x, top_k=2, mask=mask, balance=balance)
            loss = loss + router_z_loss(x, mask=mask)
            assert loss == 0
            (grad,) = torch.autograd.grad(loss, logits)
            assert (grad == 0).all()


def test_pooled_does_not_depend_on_how_the_batch_is_split():
    """D4 67, 68, 80: the logits of micro-batches, or of ranks, give the loss of the whole batch."""
    logits = torch.randn(12, 6)
    whole = load_balancing_loss(logits, top_k=2, balance="pooled")
    for cuts in ((12,), (4, 8), (1, 2, 9), (3, 3, 3, 3)):
        parts = load_balancing_loss(logits.split(cuts), top_k=2, balance="pooled")
        assert_close(parts, whole, terms=72)


def test_losses_are_float32_and_autocast_changes_nothing():
    """D4 80."""
    logits = torch.randn(2, 5, 6).bfloat16()
    for loss in (lambda t: load_balancing_loss(t, top_k=2), router_z_loss):
        assert torch.equal(loss(logits), loss(logits.float()))
        assert loss(logits).dtype == torch.float32
        assert loss(logits.double()).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(logits), loss(logits.float()))


def test_gradient_is_linear_in_the_coefficient():
    """M9, also where the logits come out of a checkpointed block."""
    moe = make()
    x = torch.randn(8, 6, requires_grad=True)

    def router_grad(coefficient):
        moe.zero_grad()
        out = checkpoint(moe, x, use_reentrant=False)
        loss = out.y.sum() + coefficient * load_balancing_loss(out.router_logits, top_k=2)
        loss.backward()
        return moe.router.weight.grad.clone()

    none, once, twice = (router_grad(c) for c in (0.0, 1.0, 2.0))
    assert (once - none).abs().max() > 1e-4
    assert_close(twice - none, 2 * (once - none), terms=64, scale=twice.abs().max().item())


def test_losses_gradcheck():
    mask = torch.tensor([[1, 1, 0]])
    layers = [torch.randn(1, 3, 4) for _ in range(2)]
    for balance in ("per_layer", "pooled"):
        gradcheck(
            lambda *t, b=balance: load_balancing_loss(t, top_k=2, mask=mask, balance=b), layers
        )
    gradcheck(lambda *t: router_z_loss(t, mask=mask), layers)


def test_z_loss_is_the_definition():
    layers = [torch.randn(2, 5, 6), torch.randn(2, 5, 6) * 4]
    expected = torch.stack([t.double().exp().sum(-1).log().square().mean() for t in layers]).mean()
    assert_close(router_z_loss(layers), expected, terms=60)
    assert router_z_loss(torch.full((3, 4), 1e4)).isfinite()


def test_losses_compile_and_run_on_meta():
    def both(logits, mask):
        return load_balancing_loss(logits, top_k=2, mask=mask) + router_z_loss(logits, mask=mask)

    logits, mask = torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_close(compiled(logits, mask), both(logits, mask), terms=60)
    assert both(logits.to("meta"), mask.to("meta")).shape == ()


def test_loss_errors():
    logits = torch.randn(2, 3, 4)
    for loss in (lambda t, **o: load_balancing_loss(t, top_k=2, **o), router_z_loss):
        with pytest.raises(
            ValueError, match="router_logits must hold at least one layer, got none"
        ):
            loss([])
        with pytest.raises(ValueError, match=r"router_logits must be floating point, got"):
            loss(logits.long())
        with pytest.raises(ValueError, match=r"with one E, got \(2, 3, 5\) beside \(2, 3, 4\)"):
            loss([logits, torch.randn(2, 3, 5)])
        for shape in ((3, 2), (6,), (2, 1, 3, 3), (2, 4)):
            with pytest.raises(ValueError, match=r"mask must have the leading shape of .*\(2, 3\)"):
                loss(logits, mask=torch.ones(shape))
        for wrong in (2.0, -1e9, 0.5):
            with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
                loss(logits, mask=torch.full((2, 3), wrong))
    with pytest.raises(ValueError, match="top_k must be at most the number of experts, 4, got 5"):
        load_balancing_loss(logits, top_k=5)
    with pytest.raises(ValueError, match=r"balance must be one of .*, got 'global'"):
        load_balancing_loss(logits, top_k=2, balance="global")
