"""The assemblies reproduce what the originals computed (origin: tests/golden/README.md)."""

from __future__ import annotations

import pytest
import torch
from support import assert_golden, assert_golden_gradients, golden_model, golden_names, part

from brickwork.assemblies import (
    LCPLM,
    LCPLMConfig,
    MiniLLaDA,
    MiniLLaDAConfig,
    Rish,
    RishConfig,
)
from brickwork.blocks.masked_diffusion import Noise
from brickwork.kernels import selective_scan_cpu
from brickwork.kernels.backend import prefer


@pytest.fixture(params=["auto", "torch", "chunked", "grouped", "cpu"])
def backend(request):
    """Each way of computing that this machine has, in the ops that have it."""
    if request.param == "auto":
        yield
    elif request.param == "cpu" and (reason := selective_scan_cpu.unavailable_here()):
        pytest.skip(reason)
    else:
        with prefer(request.param):
            yield


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", golden_names("mini_llada"))
def test_mini_llada(name):
    model, golden = golden_model(MiniLLaDA, MiniLLaDAConfig, name, weighting="uniform")
    assert_golden(model(golden["input_ids"]).logits, golden["logits"], "logits")
    maskable = golden["labels"] != -100
    mask = (golden["draw.u"] < golden["draw.t"][:, None]) & maskable
    assert torch.equal(mask, golden["mask"])
    noisy = golden["input_ids"].masked_fill(mask, model.config.mask_token_id)
    assert torch.equal(noisy, golden["noisy_ids"])
    noise = Noise(noisy, mask, golden["draw.t"][:, None].expand(mask.shape))
    out = model(golden["input_ids"], labels=golden["labels"], noise=noise)
    assert_golden(out.logits, golden["train_logits"], "logits")
    loss = model.diffusion.loss(out.logits, golden["input_ids"], noise, denominator="tokens")
    assert_golden(loss, golden["loss"], "loss")
    loss.backward()
    assert_golden_gradients(model, golden)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", golden_names("rish"))
def test_rish(name):
    model, golden = golden_model(Rish, RishConfig, name, balance="pooled")
    out = model(
        golden["input_ids"],
        attention_mask=golden["attention_mask"],
        labels=golden["labels"],
        output_hidden_states=True,
    )
    for i, state in enumerate(out.hidden_states):
        assert_golden(state, golden[f"hidden_states.{i}"], "hidden", str(i))
    for i, logits in enumerate(out.router_logits):
        assert_golden(logits.flatten(0, 1), golden[f"router_logits.{i}"], "router_logits", str(i))
    assert_golden(out.logits, golden["logits"], "logits")
    assert_golden(out.aux_loss, golden["aux_loss"], "loss")
    assert_golden(out.loss, golden["loss"], "loss")
    out.loss.backward()
    assert_golden_gradients(model, golden)


@pytest.mark.parametrize("name", golden_names("rish"))
def test_rish_position_ids_as_the_original_passes_them(name):
    model, golden = golden_model(Rish, RishConfig, name)
    given = {"attention_mask": golden["attention_mask"]}
    ours = model(golden["input_ids"], **given).logits
    theirs = model(golden["input_ids"], position_ids=golden["position_ids"], **given).logits
    real = golden["attention_mask"].bool()
    assert torch.equal(ours[real], theirs[real])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["rish_base", "rish_padded_normtopk"])
def test_rish_generated_ids(name, use_cache):
    model, golden = golden_model(Rish, RishConfig, name, use_cache=use_cache)
    expected = golden["generated_ids"]
    ids = golden["input_ids"]
    found = model.generate(
        ids,
        attention_mask=golden["attention_mask"],
        max_new_tokens=expected.shape[1] - ids.shape[1],
    )
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", golden_names("lc_plm"))
def test_lc_plm(name):
    model, golden = golden_model(LCPLM, LCPLMConfig, name)
    out = model(golden["input_ids"], labels=golden["labels"])
    assert_golden(out.last_hidden_state, golden["last_hidden_state"], "hidden")
    assert_golden(out.logits, golden["logits"], "logits")
    assert_golden(out.loss, golden["loss"], "loss")
    out.loss.backward()
    assert_golden_gradients(model, golden)


MODELS = {
    "mini_llada": (MiniLLaDA, MiniLLaDAConfig),
    "rish": (Rish, RishConfig),
    "lc_plm": (LCPLM, LCPLMConfig),
}
ALL = [(kind, name) for kind in MODELS for name in golden_names(kind)]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_state_comes_back_byte_equal_under_the_same_names(kind, name):
    model, golden = golden_model(*MODELS[kind], name)
    expected = part(golden, "state.")
    found = model.original_state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_files_come_back_byte_equal(kind, name, tmp_path):
    model, golden = golden_model(*MODELS[kind], name)
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = MODELS[kind][0].from_pretrained(tmp_path)
    assert loaded.config == model.config
    for key, tensor in part(golden, "state.").items():
        assert torch.equal(loaded.original_state_dict()[key], tensor), key
