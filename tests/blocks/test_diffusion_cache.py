from __future__ import annotations

import copy

import pytest
import torch
from support import assert_close
from torch import Tensor

from brickwork.assemblies import MiniLLaDA, MiniLLaDAConfig
from brickwork.blocks import Attention, BlockKVCache, RoPE, single_token
from brickwork.blocks.diffusion_rules import pick
from brickwork.blocks.diffusion_sampler import SampleReport

MASK = 16
CACHES = ["prefix", "dual"]
WAYS = {
    "low_confidence": {},
    "threshold": {"rule": "threshold", "threshold": 0.3},
    "factor": {"rule": "factor", "factor": 0.9},
    "sampled": {"rule": "margin", "steps": 5, "temperature": 0.7},
    "guided": {"cfg_scale": 1.0},
}


@pytest.fixture(scope="module")
def model() -> MiniLLaDA:
    torch.manual_seed(0)
    config = MiniLLaDAConfig(
        vocab_size=17, mask_token_id=MASK, dim=16, depth=2, head=2, intermediate_size=24
    )
    model = MiniLLaDA(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # far from uniform predictions
    return model


def prompts(seed: int) -> tuple[Tensor, Tensor]:
    """Prompts (3, 7) with masks to fill in them, and which tokens are real: any."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MASK + 1, (3, 7), generator=generator)
    return ids, torch.rand(3, 7, generator=generator) < 0.8


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_refreshed_at_every_step_equals_plain_sampling(model, cache, way):
    for seed in range(4):
        ids, real = prompts(seed)
        options = {"gen_length": 6, "block_length": 4, "attention_mask": real, **WAYS[way]}
        plain = model.diffusion.sample(model, ids, generator=seeded(), **options)
        cached = model.diffusion.sample(
            model, ids, generator=seeded(), cache=cache, refresh_every=1, **options
        )
        assert torch.equal(plain, cached)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_block_that_covers_everything_equals_plain_sampling(model, cache, way):
    empty = torch.zeros(2, 0).long()
    options = {"gen_length": 9, "block_length": 9, **WAYS[way]}
    plain = model.diffusion.sample(model, empty, generator=seeded(), **options)
    cached = model.diffusion.sample(model, empty, generator=seeded(), cache=cache, **options)
    assert torch.equal(plain, cached)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_batch_equals_its_rows(model, cache, way):
    """L1, L4: ragged blocks, padding anywhere, masks anywhere in the prompt."""
    for seed, refresh_every in ((0, None), (1, 2), (2, None)):
        ids, real = prompts(seed)
        options = {"gen_length": 6, "block_length": 4, "cache": cache,
                   "refresh_every": refresh_every, **WAYS[way]}  # fmt: skip
        together = model.diffusion.sample(
            model, ids, attention_mask=real, generator=seeded(), **options
        )
        generator = seeded()
        for row in range(3):
            alone = model.diffusion.sample(
                model, ids[row : row + 1, real[row]], generator=generator, **options
            )
            lead = int((real[row].cumsum(0) == 0).sum())
            assert torch.equal(alone[0], together[row, lead : lead + alone.shape[1]])


def frozen_outside(model: MiniLLaDA, ids: Tensor, cache: str, steps: int) -> list[Tensor]:
    """The states of one block of masks, each pass written out: one forward over the whole canvas,
    in which the columns that a block cache does not recompute stay those of the first pass."""
    masks = (ids[0] == MASK).nonzero()[:, 0]
    fresh = torch.zeros(ids.shape[1], dtype=torch.bool)
    fresh[masks if cache == "dual" else slice(int(masks[0]), None)] = True
    held: list[tuple[Tensor, Tensor]] = []
    states = []
    for step in range(steps):
        x = model.embed(ids)
        position = torch.arange(ids.shape[1])
        for i, layer in enumerate(model.layers):
            attention = layer.attention
            q, k, v = attention._project(layer.norm1(x))
            q, k = attention.rope(q, position), attention.rope(k, position)
            if step == 0:
                held.append((k, v))
            k = torch.where(fresh[None, :, None, None], k, held[i][0])
            v = torch.where(fresh[None, :, None, None], v, held[i][1])
            scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
            y = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)
            x = x + attention.o_proj(y)
            x = x + layer.mlp(layer.norm2(x))
        logits = model.head(model.norm(x))[:, masks].clone()
        logits[..., MASK] = -torch.inf
        pending = ids[:, masks] == MASK
        tokens, chosen = pick(logits, pending, torch.tensor([1]), rule="low_confidence")
        ids = ids.clone()
        ids[:, masks] = torch.where(chosen, tokens, ids[:, masks])
        states.append(ids)
    return states


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_not_recomputed_stays_as_in_the_first_pass(model, cache):
    """The definition of both caches, against a forward pass that mixes old and new by hand."""
    differs = 0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(MASK, (1, 10), generator=generator)
        ids[0, [3, 4, 7, 8]] = MASK
        states = []
        options = {"gen_length": 0, "block_length": 4}
        cached = model.diffusion.sample(
            model, ids, cache=cache, callback=lambda _, s, states=states: states.append(s),
            **options,
        )  # fmt: skip
        with torch.no_grad():
            expected = frozen_outside(model, ids, cache, 4)
        assert all(torch.equal(a, b) for a, b in zip(states, expected, strict=True))
        differs += not torch.equal(cached, model.diffusion.sample(model, ids, **options))
    assert differs  # it is an approximation: the test would not see a cache that is not used


@pytest.mark.parametrize(
    ("cache", "refresh_every", "full"), [("dual", None, 2), ("prefix", 3, 4), ("dual", 1, 8)]
)
def test_report_counts_passes_and_tokens(model, cache, refresh_every, full):
    seen = []

    def note(module, args, kwargs):
        seen.append((args[0].shape[1], kwargs.get("logits_at")))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    report = SampleReport()
    try:
        model.diffusion.sample(
            model, torch.zeros(1, 5).long(), gen_length=8, block_length=4, cache=cache,
            refresh_every=refresh_every, report=report,
        )  # fmt: skip
    finally:
        hook.remove()
    assert report == SampleReport(forward_passes=8, full_passes=full, tokens=8)
    assert report.tokens_per_forward == 1
    assert len(seen) == 8
    widths = [width for width, _ in seen]
    assert sum(width == 13 for width in widths) == full
    assert set(widths) <= ({13, 4} if cache == "dual" else {13, 8, 4})
    heads = {width if at is None else at.shape[1] for width, at in seen}
    assert heads == {4}  # the head runs on the block's rows only
    model.diffusion.sample(
        model, torch.zeros(2, 5).long(), gen_length=4, block_length=4, steps=2, report=report
    )
    assert report == SampleReport(forward_passes=10, full_passes=full + 2, tokens=16)
    assert SampleReport().tokens_per_forward == 0


def test_factor_commits_the_longest_prefix():
    """(n + 1) (1 - c_n) < f, at least one."""
    p = torch.tensor([[0.95, 0.9, 0.8, 0.55]], dtype=torch.float64)
    logits = torch.stack((p, 1 - p), -1).log()
    pending = torch.ones(1, 4, dtype=torch.bool)
    for factor, count in ((0.05, 1), (0.11, 1), (0.29, 1), (0.31, 2), (0.81, 3), (2.24, 3), (9, 4)):
        _, chosen = pick(logits, pending, torch.tensor([1]), rule="factor", factor=factor)
        assert chosen.sum() == count
        assert chosen[0, :count].all()
    _, chosen = pick(logits, pending & (p < 0.94), torch.tensor([1]), rule="factor", factor=0.31)
    assert chosen.tolist() == [[False, True, False, False]]


def test_stop_ids_end_the_answer(model):
    """Masks behind a stop take its id without a step; the prompt's and those before it go on."""

    def scripted(ids, attention_mask=None):
        logits = torch.zeros(*ids.shape, 17)
        logits[..., 3] = 1.0
        logits[:, 6, 7] = 9.0  # the surest prediction: a stop at column 6
        logits[:, 0, 7] = 8.0  # and one inside the prompt, which is no answer
        return logits

    ids, states, report = torch.tensor([[MASK, 1, 2]]), [], SampleReport()
    found = model.diffusion.sample(
        scripted, ids, gen_length=9, block_length=6, stop_ids=[7, 11], report=report,
        callback=lambda _, state: states.append(state),
    )  # fmt: skip
    assert states[0].tolist() == [[MASK, 1, 2, MASK, MASK, MASK, *[7] * 6]]
    assert found.tolist() == [[7, 1, 2, 3, 3, 3, *[7] * 6]]
    assert report == SampleReport(forward_passes=5, full_passes=5, tokens=5)
    for cache in CACHES:
        options = {"gen_length": 12, "block_length": 4, "stop_ids": range(8), "cache": cache}
        batch = torch.arange(6).view(3, 2)
        together = model.diffusion.sample(model, batch, **options)
        for row in range(3):
            alone = model.diffusion.sample(model, batch[row : row + 1], **options)
            assert torch.equal(alone[0], together[row])
        answer = together[:, 2:]
        first = (answer < 8).long().argmax(1)
        for row, at in zip(answer, first):
            assert (row[at:] == row[at]).all() or (row[at:] < MASK).all()


def test_logits_processor_sees_the_canvas_and_decides(model):
    calls = []

    def only_even(ids, positions, logits):
        calls.append((ids.clone(), positions.clone(), logits.shape))
        return logits.index_fill(-1, torch.arange(1, 17, 2), -torch.inf)

    ids = torch.tensor([[1, MASK, 3]])
    for cache in (None, *CACHES):
        calls.clear()
        found = model.diffusion.sample(
            model, ids, gen_length=3, block_length=4, cache=cache, logits_processor=only_even
        )
        assert (found[ids.new_tensor([[0, 1, 0, 1, 1, 1]]) == 1] % 2 == 0).all()
        assert [(c[0] == MASK).sum().item() for c in calls] == [4, 3, 2, 1]
        assert all(c[1].tolist() == [[1, 3, 4, 5]] and c[2] == (1, 4, 17) for c in calls)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "suffix"}, r"cache must be one of \(None, 'prefix', 'dual'\), got 'suffix'"),
        ({"refresh_every": 2}, "refresh_every must be None without a cache"),
        ({"cache": "dual", "refresh_every": 0}, "refresh_every must be an integer of at least 1"),
        ({"stop_ids": [MASK]}, "stop_ids must not hold the mask token, 16"),
        ({"stop_ids": [-1]}, "each of stop_ids must be an integer of at least 0, got -1"),
        ({"rule": "factor"}, "factor must be given with rule='factor' .* got None"),
        ({"factor": 1.0}, r"factor must be given .* got 1\.0 with 'low_confidence'"),
        ({"rule": "factor", "factor": 0}, "factor must be a finite number above 0, got 0"),
        ({"logits_processor": lambda i, p, x: x[..., 0]}, "logits_processor must return logits"),
        ({"logits_processor": lambda i, p, x: None}, "logits_processor must .* got NoneType"),
        ({"logits_processor": lambda i, p, x: x.long()}, "must be floating point, got torch.int64"),
    ],
)
def test_option_errors(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.diffusion.sample(
            model, torch.zeros(1, 2).long(), **{"gen_length": 2, "block_length": 2, **options}
        )


def test_a_model_without_attention_takes_no_cache(model):
    with pytest.raises(ValueError, match=r"model must be a module with Attention .* got function"):
        model.diffusion.sample(
            lambda ids, attention_mask: None, torch.zeros(1, 2).long(), gen_length=2,
            block_length=2, cache="dual",
        )  # fmt: skip


# BlockKVCache


def attention() -> Attention:
    torch.manual_seed(0)
    return Attention(16, num_heads=4, num_kv_heads=2, rope=RoPE(4)).double()


@torch.no_grad()
def test_selected_columns_are_rewritten_in_place_and_see_everything():
    layer, x = attention(), torch.randn(2, 6, 16, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    cache, columns = BlockKVCache(mask), torch.arange(6)[None]
    assert_close(layer(x, positions=columns, cache=cache), layer(x, mask=mask, positions=columns))
    assert (cache.length, cache.batch_size) == (6, 2)
    held = cache._keys.data_ptr()
    new = x.clone()
    new[0, [1, 4]], new[1, 3] = torch.randn(2, 16).double(), torch.randn(16).double()
    picked = torch.tensor([[1, 4], [3, 6]])  # 6: no column
    cache.select(picked)
    where = picked.clamp(max=5)
    rows = torch.arange(2)[:, None]
    y = layer(new[rows, where], positions=where, cache=cache)
    whole = layer(new, mask=mask, positions=columns)
    assert_close(y[0], whole[0, [1, 4]])
    assert_close(y[1, 0], whole[1, 3])
    assert cache._keys.data_ptr() == held
    cache.select(slice(2, 4))
    assert_close(layer(new[:, 2:4], positions=columns[:, 2:4], cache=cache), whole[:, 2:4])
    cache.reset()
    assert cache.length == 0
    assert_close(copy.deepcopy(layer)(new, positions=columns, cache=cache), whole)


def test_block_kv_cache_errors():
    layer, x, columns = attention(), torch.randn(2, 6, 16).double(), torch.arange(6)[None]
    for make, message in (
        (lambda c: layer(x, cache=c), "positions must be given with a BlockKVCache"),
        (lambda c: layer(x, positions=columns, cache=c), "BlockKVCache holds no gradients"),
        (
            lambda c: layer(x, positions=columns, cache=c, mask=torch.ones(2, 6).bool()),
            "mask must be given to BlockKVCache itself",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(BlockKVCache())
    with torch.no_grad():
        cache = BlockKVCache(torch.ones(2, 5).bool())
        with pytest.raises(ValueError, match=r"mask must have shape \(B, S\) = \(2, 6\)"):
            layer(x, positions=columns, cache=cache)
        cache = BlockKVCache()
        cache.select(slice(0, 2))
        with pytest.raises(ValueError, match="must cover all columns"):
            layer(x[:, :2], positions=columns[:, :2], cache=cache)
        cache.select(None)
        layer(x, positions=columns, cache=cache)
        cache.select(slice(0, 2))
        with pytest.raises(ValueError, match=r"keys must have the shape \(2, 2, 2, 4\)"):
            layer(x[:, :3], positions=columns[:, :3], cache=cache)
        with pytest.raises(ValueError, match="keys must have the dtype"):
            layer.float()(x[:, :2].float(), positions=columns[:, :2], cache=cache)
        causal = Attention(16, num_heads=4, causal=True)
        with pytest.raises(ValueError, match="cache must not be a BlockKVCache where causal"):
            causal(x.float(), positions=columns, cache=BlockKVCache())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rows", ["one", "equal", "padded"])
def test_a_pass_without_modules_equals_the_modules(model, monkeypatch, cache, way, rows):
    """Values, and tokens of whole runs; it is taken where the columns of all rows are one slice."""
    ids, real = prompts(3)
    ids, real = (t[:1] if rows == "one" else t for t in (ids, real))
    ids = torch.where(torch.arange(7) < 5, ids % MASK, ids)  # masks at the end, if anywhere
    options = {"gen_length": 6, "block_length": 4, "cache": cache, **WAYS[way]}
    if rows == "padded":
        options["attention_mask"] = real
    else:
        ids[:, 5:] = ids[:1, 5:]
    taken, seen = [], []
    offer = MiniLLaDA.columns_pass

    def watched(self, caches):
        run = offer(self, caches)
        assert run is not None

        def compared(ids, where, columns, logits_at):
            taken.append(columns)
            found = run(ids, where, columns, logits_at)
            expected = self(ids, position_ids=where, cache=caches, logits_at=logits_at).logits
            assert_close(found, expected, terms=16 * 24)
            return found

        return compared

    def sample():
        return model.diffusion.sample(
            model, ids, generator=seeded(), callback=lambda *step: seen.append(step), **options
        )

    monkeypatch.setattr(MiniLLaDA, "columns_pass", watched)
    fast = sample()
    monkeypatch.setattr(MiniLLaDA, "columns_pass", lambda self, caches: None)
    assert torch.equal(fast, sample())
    assert all(torch.equal(a[1], b[1]) for a, b in zip(seen, seen[len(seen) // 2 :]))
    assert taken or rows == "padded" or way == "threshold"  # one step may commit all there


def test_an_altered_model_goes_through_its_modules(model):
    altered = copy.deepcopy(model)
    caches = [BlockKVCache() for _ in altered.layers]
    ids = torch.randint(MASK, (1, 5))
    with torch.no_grad():
        altered(ids, cache=caches, position_ids=torch.arange(5)[None])
    assert altered.columns_pass(caches) is not None
    calls = []
    hook = altered.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert altered.columns_pass(caches) is None
    altered.diffusion.sample(altered, ids, gen_length=4, block_length=4, cache="dual")
    assert len(calls) == 4
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert altered.columns_pass(caches) is None
    altered.layers[0].mlp.down = torch.nn.Sequential(altered.layers[0].mlp.down)
    assert altered.columns_pass(caches) is None
    assert copy.deepcopy(model).bfloat16().columns_pass(caches) is None
    with pytest.raises(ValueError, match="covers all columns"):
        model.columns_pass([BlockKVCache(), BlockKVCache()])


def test_large_projections_are_not_copied(model, monkeypatch):
    ids = torch.randint(MASK, (1, 9))

    def sample():
        return model.diffusion.sample(model, ids, gen_length=8, block_length=4, cache="dual")

    fused = sample()
    monkeypatch.setattr(single_token, "FUSED_BYTES", 0)
    caches = [BlockKVCache() for _ in model.layers]
    with torch.no_grad():
        model(ids, cache=caches, position_ids=torch.arange(9)[None])
    for layer, own in zip(model.columns_pass(caches).layers, model.layers):
        assert layer.weights[0] is own.attention.q_proj.weight
    assert torch.equal(fused, sample())
