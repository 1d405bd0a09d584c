from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

from brickwork.blocks import Attention, KVCache, RoPE
from brickwork.blocks import attention as attention_module
from brickwork.kernels.rope import convert_rope_layout, rope

DIM, HEADS, HEAD_DIM = 24, 6, 8
TERMS = 4 * DIM  # sums through two projections and over the keys
ROPES = {
    None: None,
    "half": {},
    "interleaved": {"layout": "interleaved"},
    "partial": {"rotary_dim": 4},
    "dynamic": {"scaling": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 3}},
    "longrope": {
        "scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "max_position_embeddings": 16,
            "original_max_position_embeddings": 4,
        }
    },
}
OPTIONS = st.fixed_dictionaries(
    {
        "num_kv_heads": st.sampled_from([1, 2, 3, 6]),
        "qk_norm": st.sampled_from([None, "full", "head"]),
        "causal": st.booleans(),
        "bias": st.booleans(),
        "out_bias": st.sampled_from([None, True, False]),
        "rope": st.sampled_from(list(ROPES)),
    }
)
EACH_OPTION = [
    {},
    {"causal": True},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "causal": True},
    {"qk_norm": "full", "num_kv_heads": 3, "rope": "half"},
    {"qk_norm": "head", "rope": "interleaved", "causal": True},
    {"bias": True, "rope": "partial"},
    {"out_bias": True, "rope": "dynamic"},
    {"rope": "longrope", "num_kv_heads": 2, "causal": True},
]


def build(rope: str | None = None, **options) -> Attention:
    turn = None if rope is None else RoPE(HEAD_DIM, base=50.0, **ROPES[rope])
    options = {"num_heads": HEADS, "head_dim": HEAD_DIM, "rope": turn} | options
    attention = Attention(DIM, **options)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:  # so that the order of norm and rotation shows
            torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    return attention


def as_function(attention: Attention):
    """The block as a function of x and its parameters, and these, by name."""
    parameters = {name: p.detach() for name, p in attention.named_parameters()}

    def function(x, parameters, **arguments):
        return torch.func.functional_call(attention, parameters, (x,), arguments)

    return function, parameters


def by_hand(attention: Attention, x, parameters, *, allowed, positions, lengths, bias=0.0):
    """The equation, in the dtype of x; `allowed` is broadcastable to (B, H, T, T)."""

    def linear(a, name):
        y = a @ parameters[f"{name}.weight"].T
        return y + parameters.get(f"{name}.bias", 0.0)

    def turned(a, name):
        scale = parameters.get(f"{name}.weight")
        if attention.qk_norm == "head":
            a = a.unflatten(-1, (-1, HEAD_DIM))
        if scale is not None:
            a = a * (a.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
        if attention.qk_norm != "head":
            a = a.unflatten(-1, (-1, HEAD_DIM))
        return a if attention.rope is None else attention.rope(a, positions, lengths)

    group = attention.num_heads // attention.num_kv_heads
    q = turned(linear(x, "q_proj"), "q_norm")
    k = turned(linear(x, "k_proj"), "k_norm").repeat_interleave(group, 2)
    v = linear(x, "v_proj").unflatten(-1, (-1, HEAD_DIM)).repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / HEAD_DIM**0.5 + bias
    weights = scores.exp() * allowed
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return linear(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2), "o_proj")


def assert_same_as_by_hand(attention, x, arguments, **rules):
    """In value, and in the gradients of x and of every parameter."""
    function, parameters = as_function(attention)
    sides = []
    for call, dtype, given_arguments in (
        (function, torch.float32, arguments),
        (lambda x, p, **a: by_hand(attention, x, p, **a), torch.float64, rules),
    ):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *parameters.values())]
        y = call(leaves[0], dict(zip(parameters, leaves[1:])), **given_arguments)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        sides.append([y, *torch.autograd.grad(y, leaves, upstream.to(dtype))])
    # A key's bias may have no effect and the gradient 0: the scale is that of all gradients.
    scale = max(g.abs().max().item() for g in sides[1])
    for name, actual, expected in zip(["y", "x", *parameters], *sides):
        assert_close(actual, expected, terms=TERMS, scale=scale, name=name)


@given(options=OPTIONS, tokens=st.sampled_from([1, 2, 5, 9]), padded=st.booleans())
def test_equals_the_equation(options, tokens, padded):
    """A1, A4, A5, D1 #32-33: every option; padding anywhere, whole rows too."""
    attention = build(**options)
    real = torch.rand(3, tokens) < 0.6 if padded else torch.ones(3, tokens, dtype=torch.bool)
    allowed = real[:, None, None]
    if attention.causal:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    assert_same_as_by_hand(
        attention,
        torch.randn(3, tokens, DIM),
        {"mask": real if padded else None},
        allowed=allowed,
        positions=(real.cumsum(1) - 1).clamp(min=0),
        lengths=real.sum(1),
    )


@pytest.mark.parametrize("name", ["Qwen3", "Olmo2"])
def test_equals_transformers(name):
    """A5: QK-norm per head (Qwen 3) and over the whole projection (OLMo 2), from their weights."""
    import transformers
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    config = getattr(transformers, f"{name}Config")(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        attn_implementation="sdpa",
    )
    config.head_dim = HEAD_DIM
    theirs = {"Qwen3": Qwen3Attention, "Olmo2": Olmo2Attention}[name](config, 0).eval()
    for norm in (theirs.q_norm, theirs.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    qk_norm = "head" if name == "Qwen3" else "full"
    eps = config.rms_norm_eps
    turn = RoPE(HEAD_DIM, base=10000.0)
    ours = build(num_kv_heads=2, qk_norm=qk_norm, norm_eps=eps, causal=True)
    ours.rope = turn
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 7, DIM), torch.arange(7)
    angles = (positions[:, None] * turn.inv_freq()).repeat(1, 2)[None]
    expected, _ = theirs(x, (angles.cos(), angles.sin()), None)
    assert_close(ours(x), expected, terms=TERMS)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rule", ["none", "padding", "per_head", "bias"])
def test_head_h_reads_group_h_over_groups_on_every_path(tokens, rule, monkeypatch):
    """A4, D1 #34: `enable_gqa`, repeated heads and folded heads, by constants and by equality."""
    attention = build(num_kv_heads=2, rope="half")
    x = torch.randn(2, tokens, DIM)
    masks = {
        "none": None,
        "padding": torch.ones(2, tokens, dtype=torch.bool),
        "per_head": torch.rand(2, HEADS, tokens, tokens) < 0.8,
        "bias": torch.randn(1, HEADS, tokens, tokens),
    }
    results = []
    for fused in (False, True):
        monkeypatch.setattr(attention_module, "_gqa_is_fused", lambda q, mask, fused=fused: fused)
        results.append(attention(x, mask=masks[rule]))
    assert_close(results[0], results[1], terms=TERMS)
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.v_proj.weight.zero_()
        attention.v_proj.bias = torch.nn.Parameter(
            torch.tensor([3.0] * HEAD_DIM + [5.0] * HEAD_DIM)
        )
        attention.o_proj = torch.nn.Identity()
        expected = torch.tensor([3.0] * 3 * HEAD_DIM + [5.0] * 3 * HEAD_DIM)
        for fused in (False, True):
            monkeypatch.setattr(attention_module, "_gqa_is_fused", lambda q, m, fused=fused: fused)
            assert_close(attention(x), expected.expand(2, tokens, -1), terms=TERMS)


def test_gqa_rule():
    """D1 #34: fused grouped heads only where PyTorch has such a kernel."""
    fused = attention_module._gqa_is_fused
    assert fused(torch.empty(1, 2, 3, 8), torch.ones(1))
    assert not fused(torch.empty(1, 2, 3, 8, device="meta"), None)


@pytest.mark.parametrize("tokens", [127, 128, 129])
def test_lengths_around_a_block_with_three_groups(tokens):
    """D1 #35."""
    attention = build(num_kv_heads=3, causal=True, rope="half")
    grouped = copy.deepcopy(attention)
    rows = torch.arange(HEADS).repeat_interleave(HEAD_DIM) // 2 * HEAD_DIM
    rows = rows + torch.arange(HEAD_DIM).repeat(HEADS)
    whole = build(causal=True, rope="half")
    state = grouped.state_dict()
    whole.load_state_dict(
        state | {f"{n}_proj.weight": state[f"{n}_proj.weight"][rows] for n in ("k", "v")}
    )
    x = torch.randn(1, tokens, DIM)
    assert_close(grouped(x), whole(x), terms=TERMS + tokens)


@given(options=OPTIONS, cut=st.integers(0, 5))
def test_causal_means_that_later_tokens_change_nothing(options, cut):
    attention = build(**(options | {"causal": True}))
    if attention.rope is not None and attention.rope.length_dependent:
        attention.rope = RoPE(HEAD_DIM)  # there the length of the whole is meant to matter
    x = torch.randn(1, 6, DIM)
    other = torch.cat((x[:, :cut], torch.randn(1, 6 - cut, DIM)), 1)
    assert_close(attention(other)[:, :cut], attention(x)[:, :cut], terms=TERMS)
    leaf = x.clone().requires_grad_()
    attention(leaf)[:, :cut].sum().backward()
    assert not leaf.grad[:, cut:].any()


@given(options=OPTIONS, offset=st.sampled_from([1, 100]))
def test_only_differences_of_positions_matter(options, offset):
    """D2 #43."""
    attention = build(**options)
    x, positions = torch.randn(2, 5, DIM), torch.randint(0, 9, (2, 5))
    y = attention(x, positions=positions)
    if attention.rope is not None and attention.rope.length_dependent:
        return
    # angles near 100 radians in float32 carry 100 times the rounding error of the others
    moved = attention(x, positions=positions + offset)
    assert_close(moved, y, terms=TERMS * offset**2)


@pytest.mark.parametrize("part", [None, 4])
@pytest.mark.parametrize("qk_norm", [None, "head", "full"])
def test_complex_form_equals_rotate_half_after_conversion(qk_norm, part):
    """R6: weights, biases and QK-norm weights; 6 query heads, 2 key heads."""
    options = {"num_kv_heads": 2, "qk_norm": qk_norm, "bias": True, "causal": True}
    attention, converted = build(**options), build(**options)
    attention.rope = RoPE(HEAD_DIM, layout="interleaved", rotary_dim=part)
    converted.rope = RoPE(HEAD_DIM, layout="half", rotary_dim=part)
    state = attention.state_dict()
    for name, tensor in state.items():
        if name[0] in "qk":
            heads = HEADS if name[0] == "q" else 2
            if "norm" in name and qk_norm == "head":
                heads = 1
            state[name] = convert_rope_layout(tensor, num_heads=heads, to="half", rotary_dim=part)
    x = torch.randn(2, 5, DIM)
    assert (attention(x) - build_like(converted, attention.state_dict())(x)).abs().max() > 1e-3
    converted.load_state_dict(state)
    assert_close(converted(x), attention(x), terms=TERMS)

    def scores(block):
        q, k, _ = block._project(x)
        q, k = block.rope(q, torch.arange(5)), block.rope(k, torch.arange(5))
        return torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(3, 2))

    assert_close(scores(converted), scores(attention), terms=TERMS)


def build_like(attention, state):
    other = copy.deepcopy(attention)
    other.load_state_dict(state)
    return other


def test_norm_comes_before_rotation():
    """A5, D1 #33: equal in either order without a weight, not with one."""
    attention = build(qk_norm="head")
    q = torch.randn(1, 5, HEADS, HEAD_DIM)
    options = {"inv_freq": RoPE(HEAD_DIM).inv_freq(), "layout": "half"}

    def difference():
        first = rope(attention.q_norm(q), torch.arange(5), **options)
        return (first - attention.q_norm(rope(q, torch.arange(5), **options))).abs().max()

    assert difference() > 0.01
    attention.reset_parameters()
    assert difference() < 1e-5


def real_parts(attention, x, real, **arguments):
    """The outputs at real tokens, row by row, and their gradients in x and the parameters."""
    function, parameters = as_function(attention)
    leaves = [t.detach().clone().requires_grad_() for t in (x, *parameters.values())]
    y = function(leaves[0], dict(zip(parameters, leaves[1:])), **arguments)
    upstream = torch.randn(y[real].shape, generator=torch.Generator().manual_seed(2))
    return y[real], torch.autograd.grad(y[real], leaves, upstream)


def assert_same_sequences(attention, sequences, x, real, **arguments):
    """`x[real]` holds the sequences one after the other: each gets what it gets alone."""
    function, parameters = as_function(attention)
    leaves = [t.detach().clone().requires_grad_() for t in (*sequences, *parameters.values())]
    alone = [
        function(leaf[None], dict(zip(parameters, leaves[len(sequences) :])))[0]
        for leaf in leaves[: len(sequences)]
    ]
    expected = torch.cat(alone)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad(expected, leaves, upstream)
    y, (dx, *found) = real_parts(attention, x, real, **arguments)
    scale = max(g.abs().max().item() for g in grads)
    assert_close(y, expected, terms=TERMS)
    assert_close(dx[real], torch.cat(grads[: len(sequences)]), terms=TERMS, scale=scale)
    assert not dx[~real].any()
    for name, a, e in zip(parameters, found, grads[len(sequences) :]):
        assert_close(a, e, terms=TERMS, scale=scale, name=name)


@given(
    options=OPTIONS,
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    side=st.sampled_from(["left", "right", "both", "inside"]),
    dtype=st.sampled_from([torch.bool, torch.int64, torch.uint8]),
)
def test_padded_equals_unpadded(options, lengths, side, dtype):
    """A8, L1 (blocks): left, right, both sides and inside a sequence; values and gradients."""
    attention = build(**options)
    tokens = max(lengths) + 2
    real = torch.zeros(len(lengths), tokens, dtype=torch.bool)
    for b, n in enumerate(lengths):
        if side == "inside":
            real[b, torch.randperm(tokens)[:n]] = True
        else:
            start = {"left": tokens - n, "right": 0, "both": (tokens - n) // 2}[side]
            real[b, start : start + n] = True
    sequences = [torch.randn(n, DIM) for n in lengths]
    x = 100 * torch.randn(len(lengths), tokens, DIM)
    x[real] = torch.cat(sequences)
    assert_same_sequences(attention, sequences, x, real, mask=real.to(dtype))


@given(
    options=OPTIONS,
    rows=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=2),
    ids=st.sampled_from([(0, 1, 2), (7, 3, 7)]),
    gap=st.booleans(),
)
def test_packed_equals_separate(options, rows, ids, gap):
    """Also with padding between and inside the sequences, and ids used twice."""
    attention = build(**options)
    tokens = max(map(sum, rows)) + (2 if gap else 0)
    real = torch.zeros(len(rows), tokens, dtype=torch.bool)
    seq_ids = torch.full((len(rows), tokens), -1)
    for b, lengths in enumerate(rows):
        places = torch.randperm(tokens)[: sum(lengths)].sort().values
        if not gap:
            places = torch.arange(sum(lengths))
        real[b, places] = True
        seq_ids[b, places] = torch.tensor(ids[: len(lengths)]).repeat_interleave(
            torch.tensor(lengths)
        )
    sequences = [torch.randn(n, DIM) for lengths in rows for n in lengths]
    x = 100 * torch.randn(len(rows), tokens, DIM)
    x[real] = torch.cat(sequences)
    mask = None if real.all() else real
    assert_same_sequences(attention, sequences, x, real, mask=mask, seq_ids=seq_ids)


@pytest.mark.parametrize("name", ROPES)
def test_positions_given_or_counted(name):
    """Explicit positions, per row; those of padding do not matter, not even as a length."""
    attention = build(name, causal=True)
    x = torch.randn(2, 5, DIM)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    counted = attention(x, mask=mask)
    given_positions = torch.tensor([[900, 900, 0, 1, 2], [0, 1, 2, 3, 4]])
    real = mask.bool()
    y = attention(x, mask=mask, positions=given_positions)
    assert_close(y[real], counted[real], terms=TERMS)
    assert torch.equal(attention(x, positions=torch.arange(5)), attention(x))
    assert torch.equal(attention(x, positions=torch.arange(5)[None].int()), attention(x))


@pytest.mark.parametrize("causal", [False, True])
@given(data=st.data())
def test_masks_of_every_form_combine(causal, data):
    """A1: padding together with rules and biases of the caller's, in any number and order."""
    attention = build(causal=causal, num_kv_heads=2, rope="half")
    shapes = [(2, 5, 5), (1, 5, 5), (2, 1, 5, 5), (1, HEADS, 5, 5), (2, HEADS, 5, 5), (1, 1, 1, 5)]
    kinds = data.draw(st.lists(st.sampled_from(["padding", "bool", "float"]), max_size=4))
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    real, bias = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 1, 5, 5)
    masks = []
    for kind in kinds:
        if kind == "padding":
            masks.append(torch.rand(2, 5) < 0.8)
            real = real & masks[-1]
            continue
        shape = data.draw(st.sampled_from(shapes))
        seen = torch.rand(shape) < 0.7
        hidden = data.draw(st.sampled_from([-torch.inf, torch.finfo(torch.float32).min]))
        values = torch.randn(shape).masked_fill(~seen, hidden)
        masks.append(seen if kind == "bool" else values)
        if len(shape) == 3:
            seen, values = seen[:, None], values[:, None]
        allowed = allowed & seen
        if kind == "float":
            bias = bias + values.masked_fill(~seen, 0.0)
    allowed = allowed & real[:, None, None]
    if causal:
        allowed = allowed & torch.ones(5, 5, dtype=torch.bool).tril()
    assert_same_as_by_hand(
        attention,
        torch.randn(2, 5, DIM),
        {"mask": masks[0] if len(masks) == 1 else tuple(masks)},
        allowed=allowed,
        bias=bias,
        positions=(real.cumsum(1) - 1).clamp(min=0),
        lengths=None,
    )


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("form", ["padding", "bool", "-inf", "min", "min twice"])
def test_a_query_without_keys_gets_zero_and_no_nan(form, backend):
    """A1: one row is all padding; the other row and its loss do not notice."""
    attention = build(num_kv_heads=2, rope="half", qk_norm="head")
    attention.o_proj = torch.nn.Identity()
    x = torch.randn(2, 4, DIM, requires_grad=True)
    seen = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    lowest = torch.finfo(torch.float32).min
    rules = {
        "padding": seen,
        "bool": seen[:, None, None].expand(2, 1, 4, 4),
        "-inf": torch.zeros(2, 1, 4, 4).masked_fill(~seen[:, None, None], -torch.inf),
        "min": torch.zeros(2, 1, 1, 4).masked_fill(~seen[:, None, None], lowest),
        "min twice": torch.zeros(2, 1, 1, 4).masked_fill(~seen[:, None, None], lowest) * 2,
    }
    if backend is None:
        y = attention(x, mask=rules[form])
    else:
        with sdpa_kernel(backend):
            y = attention(x, mask=rules[form])
    assert not y[1].any()
    y.square().sum().backward()
    grads = [x.grad, *(p.grad for p in attention.parameters())]
    assert all(g.isfinite().all() for g in grads)
    assert not x.grad[1].any()
    own = x.detach()[:1].requires_grad_()
    alone = attention(own)
    assert_close(y[:1], alone, terms=TERMS)
    alone.square().sum().backward()
    assert_close(x.grad[:1], own.grad, terms=TERMS)


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("bool_mask", [False, True])
def test_no_kernel_is_asked_for_a_softmax_over_nothing(bool_mask, value, monkeypatch):
    """A1: kernels and versions of PyTorch differ there, so it never comes to it."""
    rows = []

    def record(q, k, v, *, attn_mask, **options):
        rows.append(attn_mask if attn_mask.dtype == torch.bool else attn_mask.isfinite())
        return torch.zeros(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    bias = torch.zeros(2, 1, 4, 4).masked_fill(
        torch.tensor([[1.0], [0.0]])[:, None, None] == 0, value
    )
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]])
    build(causal=True)(torch.randn(2, 4, DIM), mask=mask if bool_mask else (mask, bias))
    assert rows[0].any(-1).all()


def test_a_learned_bias_gets_its_gradient():
    attention = build(causal=True)
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    attention.double()
    bias = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert torch.autograd.gradcheck(lambda b: attention(x, mask=(mask, b)), [bias])


@pytest.mark.parametrize("options", EACH_OPTION)
def test_gradcheck(options):
    """Every option in float64; second derivatives with PyTorch's composite kernel."""
    attention = build(**options).double()
    function, parameters = as_function(attention)
    names = list(parameters)
    leaves = [torch.randn(1, 4, DIM).double(), *parameters.values()]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    rules = {"mask": torch.tensor([[0, 1, 1, 1]]), "seq_ids": torch.tensor([[0, 0, 1, 1]])}

    def call(x, *parameters):
        state = dict(zip(names, parameters))
        return function(x, state) + function(x, state, **rules)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("options", EACH_OPTION)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_runs_forward_and_backward(options, dtype):
    """R2, R10, N2: with the mask in float32 too; close to the float32 block."""
    attention = build(**options).to(dtype)
    x = torch.randn(2, 5, DIM, dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    y = attention(x, mask=(mask, torch.zeros(1, 1, 5, 5)))
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad.dtype == dtype
    wide = copy.deepcopy(attention).double()(x.double(), mask=mask)
    # every step of the narrow block rounds: the sums' terms carry its epsilon
    assert_close(y, wide, terms=TERMS, compute=dtype)


@pytest.mark.parametrize("options", EACH_OPTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(options, dtype, x_dtype):
    """R3, R10, N2: float32 weights and norms under autocast, forward and backward."""
    attention = build(**options)
    x = torch.randn(2, 5, DIM, dtype=x_dtype, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    with torch.autocast("cpu", dtype):
        y = attention(x, mask=(mask, torch.zeros(1, 1, 5, 5)))
        q, k, v = attention._project(x)
        assert q.dtype == k.dtype == v.dtype == dtype
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in attention.parameters())
    wide = copy.deepcopy(attention).double()(x.double(), mask=mask)
    assert_close(y, wide, terms=TERMS, compute=torch.bfloat16)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_to_one_graph(packed):
    """Once for one length, once for any other."""
    attention = build("longrope", num_kv_heads=2, qk_norm="head", causal=True)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for tokens in (4, 7, 9):
        x, arguments = torch.randn(2, tokens, DIM), {}
        if packed:
            arguments["mask"] = torch.arange(tokens) >= torch.tensor([[0], [2]])
            arguments["seq_ids"] = (torch.arange(tokens) // 3).expand(2, -1)
        with torch._dynamo.config.patch(error_on_recompile=tokens == 9):
            assert_close(compiled(x, **arguments), attention(x, **arguments), terms=TERMS)


def test_exports_with_dynamic_sizes_and_without_complex_numbers():
    """R1."""
    attention = build(rope="interleaved", causal=True, num_kv_heads=2)

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x, mask):
            return self.attention(x, mask=mask)

    batch, tokens = torch.export.Dim("B", min=2, max=64), torch.export.Dim("T", min=2, max=64)
    sizes = {0: batch, 1: tokens}
    example = (torch.randn(3, 5, DIM), torch.ones(3, 5, dtype=torch.int64))
    program = torch.export.export(Masked(), example, dynamic_shapes=(sizes, sizes))
    for node in program.graph.nodes:
        value = node.meta.get("val")
        assert not (isinstance(value, torch.Tensor) and value.is_complex())
    x, mask = torch.randn(2, 9, DIM), torch.arange(9) >= torch.tensor([[0], [4]])
    assert_close(program.module()(x, mask.long()), attention(x, mask=mask), terms=TERMS)


def test_checkpointing_changes_nothing():
    """A10, without a cache."""
    attention = build(causal=True, rope="half")
    grads = []
    for reentrant in (None, False, True):
        x = torch.ones(2, 4, DIM).cumsum(1).requires_grad_()
        attention.zero_grad()
        if reentrant is None:
            y = attention(x)
        else:
            y = torch.utils.checkpoint.checkpoint(attention, x, use_reentrant=reentrant)
        y.square().sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in attention.parameters())])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other))


def test_vmap_over_stacked_blocks():
    blocks = [build(rope="half", num_kv_heads=2, causal=True) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(blocks)
    x = torch.randn(2, 5, DIM)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])

    def call(parameters, mask):
        return torch.func.functional_call(blocks[0], (parameters, buffers), (x,), {"mask": mask})

    masks = torch.stack((mask, mask.flip(0), mask * 0 + 1))
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no rule for vmap and warns
        y = torch.func.vmap(call)(parameters, masks)
    for one, block, m in zip(y, blocks, masks):
        assert_close(one, block(x, mask=m), terms=TERMS)


def test_meta_empty_and_reset():
    """R4, R5: built on meta, emptied, loaded: equal; nothing but parameters to lose."""
    attention = build(rope="half", qk_norm="head", bias=True)
    with torch.device("meta"):
        other = build(rope="half", qk_norm="head", bias=True)
    assert other(torch.empty(2, 3, DIM, device="meta")).shape == (2, 3, DIM)
    other.to_empty(device="cpu")
    other.reset_parameters()
    x = torch.randn(2, 3, DIM)
    assert other(x).isfinite().all()
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(x), attention(x))
    assert not list(attention.buffers())
    assert set(attention.state_dict()) == {
        *(f"{n}_proj.{kind}" for n in "qkvo" for kind in ("weight", "bias")),
        "q_norm.weight",
        "k_norm.weight",
    }


@pytest.mark.parametrize("options", EACH_OPTION)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_tokens(options, shape):
    attention = build(**options)
    x = torch.empty(*shape, DIM, requires_grad=True)
    ones = torch.ones(shape, dtype=torch.int64)
    for arguments in ({}, {"mask": ones}, {"seq_ids": ones}, {"mask": ones, "seq_ids": ones}):
        y = attention(x, **arguments)
        assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None for p in attention.parameters())
    assert attention(x, positions=torch.arange(shape[1])).shape == x.shape
    assert attention(x, cache=KVCache()).shape == x.shape


def test_one_rope_serves_several_layers():
    shared = RoPE(HEAD_DIM)
    layers = torch.nn.ModuleList(build() for _ in range(2))
    for layer in layers:
        layer.rope = shared
    copied = copy.deepcopy(layers)
    assert copied[0].rope is copied[1].rope
    assert not any("rope" in key for key in layers.state_dict())


def test_dropout_in_training_only():
    attention = build(dropout=0.5)
    x = torch.randn(1, 6, DIM)
    plain = build_like(build(), attention.state_dict())(x)
    assert torch.equal(attention.eval()(x), plain)
    draws = attention.train()(x.expand(2000, 6, DIM))
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - plain[0]).abs() / (draws.std(0) / 2000**0.5)
    assert error.max() < 5  # standard errors: the dropped weights are made up for


def test_errors():
    attention = build(rope="half", causal=True)
    x = torch.randn(2, 3, DIM)
    for wrong, message in (
        (x[0], r"x must have shape \(B, T, C\), got \(3, 24\)"),
        (x[..., :5], r"x must have width dim = 24, got \(2, 3, 5\)"),
        (x.long(), r"x must be floating point, got torch\.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(wrong)
    for mask, message in (
        (torch.ones(2, 4), r"mask must be bool or integer \(1 = real\), got torch\.float32"),
        (torch.ones(2, 4).bool(), r"mask must have shape \(B, T\) = \(2, 3\), got \(2, 4\)"),
        (torch.ones(3, 3).bool(), r"mask must have shape \(B, T\) = \(2, 3\), got \(3, 3\)"),
        (torch.ones(3).bool(), r"mask must have shape \(B, T\), \(B, T, S\) or .* got \(3,\)"),
        (torch.tensor([[1, 2, 1], [1, 1, 1]]), "must hold only 0 and 1, got 2"),
        (torch.tensor([[1, -1, 1], [1, 1, 1]]), "must hold only 0 and 1, got -1"),
        (torch.ones(2, 3, 3).long(), r"mask of 3 axes must be bool or floating .* torch\.int64"),
        (torch.ones(2, 3, 4).bool(), r"broadcastable to \(B, H, T, S\) = \(2, 6, 3, 3\), got"),
        (torch.ones(2, 4, 3, 3), r"broadcastable to .* got \(2, 4, 3, 3\)"),
        ((torch.ones(2, 3).bool(), None), "mask must be a tensor or a tuple of tensors, got None"),
        (True, "mask must be a tensor or a tuple of tensors, got True"),
        (0, "mask must be a tensor or a tuple of tensors, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(x, mask=mask)
    with pytest.raises(ValueError, match="positions must be integers"):
        attention(x, positions=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"positions must have shape .* got \(4,\)"):
        attention(x, positions=torch.arange(4))
    with pytest.raises(ValueError, match="seq_ids must be integers"):
        attention(x, seq_ids=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"seq_ids must have shape \(B, T\) = \(2, 3\)"):
        attention(x, seq_ids=torch.zeros(2, 4).long())
    with pytest.raises(ValueError, match="cache must be a KVCache or a StaticKVCache, got list"):
        attention(x, cache=[])
    with pytest.raises(ValueError, match="seq_ids must be None with a cache"):
        attention(x, seq_ids=torch.zeros(2, 3).long(), cache=KVCache())
    with pytest.raises(TypeError, match="attention_mask"):
        attention(x, attention_mask=None)
    attention.rope = RoPE(HEAD_DIM, max_positions=2)
    with pytest.raises(ValueError, match="positions must be below max_positions = 2, got 2"):
        attention(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "6 must be a multiple of num_kv_heads = 4"),
        ({"num_heads": 5}, "dim = 24 must be a multiple of num_heads = 5, or head_dim given"),
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
        ({"num_heads": 6, "num_kv_heads": 0}, "num_kv_heads must be an integer of at least 1"),
        ({"num_heads": 6, "head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
        ({"num_heads": 6, "qk_norm": True}, "qk_norm must be one of .* got True"),
        ({"num_heads": 6, "causal": 1}, "causal must be True or False, got 1"),
        ({"num_heads": 6, "bias": None}, "bias must be True or False, got None"),
        ({"num_heads": 6, "out_bias": 0}, "out_bias must be True or False, got 0"),
        ({"num_heads": 6, "dropout": 1.0}, r"dropout must be a probability below 1, got 1\.0"),
        ({"num_heads": 6, "dropout": -0.1}, "dropout must be a probability below 1"),
        ({"num_heads": 6, "rope": "half"}, "rope must be a RoPE module or None, got str"),
        ({"num_heads": 6, "rope": RoPE(8)}, "rope must have head_dim = 4, got 8"),
        ({"num_heads": 6, "qk_norm": "head", "norm_eps": -1.0}, "eps must be a finite number"),
    ],
)
def test_construction_errors(options, message):
    """A4: heads that do not divide."""
    with pytest.raises(ValueError, match=message):
        Attention(DIM, **options)


def test_repr_says_what_it_is():
    assert "24, num_heads=6, num_kv_heads=2, head_dim=8, qk_norm='full', causal=True" in repr(
        build(num_kv_heads=2, qk_norm="full", causal=True)
    )


def test_without_dropout_the_mode_asks_for_no_other_program():
    attention = Attention(8, num_heads=2)
    counter = CompileCounter()
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for mode in (True, False):
        attention.train(mode)
        compiled(torch.randn(1, 3, 8))
    assert counter.frame_count == 1
