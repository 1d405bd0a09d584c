from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from safetensors import safe_open
from support import assert_close
from torch.func import functional_call

from brickwork.assemblies import LCPLM, LCPLMConfig
from brickwork.assemblies.proteins import tokenize

TINY = {"d_model": 16, "n_layer": 2, "ssm_cfg": {"layer": "Mamba1", "d_state": 4}}
MAMBA2 = {"ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8, "ngroups": 2}}
VARIANTS = {
    "mamba1": {},
    "mamba1 bias": {"ssm_cfg": {"layer": "Mamba1", "d_state": 4, "bias": True}},
    "mamba2": MAMBA2,
    "multiply": {"bidirectional_strategy": "ew_multiply", "bidirectional_weight_tie": False},
    "mlp layernorm": {"d_intermediate": 24, "rms_norm": False},
    "attention": {
        "attn_layer_idx": [1],
        "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 4},
    },
    "one way": {"bidirectional": False},
    "one way mamba2": {"bidirectional": False, **MAMBA2},
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def tiny(**changes):
    model = LCPLM(LCPLMConfig(**(TINY | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv1d.bias" in name:
                parameter.fill_(3.0)
            if name.endswith("embedding.weight"):
                parameter.normal_()
    return model


def proteins(*lengths):
    return ["".join("LAGVSERTIDPKQNFYMHWC"[i] for i in torch.randint(0, 20, (n,))) for n in lengths]


def test_published_config_has_the_published_size():
    with torch.device("meta"):
        model = LCPLM(LCPLMConfig(pad_vocab_size_multiple=128))
    assert model.embedding.num_embeddings == 128
    assert sum(p.numel() for p in model.parameters()) == 752_788_992


@variants
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_padding_changes_nothing(variant, side):
    """B2, B3, P4: every hidden state, logits, loss and gradients; conv bias 3."""
    model = tiny(**variant)
    sequences = proteins(1, 5, 10)
    ids, mask = tokenize(sequences)
    if side != "right":
        shift = 3 if side == "both" else 0
        width = ids.shape[1] + shift
        new_ids, new_mask = torch.full((3, width), 1), torch.zeros(3, width, dtype=torch.bool)
        for i, row in enumerate(mask):
            n = int(row.sum())
            at = slice(2, 2 + n) if side == "both" else slice(width - n, width)
            new_ids[i, at], new_mask[i, at] = ids[i, :n], True
        ids, mask = new_ids, new_mask
    out = model(ids, attention_mask=mask, labels=ids, output_hidden_states=True)
    out.loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    total = 0
    for i, sequence in enumerate(sequences):
        alone_ids = tokenize([sequence]).input_ids
        alone = model(alone_ids, labels=alone_ids, output_hidden_states=True)
        for a, b in zip(out.hidden_states, alone.hidden_states, strict=True):
            assert_close(a[i][mask[i]], b[0], terms=256, name=f"row {i}")
        assert_close(out.logits[i][mask[i]], alone.logits[0], terms=256)
        total = total + alone.loss * alone_ids.numel()
    (total / int(mask.sum())).backward()
    assert (out.last_hidden_state[~mask] == 0).all()
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter.grad, terms=4096, name=name)


@variants
def test_packed_equals_separate(variant):
    model = tiny(**variant)
    rows = [tokenize([s]).input_ids[0] for s in proteins(1, 7, 4)]
    lengths = torch.tensor([len(r) for r in rows])
    seq_ids = torch.repeat_interleave(torch.arange(3), lengths)[None]
    found = model(torch.cat(rows)[None], seq_ids=seq_ids).logits[0]
    assert_close(found, torch.cat([model(r[None]).logits[0] for r in rows]), terms=256)


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "multiply", "attention"])
def test_short_and_long_proteins_batched_packed_and_alone(name):
    """Proteins of 3, 60 and 2000 residues: every hidden state, and the gradient of every parameter,
    of random weights on all hidden states and logits; longer than every chunk of every scan."""
    model = tiny(**VARIANTS[name])
    batch = tokenize(proteins(3, 60, 2000))
    lengths = batch.attention_mask.sum(1)
    rows = [ids[:n] for ids, n in zip(batch.input_ids, lengths)]
    seq_ids = torch.repeat_interleave(torch.arange(3), lengths)[None]

    def outputs(out):
        return [*out.hidden_states, out.logits]

    def weighted(parts):
        generator = torch.Generator().manual_seed(3)
        total = 0.0
        for states in parts:  # the tokens of every sequence, one after the other
            total = total + (states * torch.randn(states.shape, generator=generator)).sum()
        model.zero_grad()
        total.backward()
        return [p.grad.clone() for p in model.parameters()]

    options = {"output_hidden_states": True}
    alone = [outputs(model(row[None], **options)) for row in rows]
    expected = [torch.cat([states[0] for states in parts]) for parts in zip(*alone)]
    expected_grads = weighted(expected)
    batched = outputs(model(batch.input_ids, attention_mask=batch.attention_mask, **options))
    packed = outputs(model(torch.cat(rows)[None], seq_ids=seq_ids, **options))
    ways = {
        "batched": [states[batch.attention_mask.bool()] for states in batched],
        "packed": [states[0] for states in packed],
    }
    for way, parts in ways.items():
        for layer, (found, states) in enumerate(zip(parts, expected, strict=True)):
            assert_close(found, states, terms=256, name=f"{way}, hidden state {layer}")
        for parameter, found, grad in zip(
            dict(model.named_parameters()), weighted(parts), expected_grads
        ):
            assert_close(found, grad, terms=int(lengths.sum()), name=f"{way}, {parameter}")


def test_fused_and_unfused_are_one_computation():
    """N4: the flag is accepted and changes nothing, with and without an MLP."""
    ids = tokenize(proteins(6)).input_ids
    for d_intermediate in (0, 24):
        a = tiny(fused_add_norm=True, d_intermediate=d_intermediate)
        b = tiny(fused_add_norm=False, d_intermediate=d_intermediate)
        b.load_state_dict(a.state_dict())
        assert torch.equal(a(ids).logits, b(ids).logits)


def test_logits_stop_at_the_true_vocabulary():
    """P1: padded rows take no probability and get no gradient."""
    model = tiny()
    assert model.lm_head.weight.shape[0] == 40
    ids = tokenize(proteins(6)).input_ids
    with torch.no_grad():
        model.lm_head.weight[33:] = 100.0
    out = model(ids, labels=ids)
    assert out.logits.shape[-1] == 33
    assert out.logits.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), ids.flatten())
    assert_close(out.loss, expected, terms=33)
    out.loss.backward()
    assert (model.lm_head.weight.grad[33:] == 0).all()
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 33\)"):
        model(ids + 30)


@pytest.mark.parametrize(("tie", "word_tie"), list(itertools.product([True, False], [True, False])))
def test_every_tie_saves_once_and_survives(tie, word_tie, tmp_path):
    """B1, B8, B9, H2"""
    model = tiny(bidirectional_weight_tie=tie, tie_embeddings=word_tie)
    ids = tokenize(proteins(6)).input_ids
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        names = list(file.keys())
    assert sum("mamba_rev.in_proj" in n for n in names) == (0 if tie else 2)
    assert ("lm_head.weight" in names) != word_tie
    with torch.device("meta"):
        blank = tiny(bidirectional_weight_tie=tie, tie_embeddings=word_tie)
    blank.to_empty(device="cpu")
    blank.load_state_dict(model.state_dict(), assign=True)
    for other in (
        LCPLM.from_pretrained(tmp_path),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        blank,
        copy.deepcopy(model).double().float(),
    ):
        assert torch.equal(other(ids).logits, expected)
        mixer = other.layers[0].mixer
        assert (mixer.mamba_fwd.in_proj.weight is mixer.mamba_rev.in_proj.weight) == tie
        assert (mixer.mamba_fwd.out_proj.weight is mixer.mamba_rev.out_proj.weight) == tie
        assert (other.lm_head is None) == word_tie


def test_either_copy_of_a_tied_projection_may_be_missing():
    """B1"""
    model = tiny()
    state = model.original_state_dict()
    ids = tokenize(proteins(6)).input_ids
    expected = model(ids).logits
    for missing in ("mamba_fwd", "mamba_rev"):
        other = tiny()
        kept = {
            k: v
            for k, v in state.items()
            if not (missing in k and "_proj.weight" in k and "x_" not in k)
        }
        kept |= {k: v for k, v in state.items() if "dt_proj" in k}
        assert len(kept) == len(state) - 4
        other.load_original_state_dict(kept)
        assert torch.equal(other(ids).logits, expected)
    key = "bimamba.backbone.layers.0.mixer.mamba_rev.in_proj.weight"
    before = model.original_state_dict()[key].clone()
    with pytest.raises(ValueError, match=r"mamba_rev\.in_proj\.weight .* must be one tensor"):
        model.load_original_state_dict(state | {key: state[key] + 1})
    assert torch.equal(model.original_state_dict()[key], before), "a failed load changed the model"


@pytest.mark.parametrize("strategy", ["add", "ew_multiply"])
def test_functional_calls_leave_the_model_as_it_was(strategy):
    model = tiny(bidirectional_strategy=strategy)
    ids = tokenize(proteins(6)).input_ids
    before = dict(model.named_parameters())
    expected = torch.autograd.grad(model(ids, labels=ids).loss, list(before.values()))
    state = model.original_state_dict()
    given = {name: p.detach().clone() for name, p in before.items()}

    def loss(parameters):
        return functional_call(model, parameters, (ids,), {"labels": ids}).loss

    found = torch.func.grad(loss)(given)
    for name, e in zip(before, expected):
        assert_close(found[name], e, terms=1024, name=name)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    again = model.original_state_dict()
    assert list(again) == list(state)
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_the_original_has_both_names_of_a_tied_projection():
    """B1: equal bit by bit."""
    model = tiny()
    state = model.original_state_dict()
    aliases = model.aliases()
    assert len(aliases) == 2 * model.config.n_layer
    for alias, name in aliases.items():
        assert alias == name.replace("mamba_fwd", "mamba_rev") != name
        assert torch.equal(state[alias], state[name])
    assert tiny(bidirectional_weight_tie=False).aliases() == {}


def test_initialisation():
    """B5"""
    for variant in ({}, MAMBA2, {"d_intermediate": 24}):
        model = LCPLM(LCPLMConfig(**(TINY | {"d_model": 64} | variant)))
        model.reset_parameters()
        assert 0.015 < model.embedding.weight.std() < 0.025
        mixer = model.layers[0].mixer.mamba_fwd
        bias = mixer.dt_bias if hasattr(mixer, "dt_bias") else mixer.dt_proj.bias
        dt = torch.nn.functional.softplus(bias)
        assert (dt >= 0.99e-4).all()
        assert (dt <= 0.101).all()
        residuals = 2 if "d_intermediate" in variant else 1
        bound = (1 / mixer.out_proj.in_features) ** 0.5 / (residuals * 2) ** 0.5
        assert 0.9 * bound < mixer.out_proj.weight.abs().max() <= bound


def test_gradient_checkpointing_gives_the_same_gradients():
    model = tiny().train()
    ids = tokenize(proteins(6, 9)).input_ids
    grads = []
    for on in (False, True):
        model.gradient_checkpointing = on
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        assert_close(a, b, terms=64)


def test_nothing_scored_gives_zero():
    model = tiny()
    ids = tokenize(proteins(6)).input_ids
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss == 0
    loss.backward()


def test_inputs_embeds():
    """P3"""
    model = tiny()
    ids = tokenize(proteins(6)).input_ids
    embeds = model.embedding(ids).detach().requires_grad_()
    out = model(inputs_embeds=embeds, labels=ids)
    assert torch.equal(out.logits, model(ids).logits)
    out.loss.backward()
    assert embeds.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@variants
def test_dtypes(variant, dtype, tmp_path):
    model = tiny(**variant).to(dtype)
    ids = tokenize(proteins(6)).input_ids
    out = model(ids, labels=ids)
    assert out.last_hidden_state.dtype == dtype
    out.loss.backward()
    model.save_pretrained(tmp_path)
    loaded = LCPLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, out.logits)
    for (name, a), b in zip(model.named_parameters(), loaded.parameters()):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


@pytest.mark.parametrize("variant", ["mamba1", "mamba2", "attention"])
def test_compiles_to_one_graph(variant):
    model = tiny(**VARIANTS[variant])
    ids = tokenize(proteins(3)).input_ids
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(ids).logits, model(ids).logits, terms=256)
