from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close

from brickwork.blocks import Attention, KVCache, RoPE, StaticKVCache

DIM, HEADS, HEAD_DIM = 24, 6, 8
TERMS = 4 * DIM
SCALINGS = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 3},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "max_position_embeddings": 16,
        "original_max_position_embeddings": 4,
    },
}
KINDS = ["growing", "static"]
kinds = pytest.mark.parametrize("kind", KINDS)


def build(rope: str | None = "half", *, causal: bool = True, **options) -> Attention:
    turn = None
    if rope is not None:
        turn = RoPE(HEAD_DIM, base=50.0, scaling=SCALINGS.get(rope))
    options = {"num_heads": HEADS, "num_kv_heads": 2, "head_dim": HEAD_DIM} | options
    return Attention(DIM, rope=turn, causal=causal, **options).eval()


def new_cache(kind: str, batch: int, max_length: int = 12, num_kv_heads: int = 2, **options):
    if kind == "growing":
        return KVCache()
    return StaticKVCache(batch, max_length, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, **options)


@pytest.fixture(autouse=True)
def _no_grad(request):
    with torch.set_grad_enabled("grad" in request.node.name):
        yield


@kinds
@given(
    rope=st.sampled_from([None, "half", "dynamic", "longrope"]),
    num_kv_heads=st.sampled_from([1, 2, 6]),
    qk_norm=st.sampled_from([None, "head"]),
    causal=st.booleans(),
    chunks=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    padding=st.sampled_from(["none", "left", "anywhere"]),
    form=st.sampled_from(["new", "all", "new int"]),
)
def test_cached_equals_uncached(kind, rope, num_kv_heads, qk_norm, causal, chunks, padding, form):
    """A3, A7, A8, A9, D2 #43: one token, several, chunked prefill; every call gives what a call
    without a cache on all tokens so far gives."""
    attention = build(rope, causal=causal, num_kv_heads=num_kv_heads, qk_norm=qk_norm)
    batch, tokens = 3, sum(chunks)
    x = torch.randn(batch, tokens, DIM)
    mask = None
    if padding == "left":
        mask = torch.arange(tokens) >= torch.tensor([[0], [1], [3]])
    elif padding == "anywhere":
        mask = torch.rand(batch, tokens) < 0.6
    cache, start = new_cache(kind, batch, 16, num_kv_heads), 0
    for size in chunks:
        end = start + size
        part = None
        if mask is not None:
            part = mask[:, :end] if form == "all" else mask[:, start:end]
            part = part.long() if "int" in form else part
        y = attention(x[:, start:end], mask=part, cache=cache)
        whole = attention(x[:, :end], mask=None if mask is None else mask[:, :end])
        assert_close(y, whole[:, start:end], terms=TERMS)
        assert cache.length == end
        start = end
    if causal and rope in (None, "half"):
        whole = attention(x, mask=mask)
        again = new_cache(kind, batch, 16, num_kv_heads)
        assert_close(attention(x, mask=mask, cache=again), whole, terms=TERMS)


class Toy(torch.nn.Module):
    """Two layers, greedy decoding."""

    def __init__(self, rope: str | None = "half"):
        super().__init__()
        self.embed = torch.nn.Embedding(31, DIM)
        self.layers = torch.nn.ModuleList(build(rope) for _ in range(2))

    def forward(self, ids, mask=None, caches=(None, None)):
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches):
            x = x + layer(x, mask=mask, cache=cache)
        return x @ self.embed.weight.T

    def generate(self, ids, mask, caches=None, steps=8):
        logits_of_steps = []
        for step in range(steps):
            if caches is None:
                logits = self(ids, mask)
            elif step == 0:
                logits = self(ids, mask, caches)
            else:
                logits = self(ids[:, -1:], mask[:, -1:], caches)
            logits_of_steps.append(logits[:, -1])
            ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), 1)
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
        return ids, torch.stack(logits_of_steps, 1)


@kinds
def test_generation_of_a_left_padded_batch(kind):
    """A7, A8: prompts of 3 and 6 tokens, cached, uncached and one by one."""
    model = Toy()
    short, long = torch.randint(0, 31, (1, 3)), torch.randint(0, 31, (1, 6))
    ids = torch.cat((torch.nn.functional.pad(short, (3, 0), value=30), long))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    uncached, logits = model.generate(ids, mask)
    cached, cached_logits = model.generate(ids, mask, [new_cache(kind, 2, 20) for _ in range(2)])
    assert torch.equal(cached, uncached)
    assert_close(cached_logits, logits, terms=2 * TERMS)
    for row, prompt in enumerate((short, long)):
        alone, alone_logits = model.generate(
            prompt, torch.ones_like(prompt), [new_cache(kind, 1, 20) for _ in range(2)]
        )
        assert torch.equal(alone[0, prompt.shape[1] :], cached[row, 6:])
        assert_close(alone_logits[0], cached_logits[row], terms=2 * TERMS)


@pytest.mark.parametrize("rope", ["half", "dynamic"])
def test_the_size_of_a_static_cache_changes_nothing(rope):
    """A9: 10, 16 and 64 slots and a growing cache; again after a reset."""
    attention = build(rope)
    x = torch.randn(2, 10, DIM)
    mask = torch.arange(10) >= torch.tensor([[0], [2]])

    def run(cache):
        parts = ((0, 6), (6, 7), (7, 10))
        return torch.cat(
            [attention(x[:, a:b], mask=mask[:, a:b], cache=cache) for a, b in parts], 1
        )

    expected = run(KVCache())
    for slots in (10, 16, 64):
        cache = new_cache("static", 2, slots)
        attention(1e4 * torch.randn(2, 9, DIM), cache=cache)
        cache.reset()
        assert cache.length == 0
        assert_close(run(cache), expected, terms=TERMS)
        assert cache.length == 10
    growing = KVCache()
    run(growing)
    growing.reset()
    assert growing.length == 0
    assert torch.equal(run(growing), expected)


def test_a_reset_forgets_values_that_are_not_finite():
    attention, cache = build(), new_cache("static", 1)
    x = torch.randn(1, 3, DIM)
    attention(x * float("nan"), cache=cache)
    cache.reset()
    assert_close(attention(x, cache=cache), attention(x), terms=TERMS)


@kinds
def test_several_tokens_align_with_the_last_key(kind):
    """A3: the first of two new tokens does not see the second, and both see all before."""
    attention, cache = build(None), new_cache(kind, 1)
    x = torch.randn(1, 6, DIM)
    attention(x[:, :4], cache=cache)
    y = attention(x[:, 4:], cache=copy.deepcopy(cache))
    later = torch.cat((x[:, 4:5], torch.randn(1, 1, DIM)), 1)
    assert torch.equal(attention(later, cache=copy.deepcopy(cache))[:, 0], y[:, 0])
    other = new_cache(kind, 1)
    attention(torch.cat((torch.randn(1, 1, DIM), x[:, 1:4]), 1), cache=other)
    assert ((attention(x[:, 4:], cache=other) - y).abs().amax(-1) > 1e-4).all()


@kinds
@pytest.mark.parametrize("rope", ["half", "dynamic"])
def test_select_reorders_drops_and_repeats_rows(kind, rope):
    attention, cache = build(rope), new_cache(kind, 3)
    x, mask = torch.randn(3, 5, DIM), torch.arange(5) >= torch.tensor([[0], [1], [2]])
    attention(x[:, :4], mask=mask[:, :4], cache=cache)
    index = torch.tensor([2, 0, 2])
    cache.select(index)
    y = attention(x[index, 4:], cache=cache)
    assert_close(y, attention(x[index], mask=mask[index])[:, 4:], terms=TERMS)
    if kind == "growing":
        cache.select(torch.tensor([1]))
        assert attention(x[:1, :1], cache=cache).shape == (1, 1, DIM)
    else:
        with pytest.raises(ValueError, match=r"index must have shape \(B,\) with B = 3"):
            cache.select(torch.tensor([1]))
    KVCache().select(index)


@kinds
@pytest.mark.parametrize("padded", [False, True])
def test_crop_takes_tokens_back(kind, padded):
    attention, cache = build(), new_cache(kind, 2)
    x = torch.randn(2, 7, DIM)
    mask = torch.arange(7) >= torch.tensor([[0], [2]]) if padded else torch.ones(2, 7).bool()
    attention(x[:, :4], mask=mask[:, :4] if padded else None, cache=cache)
    attention(torch.randn(2, 3, DIM), cache=cache)
    cache.crop(4)
    assert cache.length == 4
    assert_close(attention(x[:, 4:], cache=cache), attention(x, mask=mask)[:, 4:], terms=TERMS)
    cache.crop(0)
    assert_close(attention(x, mask=mask, cache=cache), attention(x, mask=mask), terms=TERMS)
    for wrong, message in ((8, "at most the 7 tokens held, got 8"), (-1, "at least 0, got -1")):
        with pytest.raises(ValueError, match=message):
            cache.crop(wrong)


@kinds
def test_rules_over_all_keys(kind):
    """A bool mask and a bias of (B, 1, T, S), with padding, on cached tokens too."""
    attention, cache = build(causal=False), new_cache(kind, 2, 9)
    x = torch.randn(2, 5, DIM)
    mask = torch.arange(5) >= torch.tensor([[0], [2]])
    rule, bias = torch.rand(2, 1, 5, 5) < 0.7, torch.randn(1, HEADS, 5, 5)
    rule = rule & torch.ones(5, 5).bool().tril()  # the first chunk cannot see the second
    expected = attention(x, mask=(mask, rule, bias))
    first = (mask[:, :3], rule[:, :, :3, :3], bias[:, :, :3, :3])
    y = [attention(x[:, :3], mask=first, cache=cache)]
    last = (mask, rule[:, 0, 3:], bias[:, :, 3:])
    y.append(attention(x[:, 3:], mask=last, cache=cache))
    assert_close(torch.cat(y, 1), expected, terms=TERMS)
    wide = torch.ones(2, 1, 1, 6 if kind == "growing" else 9).bool()
    attention(x[:, :1], mask=wide, cache=cache)
    with pytest.raises(ValueError, match="mask must be broadcastable to"):
        attention(x[:, :1], mask=torch.ones(2, 1, 1, 5).bool(), cache=cache)


@kinds
def test_given_positions_are_gone_on_from(kind):
    attention, cache = build(), new_cache(kind, 2)
    x = torch.randn(2, 5, DIM)
    positions = torch.tensor([[10, 12, 14, 15, 16], [3, 1, 2, 4, 5]])
    expected = attention(x, positions=positions)
    y = [
        attention(x[:, :2], positions=positions[:, :2].int(), cache=cache),
        attention(x[:, 2:3], positions=positions[:, 2:3], cache=cache),
        attention(x[:, 3:], cache=cache),  # the last row goes on from 3, its largest so far
    ]
    assert_close(torch.cat(y, 1), expected, terms=TERMS)


def test_a_compiled_step_serves_every_length():
    """One graph for the prefill, one for all steps, equal to eager."""
    attention = build()
    x = torch.randn(2, 10, DIM)
    mask = torch.arange(10) >= torch.tensor([[0], [2]])
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    cache = new_cache("static", 2, 10)
    y = [compiled(x[:, :4], mask=mask[:, :4], cache=cache)]
    tokens = [x[:, t : t + 1].clone() for t in range(10)]
    y.append(compiled(tokens[4], cache=cache))
    with torch._dynamo.config.patch(error_on_recompile=True):
        y += [compiled(tokens[t], cache=cache) for t in range(5, 10)]
        assert_close(torch.cat(y, 1), attention(x, mask=mask), terms=TERMS)
        assert cache.length == 10
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            compiled(tokens[0], cache=cache)
        cache.reset()
        again = [compiled(x[:, :4], mask=mask[:, :4], cache=cache)]
        again += [compiled(tokens[t], cache=cache) for t in range(4, 10)]
    assert torch.equal(torch.cat(again, 1), torch.cat(y, 1))
    with pytest.raises(Exception, match="mask must be of the new tokens"):
        compiled(x[:, :1], mask=mask, cache=cache)


@pytest.mark.parametrize("rope", ["half", "dynamic"])
def test_gradients_flow_through_a_growing_cache_grad(rope):
    attention = build(rope).double()
    x = torch.randn(1, 4, DIM, dtype=torch.float64, requires_grad=True)

    def cached(x):
        cache = KVCache()
        attention(x[:, :2], cache=cache)
        return attention(x[:, 2:], cache=cache)

    assert torch.autograd.gradcheck(cached, [x], fast_mode=True)
    (actual,) = torch.autograd.grad(cached(x).square().sum(), x)
    (expected,) = torch.autograd.grad(attention(x)[:, 2:].square().sum(), x)
    assert_close(actual, expected, terms=TERMS)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@kinds
def test_checkpointing_cannot_append_twice_grad(kind, reentrant, train):
    """A10: refused when the forward runs again; the cache keeps its length."""
    attention, cache = build().train(train), new_cache(kind, 1)
    x = torch.randn(1, 4, DIM, requires_grad=True)

    def run():
        return torch.utils.checkpoint.checkpoint(
            lambda x: attention(x, cache=cache), x, use_reentrant=reentrant
        )

    if kind == "static" and not reentrant:
        with pytest.raises(ValueError, match="StaticKVCache holds no gradients"):
            run()
        assert cache.length == 0
        return
    y = run()
    with pytest.raises(ValueError, match="a cache must not be appended to during a backward pass"):
        y.sum().backward()
    assert cache.length == 4
    if kind == "growing":  # training with a cache and no checkpointing is fine
        expected = torch.autograd.grad(attention(x).sum(), x)[0]
        actual = torch.autograd.grad(attention(x, cache=KVCache()).sum(), x)[0]
        assert torch.equal(actual, expected)


def test_a_static_cache_needs_no_grad():
    attention, cache = build(), new_cache("static", 1)
    x = torch.randn(1, 2, DIM)
    with torch.enable_grad():
        with pytest.raises(ValueError, match="StaticKVCache holds no gradients"):
            attention(x, cache=cache)
        attention.requires_grad_(False)(x, cache=cache)
    assert cache.length == 2


def test_inference_mode_and_after():
    attention = build()
    x = torch.randn(1, 4, DIM)
    with torch.inference_mode():
        caches = [new_cache(kind, 1) for kind in KINDS]
        for cache in caches:
            attention(x[:, :2], cache=cache)
    for cache in caches:
        y = attention(x[:, 2:], cache=cache)
        assert_close(y, attention(x)[:, 2:], terms=TERMS)
        cache.reset()


@kinds
def test_batch_peers_do_not_matter(kind):
    """A8: also under a RoPE that looks at the length."""
    attention = build("dynamic")
    x = torch.randn(2, 9, DIM)
    mask = torch.arange(9) >= torch.tensor([[0], [5]])
    cache, alone = new_cache(kind, 2), new_cache(kind, 1)
    for a, b in ((0, 6), (6, 7), (7, 9)):
        y = attention(x[:, a:b], mask=mask[:, a:b], cache=cache)[1:]
        start = max(a, 5)
        expected = attention(x[1:, start:b], cache=alone)
        assert_close(y[:, start - a :], expected, terms=TERMS)


@kinds
def test_a_row_of_padding_alone(kind):
    """A1: no key at all, in the prefill and in a step."""
    attention, cache = build(), new_cache(kind, 2)
    attention.o_proj = torch.nn.Identity()
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    x = torch.randn(2, 3, DIM)
    y = attention(x, mask=mask, cache=cache)
    assert y.isfinite().all()
    assert not y[1].any()
    y = attention(x[:, :1], mask=torch.tensor([[1], [0]]), cache=cache)
    assert not y[1].any()
    y = attention(x[:, 1:2], cache=cache)
    assert_close(y[1:], attention(x[1:, 1:2]), terms=TERMS)


@kinds
def test_autocast(kind):
    """R10: keys are held in the autocast dtype."""
    attention = build(qk_norm="head")
    x = torch.randn(1, 4, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        cache = new_cache(kind, 1, dtype=torch.bfloat16)
        attention(x[:, :3], cache=cache)
        y = attention(x[:, 3:], cache=cache)
        assert_close(y, attention(x)[:, 3:].double(), terms=TERMS, compute=torch.bfloat16)
        if kind == "static":
            with pytest.raises(ValueError, match=r"cache's dtype torch\.float32, got .*bfloat16"):
                attention(x, cache=new_cache(kind, 1))


def unowned(cache):
    """A copy that any layer may take, full as it is."""
    taken = copy.deepcopy(cache)
    taken.owner = None
    return taken


@kinds
def test_errors(kind):
    attention, cache = build(), new_cache(kind, 2, 4)
    x = torch.randn(2, 3, DIM)
    attention(x, mask=torch.tensor([[1, 1, 1], [0, 1, 1]]), cache=cache)
    with pytest.raises(ValueError, match=r"x must have the cache's batch size 2, got \(3, 1, 24\)"):
        attention(torch.randn(3, 1, DIM), cache=cache)
    with pytest.raises(ValueError, match=r"keys must have shape .* G = 2 as in cache, got"):
        build(num_kv_heads=3)(x[:, :1], cache=unowned(cache))
    with pytest.raises(ValueError, match=r"cache's dtype torch\.float32, got torch\.float64"):
        copy.deepcopy(attention).double()(x[:, :1].double(), cache=unowned(cache))
    with pytest.raises(ValueError, match=r"mask must have shape \(B, T\) = \(2, 4\), got \(2, 3\)"):
        attention(x[:, :1], mask=torch.ones(2, 3).bool(), cache=cache)
    with pytest.raises(ValueError, match="mask must not call a token real that came into"):
        attention(x[:, :1], mask=torch.ones(2, 4).bool(), cache=cache)
    assert cache.length == 3
    hidden = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]])  # a cached token may be left out of a call
    y = attention(x[:, :1], mask=hidden, cache=copy.deepcopy(cache))
    assert (y[0] - attention(x[:, :1], cache=copy.deepcopy(cache))[0]).abs().max() > 1e-4
    if kind == "static":
        with pytest.raises(
            ValueError, match="at most max_length = 4 tokens, got 2 more than the 3"
        ):
            attention(x[:, :2], cache=cache)
        assert cache.length == 3


@kinds
def test_what_is_appended_is_held(kind):
    cache = new_cache(kind, 2, 5)
    keys, values = torch.randn(2, 2, 4, 2, HEAD_DIM).unbind()
    mask = torch.tensor([[True, True], [False, True]])
    positions = torch.tensor([[0, 1], [0, 0]])
    cache.append(keys[:, :2], values[:, :2], positions=positions, mask=mask)
    held = cache.append(keys[:, 2:], values[:, 2:], positions=torch.tensor([[2, 3]]))
    assert int(held.start) == 2
    assert torch.equal(held.keys[:, :4], keys)
    assert torch.equal(held.values[:, :4], values)
    assert held.positions[:, :4].tolist() == [[0, 1, 2, 3], [0, 0, 2, 3]]
    assert held.mask.sum(1).tolist() == [4, 3]
    assert cache.next_positions().tolist() == [4, 4]
    assert cache.batch_size == 2
    with pytest.raises(ValueError, match=r"keys must have shape \(B, T, G, D\) with B = 2"):
        cache.append(keys[:1, :1], values[:1, :1], positions=positions[:1, :1])
    with pytest.raises(ValueError, match="values must have shape"):
        cache.append(keys[:, :1], values[:, :2], positions=positions[:, :1])
    with pytest.raises(ValueError, match=r"cache's dtype torch\.float32, got torch\.float64"):
        cache.append(keys[:, :1], values[:, :1].double(), positions=positions[:, :1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, 2, 8), "max_length must be an integer of at least 1, got 0"),
        ((-1, 4, 2, 8), "batch_size must be an integer of at least 0, got -1"),
        ((2, 4, 0, 8), "num_kv_heads must be an integer of at least 1, got 0"),
        ((2, 4, 2, 1.5), r"head_dim must be an integer of at least 1, got 1\.5"),
    ],
)
def test_construction_errors(arguments, message):
    batch, length, heads, width = arguments
    with pytest.raises(ValueError, match=message):
        StaticKVCache(batch, length, num_kv_heads=heads, head_dim=width)


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_belongs_to_one_layer(static):
    """Two layers that append to one cache would each attend to the other's keys."""
    first, second = (Attention(8, num_heads=2, causal=True) for _ in range(2))
    cache = StaticKVCache(1, 8, num_kv_heads=2, head_dim=4) if static else KVCache()
    x = torch.randn(1, 2, 8)
    with torch.no_grad():
        first(x, cache=cache)
        first(x, cache=cache)
        with pytest.raises(ValueError, match="cache must be this Attention's own"):
            second(x, cache=cache)
        assert cache.length == 4
        cache.reset()
        second(x, cache=cache)


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_an_owner_and_its_cache_may_be_copied_and_pickled(kind):
    """Together; and the cache alone, to go on twice from one place."""
    attention, x = Attention(8, num_heads=2, causal=True), torch.randn(1, 6, 8)
    cache = KVCache() if kind == "growing" else StaticKVCache(1, 8, num_kv_heads=2, head_dim=4)
    with torch.no_grad():
        attention(x[:, :3], cache=cache)
        expected = attention(x)[:, 3:]
        pairs = [
            copy.deepcopy((attention, cache)),
            pickle.loads(pickle.dumps((attention, cache))),
            (attention, copy.deepcopy(cache)),
            (attention, pickle.loads(pickle.dumps(cache))),
        ]
        for layer, kept in pairs:
            assert_close(layer(x[:, 3:], cache=kept), expected, terms=TERMS)
        with pytest.raises(ValueError, match="cache must be this Attention's own"):
            Attention(8, num_heads=2, causal=True)(x[:, 3:], cache=pairs[0][1])
