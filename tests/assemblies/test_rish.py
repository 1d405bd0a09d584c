from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import assert_close

from brickwork.assemblies import Rish, RishConfig
from brickwork.assemblies.sampling import pick
from brickwork.blocks.kv_cache import KVCache, StaticKVCache

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "eos_token_id": None,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 8,
}


def tiny(**changes):
    return Rish(RishConfig(**(TINY | changes)))


def padded(rows, side="left"):
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, at] = row
        mask[i, at] = 1
    return ids, mask


def test_default_config_builds_with_the_published_size():
    with torch.device("meta"):
        model = Rish(RishConfig())
    assert sum(p.numel() for p in model.parameters()) == 33_270_665_216


@pytest.mark.parametrize("scaling", [None, DYNAMIC, LONGROPE])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side, scaling):
    """M4, A7, A8: logits and losses of a row do not depend on its batch."""
    model = tiny(rope_scaling=scaling, max_position_embeddings=16)
    rows = [torch.randint(1, 31, (n,)) for n in (5, 12, 16)]
    ids, mask = padded(rows, side)
    labels = ids.masked_fill(mask == 0, 7)
    out = model(ids, attention_mask=mask, labels=labels)
    for i, row in enumerate(rows):
        alone = model(row[None])
        real = mask[i].bool()
        assert_close(out.logits[i][real], alone.logits[0], terms=256, name=f"row {i}")
    scored = sum(len(row) - 1 for row in rows)
    total = sum(model(r[None], labels=r[None]).loss * (len(r) - 1) for r in rows) / scored
    plain = out.loss - model.config.router_aux_loss_coef * out.aux_loss
    aux = [model(r[None], labels=r[None]).aux_loss * (len(r) - 1) for r in rows]
    total = total - model.config.router_aux_loss_coef * sum(aux) / scored
    assert_close(plain, total, terms=256)


def test_auxiliary_loss_counts_real_tokens_only():
    model = tiny()
    ids = torch.randint(0, 31, (2, 6))
    more = torch.cat([ids, torch.randint(0, 31, (2, 7))], 1)
    mask = (torch.arange(13) < 6).expand(2, 13)
    for balance in ("per_layer", "pooled"):
        model = tiny(balance=balance)
        short = model(ids, labels=ids)
        for kind in (mask, mask.long(), mask.float()):
            long = model(more, attention_mask=kind, labels=more)
            assert_close(long.aux_loss, short.aux_loss, terms=64)
            assert_close(long.loss, short.loss, terms=256)


def test_packed_equals_separate():
    model = tiny()
    rows = [torch.randint(0, 31, (n,)) for n in (3, 1, 7)]
    ids = torch.cat(rows)[None]
    seq_ids = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 1, 7]))[None]
    out = model(ids, seq_ids=seq_ids, labels=ids)
    alone = torch.cat([model(row[None]).logits[0] for row in rows])
    assert_close(out.logits[0], alone, terms=256)
    out.loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    coefficient = model.config.router_aux_loss_coef
    losses = [model(row[None], labels=row[None]) for row in rows if len(row) > 1]
    separate = sum(
        (o.loss - coefficient * o.aux_loss) * (len(r) - 1)
        for o, r in zip(losses, [rows[0], rows[2]])
    )
    (separate / 8 + coefficient * out_aux(model, ids, seq_ids)).backward()
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter.grad, terms=1024, name=name)


def out_aux(model, ids, seq_ids):
    return model(ids, seq_ids=seq_ids, labels=ids).aux_loss


@pytest.mark.parametrize("scaling", [None, DYNAMIC, LONGROPE])
def test_cached_ids_equal_uncached_ids(scaling):
    """A3, A7, A8, R9: also across the length at which a scaling changes the angles."""
    limit = {} if scaling is None else {"max_position_embeddings": 10 if scaling is DYNAMIC else 32}
    model = tiny(rope_scaling=scaling, **limit)
    uncached = tiny(rope_scaling=scaling, use_cache=False, **limit)
    uncached.load_state_dict(model.state_dict())
    rows = [torch.randint(1, 31, (n,)) for n in (3, 6, 1)]
    ids, mask = padded(rows)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(found, uncached.generate(ids, attention_mask=mask, max_new_tokens=8))
    assert torch.equal(found[:, :6], ids)
    for i, row in enumerate(rows):
        alone = model.generate(row[None], max_new_tokens=8)[0, len(row) :]
        assert torch.equal(found[i, 6:], alone), f"row {i} depends on its batch"


@pytest.mark.parametrize("static", [False, True])
def test_chunked_prefill_and_single_steps_equal_the_whole(static):
    model = tiny()
    rows = [torch.randint(1, 31, (n,)) for n in (5, 9)]
    ids, mask = padded(rows)
    whole = model(ids, attention_mask=mask).logits
    if static:
        cache = [
            StaticKVCache(2, 16, num_kv_heads=2, head_dim=4, dtype=torch.float32, device="cpu")
            for _ in range(2)
        ]
    else:
        cache = [KVCache() for _ in range(2)]
    with torch.no_grad():
        parts = [
            model(ids[:, a:b], attention_mask=mask[:, a:b], cache=cache).logits
            for a, b in ((0, 4), (4, 5), (5, 8), (8, 9))
        ]
    real = mask.bool()
    assert_close(torch.cat(parts, 1)[real], whole[real], terms=256)


def test_end_of_sequence_stops_rows_and_pads():
    model = tiny(pad_token_id=30)
    ids = torch.randint(1, 30, (4, 3))
    free = model.generate(ids, max_new_tokens=6)
    eos = int(free[0, 4])
    found = model.generate(ids, max_new_tokens=6, eos_token_id=eos)
    for row, free_row in zip(found, free):
        new, expected = row[3:].tolist(), free_row[3:].tolist()
        if eos in expected:
            end = expected.index(eos) + 1
            assert new[:end] == expected[:end]
            assert all(token == 30 for token in new[end:])
        else:
            assert new == expected[: len(new)]
    one = model.generate(ids[:1], max_new_tokens=6, eos_token_id=eos)
    assert one.shape[1] == 3 + free[0, 3:].tolist().index(eos) + 1


def test_sampling_follows_the_distribution_and_its_cuts():
    model = tiny()
    ids = torch.tensor([[1, 2, 3]])
    p = model(ids).logits[0, -1].detach().div(0.7).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    many = ids.expand(4000, 3)
    options = {"max_new_tokens": 1, "temperature": 0.7, "generator": generator}
    counts = torch.bincount(model.generate(many, **options)[:, 3], minlength=31)
    expected = 4000 * p
    big = expected > 5
    chi2 = ((counts - expected)[big].square() / expected[big]).sum()
    degrees = int(big.sum())
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5
    top = set(model.generate(many, top_k=3, **options)[:, 3].tolist())
    assert top == set(p.topk(3).indices.tolist())
    order = p.argsort(descending=True)
    inside = int((p[order].cumsum(0) < 0.6).sum()) + 1
    nucleus = set(model.generate(many, top_p=0.6, **options)[:, 3].tolist())
    assert nucleus == set(order[:inside].tolist())
    assert torch.equal(
        model.generate(ids, max_new_tokens=5, temperature=1.0, top_k=1),
        model.generate(ids, max_new_tokens=5),
    )
    a, b = (
        model.generate(
            ids, max_new_tokens=5, temperature=1.0, generator=torch.Generator().manual_seed(3)
        )
        for _ in range(2)
    )
    assert torch.equal(a, b)


def test_bad_generation_arguments():
    model = tiny()
    ids = torch.randint(1, 31, (2, 4))
    right = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for mask in (right, torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match="padding on the left"):
            model.generate(ids, attention_mask=mask, max_new_tokens=1)
    with pytest.raises(ValueError, match="padding on the left, and a token in every row"):
        model.generate(ids[:, :0], max_new_tokens=1)
    with pytest.raises(ValueError, match="reach 65 tokens, past max_position_embeddings = 64"):
        model.generate(ids, max_new_tokens=61)
    for name, value in (("temperature", -1.0), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5)):
        with pytest.raises(ValueError, match=name):
            model.generate(ids, max_new_tokens=1, **({"temperature": 1.0} | {name: value}))
    with pytest.raises(ValueError, match="give a temperature above 0"):
        model.generate(ids, max_new_tokens=1, top_k=3)
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 31\), got 1 to 99"):
        model.generate(torch.tensor([[1, 99]]), max_new_tokens=1)
    with pytest.raises(ValueError, match="eos_token_id"):
        model.generate(ids, max_new_tokens=1, eos_token_id=31)
    with pytest.raises(TypeError, match="num_beams"):
        model.generate(ids, max_new_tokens=1, num_beams=2)
    assert torch.equal(model.generate(ids, max_new_tokens=0), ids)


def test_generation_leaves_the_mode_alone_and_takes_no_gradient():
    model = tiny(attention_dropout=0.5).train()
    ids = torch.randint(1, 31, (1, 4))
    a = model.generate(ids, max_new_tokens=4)
    assert model.training
    assert torch.equal(a, model.generate(ids, max_new_tokens=4)), "dropout was active"


def test_generation_leaves_each_module_in_its_mode():
    model = tiny().train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("padding", [float("-inf"), -1e9])
def test_generation_refuses_an_additive_mask(padding):
    mask = torch.tensor([[0.0, padding, padding, padding]])  # would invert to padding on the left
    with pytest.raises(ValueError, match="attention_mask must be 0"):
        tiny().generate(torch.tensor([[1, 2, 3, 4]]), attention_mask=mask, max_new_tokens=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_generation_raises_for_logits_that_are_no_numbers(value, temperature):
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[7] = value
    with pytest.raises(RuntimeError, match="row 0: the model's logits must have a finite maximum"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    model = tiny()
    ids = torch.randint(1, 31, (3, 4))
    expected = model.generate(ids, max_new_tokens=3)
    assert torch.equal(model.generate(ids, max_new_tokens=3, temperature=temperature), expected)


def test_top_p_of_one_drops_nothing(monkeypatch):
    """Where float32's running sum of probabilities passes 1 before the rarest tokens."""
    given = []
    draw = torch.multinomial
    monkeypatch.setattr(
        torch, "multinomial", lambda p, *a, **k: given.append(p) or draw(p, *a, **k)
    )
    logits = torch.linspace(-20, 0, 60000).expand(8, -1) + torch.randn(8, 60000)
    for top_p in (None, 1.0):
        pick(logits, None, 1.0, None, top_p)
    assert torch.equal(*given)


def test_several_or_no_tokens_end_a_sequence():
    ids = torch.tensor([[1, 2, 3]])
    model = tiny(pad_token_id=0)
    free = model.generate(ids, max_new_tokens=6)[0, 3:].tolist()
    others = [token for token in range(31) if token not in free]
    found = model.generate(ids, max_new_tokens=6, eos_token_id=[others[0], free[2]])
    assert found[0, 3:].tolist() == free[: free.index(free[2]) + 1]
    stopping = tiny(eos_token_id=free[0])
    stopping.load_state_dict(model.state_dict())
    assert stopping.generate(ids, max_new_tokens=6).shape[1] == 4
    for none in ((), []):
        whole = stopping.generate(ids, max_new_tokens=6, eos_token_id=none)
        assert whole[0, 3:].tolist() == free
    for wrong in (True, 3.0, [3, -1], [3, 31], "3"):
        with pytest.raises(ValueError, match="eos_token_id must be"):
            model.generate(ids, max_new_tokens=1, eos_token_id=wrong)


def test_caches_and_routing_are_one_per_layer():
    model = tiny()
    ids = torch.randint(0, 31, (1, 3))
    caches = [KVCache() for _ in range(3)]
    routing = [torch.zeros(1, 3, 2, dtype=torch.int64)] * 3
    cases = [
        ({"cache": caches[:1] * 2}, "cache must be another object for each layer"),
        ({"cache": caches[:1]}, "cache must be a list of 2, .* got a list of 1"),
        ({"cache": caches}, "cache must be a list of 2, .* got a list of 3"),
        ({"cache": caches[0]}, "cache must be a list of 2, .* got KVCache"),
        ({"cache": [caches[0], None]}, "cache must be a list of 2, .* got NoneType for layer 1"),
        ({"routing": routing}, "routing must be a list of 2, .* got a list of 3"),
        ({"routing": routing[:1]}, "routing must be a list of 2, .* got a list of 1"),
        ({"routing": routing[0]}, "routing must be a list of 2, .* got Tensor"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            model(ids, **given)
    assert all(cache.length == 0 for cache in caches)
    model(ids, cache=tuple(caches[:2]))


def test_loss_without_logits_is_the_same_loss():
    model = tiny(tie_word_embeddings=True)
    ids = torch.randint(0, 31, (2, 9))
    labels = ids.masked_fill(torch.rand(2, 9) < 0.3, -100)
    results = []
    for return_logits in (True, False):
        model.zero_grad()
        out = model(ids, labels=labels, return_logits=return_logits)
        assert (out.logits is None) != return_logits
        out.loss.backward()
        results.append((out.loss, {n: p.grad for n, p in model.named_parameters()}))
    assert_close(results[1][0], results[0][0], terms=256)
    for name, grad in results[0][1].items():
        assert_close(results[1][1][name], grad, terms=1024, name=name)


def test_auxiliary_loss_is_in_the_loss_whatever_is_returned():
    """M6, M9: linear in its coefficient, with a gradient for the router."""
    ids = torch.randint(0, 31, (2, 9))
    model = tiny()
    grads, losses = [], []
    for coefficient in (0.0, 1.0, 2.0):
        other = tiny(router_aux_loss_coef=coefficient)
        other.load_state_dict(model.state_dict())
        out = other(ids, labels=ids)
        out.loss.backward()
        losses.append(out.loss)
        grads.append(other.layers[0].moe.router.weight.grad)
        assert out.aux_loss is not None
    assert losses[1] != losses[0]
    difference = grads[1] - grads[0]
    assert difference.abs().max() > 1e-6
    assert_close(grads[2] - grads[0], 2 * difference, terms=64)
    assert model(ids).aux_loss is None
    assert tiny(output_router_logits=True)(ids).aux_loss is not None


@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(autocast):
    """M13, M9, A10"""
    model = tiny().train()
    model.layers[0].moe.router.weight.data[1] = model.layers[0].moe.router.weight.data[0]
    ids = torch.randint(0, 31, (2, 9))
    grads = []
    for on in (False, True):
        model.gradient_checkpointing = on
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="cache must be None while gradient_checkpointing"):
        model(ids, cache=[KVCache(), KVCache()])


def test_every_expert_gets_a_gradient():
    """M10: few tokens, many experts; and no tokens at all."""
    model = tiny(num_experts=16, num_experts_per_tok=1)
    for shape in ((1, 2), (0, 5), (2, 0)):
        model.zero_grad()
        ids = torch.zeros(shape, dtype=torch.int64)
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_replayed_routing():
    model = tiny()
    ids = torch.randint(0, 31, (2, 5))
    whole = model(ids)
    routing = [logits.softmax(-1).topk(2).indices for logits in whole.router_logits]
    assert torch.equal(model(ids, routing=routing).logits, whole.logits)
    other = [(r + 1) % 4 for r in routing]
    assert not torch.equal(model(ids, routing=other).logits, whole.logits)


def test_inputs_embeds_and_wrong_inputs():
    """P3"""
    model = tiny()
    ids = torch.randint(0, 31, (2, 5))
    embeds = model.embed_tokens(ids).detach().requires_grad_()
    out = model(inputs_embeds=embeds, labels=ids)
    assert torch.equal(out.logits, model(ids).logits)
    out.loss.backward()
    assert embeds.grad.abs().sum() > 0
    for given in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**given)
    cases = [
        ({"input_ids": ids[0]}, r"input_ids must have shape \(B, T\)"),
        ({"input_ids": ids.float()}, "input_ids must be int64 or int32"),
        ({"input_ids": ids + 31}, r"input_ids must be in \[0, 31\)"),
        ({"input_ids": ids - 31}, r"input_ids must be in \[0, 31\)"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 6)}, "attention_mask must have shape"),
        ({"input_ids": ids, "attention_mask": 2 * torch.ones(2, 5)}, "attention_mask must be 0"),
        ({"input_ids": ids, "labels": ids[:, :3]}, "labels must have shape"),
        ({"inputs_embeds": embeds[..., :8]}, "must have shape"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            model(**given)
    with pytest.raises(TypeError, match="past_key_values"):
        model(ids, past_key_values=None)
    with pytest.raises(ValueError, match="64"):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_nothing_scored_gives_zero():
    model = tiny(router_aux_loss_coef=0.0)
    ids = torch.randint(0, 31, (2, 5))
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss == 0
    loss.backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_ties_survive(tied, tmp_path):
    """B8, B9, H2 of the embedding"""
    model = tiny(tie_word_embeddings=tied)
    ids = torch.randint(0, 30, (1, 4))
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        blank = tiny(tie_word_embeddings=tied)
    blank.to_empty(device="cpu")
    blank.load_original_state_dict(model.original_state_dict())
    assigned = tiny(tie_word_embeddings=tied)
    assigned.load_state_dict(model.state_dict(), assign=True)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        Rish.from_pretrained(tmp_path),
        blank,
        assigned,
    ]
    for other in copies:
        assert torch.equal(other(ids).logits, expected)
        with torch.no_grad():
            other.embed_tokens.weight[30] = 0
        assert (other(ids).logits[..., 30] == 0).all() == tied
        assert len(list(other.parameters())) == len(list(model.parameters()))


def test_meta_then_reset_equals_direct_construction_in_distribution():
    """R5, B5: nothing is left uninitialised."""
    with torch.device("meta"):
        model = tiny()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.reset_parameters()
    fresh = tiny()
    for (name, a), b in zip(model.named_parameters(), fresh.parameters()):
        assert a.isfinite().all(), name
        assert abs(a.std(unbiased=False) - b.std(unbiased=False)) < 0.2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype, tmp_path):
    model = tiny().to(dtype)
    ids = torch.randint(0, 31, (2, 5))
    out = model(ids, labels=ids)
    assert out.logits.dtype == dtype
    out.loss.backward()
    model.save_pretrained(tmp_path)
    loaded = Rish.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.dtype == dtype
    assert_close(loaded(ids).logits, out.logits, terms=256)
    assert Rish.from_pretrained(tmp_path, dtype=torch.float32).lm_head.weight.dtype == torch.float32


def test_compiles_to_one_graph():
    model = tiny()
    ids = torch.randint(0, 31, (2, 6))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(ids).logits, model(ids).logits, terms=256)


def test_config_flags_change_the_output():
    """kernels.md D4 82: no flag is stored and forgotten."""
    ids = torch.randint(0, 31, (2, 6))
    base = tiny()
    expected = base(ids, labels=ids)
    for change in (
        {"norm_topk_prob": True},
        {"rms_norm_eps": 0.1},
        {"rope_theta": 100.0},
        {"num_experts_per_tok": 3},
        {"balance": "pooled"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ):
        other = tiny(**change)
        other.load_state_dict(base.state_dict())
        assert other(ids, labels=ids).loss != expected.loss, change
