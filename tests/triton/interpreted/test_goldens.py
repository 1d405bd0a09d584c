"""The models on Triton kernels, interpreted, reproduce what the originals computed."""

from __future__ import annotations

import pytest
from support import assert_golden, assert_golden_gradients, golden_model, golden_names

from brickwork.assemblies import LCPLM, LCPLMConfig, Rish, RishConfig
from brickwork.kernels import causal_conv1d_triton, experts_triton, selective_scan_triton
from brickwork.kernels.backend import prefer


@pytest.mark.parametrize("name", golden_names("rish"))
def test_rish(name, monkeypatch):
    ran = []
    forward = experts_triton.experts_forward
    monkeypatch.setattr(
        experts_triton, "experts_forward", lambda *t: (ran.append(t[0].shape), forward(*t))[1]
    )
    model, golden = golden_model(Rish, RishConfig, name, balance="pooled")
    given = {key: golden[key] for key in ("input_ids", "attention_mask", "labels")}
    with prefer("triton"):
        out = model(**given, output_hidden_states=True)
        out.loss.backward()
    assert ran
    for i, state in enumerate(out.hidden_states):
        assert_golden(state, golden[f"hidden_states.{i}"], "hidden", str(i))
    for i, logits in enumerate(out.router_logits):
        assert_golden(logits.flatten(0, 1), golden[f"router_logits.{i}"], "router_logits", str(i))
    assert_golden(out.logits, golden["logits"], "logits")
    assert_golden(out.loss, golden["loss"], "loss")
    assert_golden_gradients(model, golden)


@pytest.mark.parametrize("name", [n for n in golden_names("lc_plm") if "mamba1" in n])
def test_lc_plm(name, monkeypatch):
    ran = []
    for module in (causal_conv1d_triton, selective_scan_triton):
        forward = module._forward_op
        monkeypatch.setattr(
            module,
            "_forward_op",
            lambda *t, op=module.__name__, run=forward: (ran.append(op), run(*t))[1],
        )
    model, golden = golden_model(LCPLM, LCPLMConfig, name)
    with prefer("triton"):
        out = model(golden["input_ids"], labels=golden["labels"])
        out.loss.backward()
    assert ran.count(causal_conv1d_triton.__name__) == ran.count(selective_scan_triton.__name__) > 0
    assert_golden(out.last_hidden_state, golden["last_hidden_state"], "hidden")
    assert_golden(out.logits, golden["logits"], "logits")
    assert_golden(out.loss, golden["loss"], "loss")
    assert_golden_gradients(model, golden)
