"""The three models under transformers: files, parameters, outputs."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
from types import ModuleType

import pytest
import torch
from hf_models import KINDS, build, lc_plm, mini_llada, rish, token_ids
from safetensors.torch import load_file, save_file
from support import assert_golden, golden_names, load_golden, part
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from brickwork.assemblies import LCPLM, MiniLLaDA, Rish
from brickwork.assemblies.hf import LCPLMHFConfig, MiniLLaDAHFConfig, RishHFConfig
from brickwork.blocks.masked_diffusion import Noise

ASSEMBLIES = {"rish": Rish, "mini_llada": MiniLLaDA, "lc_plm": LCPLM}
AUTO = dict.fromkeys(KINDS, AutoModelForMaskedLM) | {"rish": AutoModelForCausalLM}
GOLDENS = [(kind, name) for kind in KINDS for name in golden_names(kind)]
HEADS = {"rish": "lm_head", "mini_llada": "network.head", "lc_plm": "lm_head"}


def original(kind, name, folder):
    """A folder as the assembly writes it, and the golden."""
    golden, config = load_golden(name)
    ours = {"weighting": "uniform"} if kind == "mini_llada" else {}
    ours = {"balance": "pooled"} if kind == "rish" else ours
    assembly = ASSEMBLIES[kind]
    model = assembly(assembly.config_class.from_dict(config | ours))
    model.load_original_state_dict(part(golden, "state."))
    model.save_pretrained(folder, max_shard_bytes=20_000)
    return model, golden


def load(auto, folder, **options):
    """A model of a folder from which nothing was missing and nothing left over."""
    model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def changed(folder, change):
    """Rewrite the one file of tensors in `folder`."""
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("kind", "name"), GOLDENS)
def test_goldens_come_back_through_transformers(kind, name, tmp_path):
    assembly, golden = original(kind, name, tmp_path / "ours")
    model = load(AUTO[kind], tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    again = ASSEMBLIES[kind].from_pretrained(tmp_path / "theirs")
    assert again.config == assembly.config
    found = again.original_state_dict()
    for key, tensor in part(golden, "state.").items():
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key
    second = load(AUTO[kind], tmp_path / "theirs")
    for (key, one), (_, other) in zip(model.named_parameters(), second.named_parameters()):
        assert torch.equal(one, other), key


@pytest.mark.parametrize("name", golden_names("rish"))
def test_rish_computes_the_golden(name, tmp_path):
    _, golden = original("rish", name, tmp_path)
    model = load(AutoModelForCausalLM, tmp_path)
    out = model(
        golden["input_ids"],
        attention_mask=golden["attention_mask"],
        labels=golden["labels"],
        output_hidden_states=True,
        output_router_logits=True,
    )
    for i, state in enumerate(out.hidden_states):
        assert_golden(state, golden[f"hidden_states.{i}"], "hidden", str(i))
    for i, logits in enumerate(out.router_logits):
        assert_golden(logits, golden[f"router_logits.{i}"], "router_logits", str(i))
    assert_golden(out.logits, golden["logits"], "logits")
    assert_golden(out.aux_loss, golden["aux_loss"], "loss")
    assert_golden(out.loss, golden["loss"], "loss")
    out.loss.backward()
    router = "model.layers.0.moe.router.weight"
    expected = golden["grad.model.layers.0.mlp.gate.weight"]
    assert_golden(dict(model.named_parameters())[router].grad, expected, "gradient")
    if "generated_ids" in golden:
        found = model.generate(
            golden["input_ids"],
            attention_mask=golden["attention_mask"],
            max_length=golden["generated_ids"].shape[1],
            do_sample=False,
        )
        assert torch.equal(found, golden["generated_ids"])


@pytest.mark.parametrize("name", golden_names("mini_llada"))
def test_mini_llada_computes_the_golden(name, tmp_path):
    """L9"""
    _, golden = original("mini_llada", name, tmp_path)
    model = load(AutoModelForMaskedLM, tmp_path)
    assert_golden(model(golden["input_ids"]).logits, golden["logits"], "logits")
    p = golden["draw.t"][:, None].expand(golden["mask"].shape)
    noise = Noise(golden["noisy_ids"], golden["mask"], p)
    out = model(golden["input_ids"], labels=golden["labels"], noise=noise)
    assert_golden(out.logits, golden["train_logits"], "logits")
    expected = model.assembly()(golden["input_ids"], labels=golden["labels"], noise=noise)
    assert torch.equal(out.loss, expected.loss)


@pytest.mark.parametrize("name", golden_names("lc_plm"))
def test_lc_plm_computes_the_golden(name, tmp_path):
    """L9"""
    _, golden = original("lc_plm", name, tmp_path)
    model = load(AutoModelForMaskedLM, tmp_path)
    out = model(golden["input_ids"], labels=golden["labels"], output_hidden_states=True)
    assert_golden(out.hidden_states[-1], golden["last_hidden_state"], "hidden")
    assert_golden(out.logits, golden["logits"], "logits")
    assert_golden(out.loss, golden["loss"], "loss")
    hidden = load(AutoModel, tmp_path)(golden["input_ids"]).last_hidden_state
    assert torch.equal(hidden, out.hidden_states[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_backbones_load_each_other(kind, tmp_path):
    model, ids = build(kind), token_ids(2, 7)
    model.save_pretrained(tmp_path / "head")
    backbone = load(AutoModel, tmp_path / "head")
    expected = model(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(backbone(ids).last_hidden_state, expected)
    backbone.save_pretrained(tmp_path / "backbone")
    assert torch.equal(load(AutoModel, tmp_path / "backbone")(ids).last_hidden_state, expected)
    _, report = AUTO[kind].from_pretrained(tmp_path / "backbone", output_loading_info=True)
    assert [*report["missing_keys"]] == [HEADS[kind].split(".")[-1] + ".weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_are_the_assemblies(kind):
    model, ids = build(kind), token_ids(2, 7)
    mask = (torch.arange(7) < torch.tensor([7, 4])[:, None]).long()
    mask = mask.flip(1) if kind == "rish" else mask
    assembly = model.assembly()
    theirs = model(ids, attention_mask=mask, output_hidden_states=True)
    ours = assembly(ids, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(theirs.logits, ours.logits)
    for one, other in zip(theirs.hidden_states, ours.hidden_states, strict=True):
        assert torch.equal(one, other)
    assert {id(p) for p in model.parameters()} == {id(p) for p in assembly.parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_in_the_place_of_ids(kind):
    """P3"""
    model, ids = build(kind), token_ids(2, 7)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=embeds).logits
    assert torch.equal(out, model(ids).logits)
    out.square().sum().backward()
    assert (embeds.grad.abs().sum(-1) > 0).all()
    for given in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**given)


@pytest.mark.parametrize("kind", KINDS)
def test_tuples_and_unknown_arguments(kind):
    model, ids = build(kind), token_ids(2, 7)
    assert torch.equal(model(ids, return_dict=False)[0], model(ids).logits)
    with pytest.raises(TypeError, match="token_type_ids"):
        model(ids, token_type_ids=ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_loaded_starts_by_the_blocks_rules_and_nothing_else_changes(kind, tmp_path):
    """H4, B5, R4"""
    model = build(kind, tie_word_embeddings=False) if kind != "mini_llada" else build(kind)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.fill_(100.0 + i)
    model.save_pretrained(tmp_path)
    loaded = load(AUTO[kind], tmp_path)
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters()):
        assert torch.equal(one, other), name
    names = [*load_file(tmp_path / "model.safetensors")]
    for name in names:
        if ".experts." in name or ".layers.1." in name:
            continue
        state = load_file(tmp_path / "model.safetensors")
        kept = state.pop(name)
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found, report = AUTO[kind].from_pretrained(tmp_path, output_loading_info=True)
        fresh = dict(build(kind).named_parameters())
        for key, parameter in found.named_parameters():
            if key in report["missing_keys"]:
                assert parameter.isfinite().all()
                assert parameter.abs().max() < 50, key
                assert parameter.std(correction=0) < 4 * fresh[key].std(correction=0) + 1e-6, key
                if key.endswith(("A_log", ".D", "norm.weight", "norm1.weight")):
                    assert torch.equal(parameter, fresh[key]), key
            else:
                assert torch.equal(parameter, dict(model.named_parameters())[key]), key
        assert len(report["missing_keys"]) == 1, name
        save_file(state | {name: kept}, tmp_path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_model_starts_as_the_assembly_does(kind):
    """B5"""
    torch.manual_seed(3)
    model = build(kind)
    torch.manual_seed(3)
    assembly = ASSEMBLIES[kind](model.config.assembly_config())
    theirs = dict(model.assembly().named_parameters())
    for name, parameter in assembly.named_parameters():
        if "head" not in name:
            assert torch.equal(theirs[name], parameter), name
    head = model.get_output_embeddings().weight
    assert head.isfinite().all()
    assert head.std() > 0
    assert AUTO[kind].from_config(model.config).config == model.config


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rates_and_steps_stay_in_float32(layer, dtype, tmp_path):
    """B5"""
    model = lc_plm(ssm_cfg={"layer": layer, "d_state": 4}, d_model=64)
    model.save_pretrained(tmp_path)
    wide = ("A_log", ".D", "dt_bias", "dt_proj.bias")
    for found in (
        load(AutoModelForMaskedLM, tmp_path, dtype=dtype),
        load(AutoModel, tmp_path, dtype=dtype),
    ):
        for name, parameter in found.named_parameters():
            expected = torch.float32 if name.endswith(wide) else dtype
            assert parameter.dtype == expected, name
    assert found(token_ids(2, 5)).last_hidden_state.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_and_device_map(kind, tmp_path):
    """R2, N2"""
    model, ids = build(kind), token_ids(2, 7)
    model.save_pretrained(tmp_path)
    narrow = load(AUTO[kind], tmp_path, dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow(ids).logits.float(), model(ids).logits, atol=0.5, rtol=0.1)
    narrow.save_pretrained(tmp_path / "narrow")
    again = load(AUTO[kind], tmp_path / "narrow")
    assert torch.equal(again(ids).logits, narrow(ids).logits)
    pytest.importorskip("accelerate")
    placed = load(AUTO[kind], tmp_path, device_map="cpu", low_cpu_mem_usage=True)
    assert torch.equal(placed(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_on_the_disk(kind, tmp_path):
    """H8"""
    accelerate = pytest.importorskip("accelerate")
    model, ids = build(kind), token_ids(2, 7)
    model.save_pretrained(tmp_path / "model")
    names = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) <= names
    size = sum(p.numel() * 4 for p in model.parameters())
    with torch.device("meta"):
        empty = AUTO[kind].from_config(model.config)
    for share in (0.3, 0.6, 0.9):
        limit = {"cpu": int(size * share), "disk": "1GB"}
        blocks = model._no_split_modules
        where = accelerate.infer_auto_device_map(empty, limit, no_split_module_classes=blocks)
        assert not any(".layers.0." in name for name in where)
    placed = AUTO[kind].from_pretrained(
        tmp_path / "model",
        device_map="auto",
        max_memory={"cpu": int(size * 0.6)},
        offload_folder=tmp_path / "disk",
    )
    assert "disk" in placed.hf_device_map.values()
    if kind == "lc_plm":
        with pytest.raises(ValueError, match="device_map must leave every layer of LCPLMModel"):
            placed(ids)
    else:
        assert torch.equal(placed(ids).logits, model(ids).logits)


def tie(kind, tied):
    return {"tie_embeddings" if kind == "lc_plm" else "tie_word_embeddings": tied}


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("kind", ["rish", "lc_plm"])
def test_tied_words(kind, words, tmp_path):
    """H2, B9"""
    model = build(kind, **tie(kind, words))
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shared == words
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not words)
    loaded = load(AUTO[kind], tmp_path)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double()):
        tied = other.get_output_embeddings().weight is other.get_input_embeddings().weight
        assert tied == words
    ids = token_ids(2, 5)
    assert torch.equal(loaded(ids).logits, model.float()(ids).logits)


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("directions", [True, False])
def test_tied_directions(words, directions, tmp_path):
    """B1, B8, B9"""
    model = lc_plm(bidirectional_weight_tie=directions, **tie("lc_plm", words))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    layer = "bimamba.backbone.layers.0.mixer."
    assert (f"{layer}mamba_rev.in_proj.weight" in state) == (not directions)
    assert len({t.data_ptr() for t in state.values()}) == len(state)
    loaded, ids = load(AutoModelForMaskedLM, tmp_path), token_ids(2, 5)
    for other in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        mixer = other.backbone.layers[0].mixer
        assert (mixer.mamba_rev.in_proj is mixer.mamba_fwd.in_proj) == directions
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_either_copy_of_a_tied_projection_or_both(tmp_path):
    """B1"""
    model, ids = lc_plm(), token_ids(2, 5)
    fwd, rev = (
        "bimamba.backbone.layers.1.mixer.mamba_" + s + ".out_proj.weight" for s in ("fwd", "rev")
    )
    model.save_pretrained(tmp_path)
    changed(tmp_path, lambda state: state.update({rev: state[fwd].clone()}))
    assert torch.equal(load(AutoModelForMaskedLM, tmp_path)(ids).logits, model(ids).logits)
    changed(tmp_path, lambda state: state.pop(fwd))
    assert torch.equal(load(AutoModelForMaskedLM, tmp_path)(ids).logits, model(ids).logits)
    changed(tmp_path, lambda state: state.update({fwd: state[rev] + 1}))
    with pytest.raises(RuntimeError):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"bidirectional": False},
        {"ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 8}, "d_intermediate": 8},
        {
            "attn_layer_idx": [1],
            "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 4},
        },
        {"rms_norm": False, "bidirectional_strategy": "ew_multiply"},
    ],
    ids=["one direction", "Mamba-2 and MLP", "attention", "LayerNorm"],
)
def test_every_layout_of_lc_plm(fields, tmp_path):
    model, ids = lc_plm(**fields), token_ids(2, 5)
    model.save_pretrained(tmp_path)
    assembly = LCPLM.from_pretrained(tmp_path)
    assert torch.equal(assembly(ids).logits, model(ids).logits)
    assert torch.equal(load(AutoModelForMaskedLM, tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("grown", "rows"), [(32, 32), (36, 40), (45, 48)])
def test_lc_plm_grows_by_tokens_and_pads_by_rows(grown, rows, tmp_path):
    """H6, P1"""
    model, ids = lc_plm(), token_ids(2, 5)
    before, old = model(ids).logits, model.get_input_embeddings().weight.detach().clone()
    table = model.resize_token_embeddings(grown)
    assert table.weight.shape == model.lm_head.weight.shape == (rows, 16)
    assert model.config.vocab_size == grown
    after = model(ids).logits
    assert after.shape[-1] == grown
    assert torch.equal(after[..., :32], before[..., :32])
    new = table.weight[33:grown] - old[:33].mean(0)
    assert new.numel() == 0 or new.abs().max() < 0.1
    model.save_pretrained(tmp_path)
    assert torch.equal(load(AutoModelForMaskedLM, tmp_path)(ids).logits, after)
    assert model.resize_token_embeddings() is table
    with pytest.raises(ValueError, match="pad_to_multiple_of must be None"):
        model.resize_token_embeddings(grown, pad_to_multiple_of=8)


@pytest.mark.parametrize("tied", [True, False])
def test_the_others_grow_too(tied, tmp_path):
    """H2, H6"""
    for model in (rish(tie_word_embeddings=tied), mini_llada()):
        ids = token_ids(2, 5)
        before = model(ids).logits
        model.resize_token_embeddings(32)
        assert model.config.vocab_size == 32
        after = model(ids).logits
        assert torch.equal(after[..., :29], before)
        model.save_pretrained(tmp_path)
        loaded = load(
            AUTO["rish" if model.config.model_type == "rish_ai" else "mini_llada"], tmp_path
        )
        assert torch.equal(loaded(ids).logits, after)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_implementations(kind, tmp_path):
    model, ids = build(kind), token_ids(2, 7)
    assert model.config._attn_implementation == "sdpa"
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    eager = load(AUTO[kind], tmp_path, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    for name, said in (
        ("flash_attention_2", "Flash Attention 2"),
        ("flex_attention", "FlexAttention|flex_attention|flex attention"),
        ("nonsense", "nonsense"),
    ):
        with pytest.raises((ValueError, ImportError), match=said):
            AUTO[kind].from_pretrained(tmp_path, attn_implementation=name)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        eager(ids, output_attentions=True)


def test_labels_with_some_logits():
    """H5"""
    model, ids = rish(), token_ids(2, 7)
    full = model(ids, labels=ids)
    for keep, which in ((2, slice(-2, None)), (torch.tensor([1, 4]), torch.tensor([1, 4]))):
        for labels in (ids, None):
            out = model(ids, labels=labels, logits_to_keep=keep)
            torch.testing.assert_close(out.logits, full.logits[:, which])
            assert labels is None or torch.equal(out.loss, full.loss)


def test_router_logits_are_raw_and_on_request():
    """M6"""
    model, ids = rish(router_aux_loss_coef=0.5), token_ids(2, 7)
    assert model(ids).router_logits is None
    out = model(ids, labels=ids, output_router_logits=True)
    assert [t.shape for t in out.router_logits] == [(14, 6)] * 2
    ours = model.assembly()(ids, labels=ids)
    assert torch.equal(out.router_logits[1], ours.router_logits[1].flatten(0, 1))
    assert torch.equal(model(ids, labels=ids).loss, ours.loss)
    assert torch.equal(out.aux_loss, ours.aux_loss)


@pytest.mark.parametrize("config_class", [RishHFConfig, MiniLLaDAHFConfig, LCPLMHFConfig])
def test_configs(config_class, tmp_path):
    config = config_class()
    ours = config.assembly_config()
    assert ours == config.ours()
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert config.ours.from_dict(fields) == ours
    assert AutoConfig.from_pretrained(tmp_path) == AutoConfig.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).assembly_config() == ours
    assert isinstance(AutoConfig.for_model(config.model_type), config_class)
    assert copy.deepcopy(config) == config
    assert config.hidden_size > 0
    assert config.num_hidden_layers > 0
    with pytest.raises(ValueError, match="must be a positive integer"):
        config_class(vocab_size=0)
    config.vocab_size = -1
    with pytest.raises(ValueError, match="must be a positive integer"):
        config.assembly_config()


def test_configs_keep_both_spellings_of_rope():
    scaling = {"rope_type": "linear", "factor": 2.0}
    for fields in ({"rope_scaling": scaling}, {"rope_parameters": scaling | {"rope_theta": 500.0}}):
        config = RishHFConfig(**fields)
        assert {name: getattr(config, name) for name in fields} == fields
        assert (
            RishHFConfig.from_dict(config.to_dict()).assembly_config() == config.assembly_config()
        )
    with pytest.raises(ValueError, match="rope_type"):
        RishHFConfig(rope_scaling={"rope_type": "unknown"})


def test_an_older_transformers_is_named(monkeypatch):
    """4.57 has no conversion of weights while loading, which all three models rest on."""
    older = ModuleType("transformers")
    older.__version__ = "4.57.6"
    monkeypatch.setitem(sys.modules, "transformers", older)
    monkeypatch.delitem(sys.modules, "brickwork.assemblies.hf_config")
    with pytest.raises(ImportError, match=r"needs transformers 5\.17 or newer.*got 4\.57\.6"):
        importlib.import_module("brickwork.assemblies.hf_config")
