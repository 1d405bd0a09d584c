"""Our experts under transformers' mixture-of-experts models."""

from __future__ import annotations

import pytest
import torch
import transformers
from support import assert_close

from brickwork.assemblies.hf import register_experts
from brickwork.kernels import experts as module

SIZES = {
    **{"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0},
    **{"num_experts_per_tok": 2, "initializer_range": 0.2, "output_router_logits": True},
}
MODELS = {
    "FlexOlmo": {"intermediate_size": 12, "num_experts": 6},
    "Mixtral": {"intermediate_size": 12, "num_local_experts": 6},
    "Olmoe": {"intermediate_size": 12, "num_experts": 6},
    "Qwen3Moe": {
        "intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 6, "head_dim": 4,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    register_experts()


def build(name, **fields):
    config = getattr(transformers, f"{name}Config")(**(SIZES | MODELS[name] | fields))
    torch.manual_seed(1)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def run(model, ids):
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return {
        "logits": out.logits,
        "loss": out.loss,
        **{n: p.grad for n, p in model.named_parameters()},
    }


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_eager(name, monkeypatch):
    model, ids = build(name, experts_implementation="eager"), torch.randint(1, 31, (2, 9))
    expected = run(model, ids)
    calls = []
    original = module.experts
    monkeypatch.setattr(
        "brickwork.assemblies.hf_experts.experts",
        lambda *tensors: calls.append(1) or original(*tensors),
    )
    model.set_experts_implementation("brickwork")
    found = run(model, ids)
    assert len(calls) == 2
    assert found.keys() == expected.keys()
    scale = max(t.abs().max().item() for t in expected.values() if t is not None)
    for key, value in expected.items():
        assert_close(found[key], value, terms=64, scale=scale, name=key)


def test_chosen_when_the_model_is_built_or_loaded(tmp_path):
    build("Olmoe", experts_implementation="brickwork").save_pretrained(tmp_path)
    options = {"experts_implementation": "brickwork"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert model.config._experts_implementation == "brickwork"
    ids = torch.randint(1, 31, (2, 9))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_keeps_its_dtype():
    model = build("Mixtral", experts_implementation="brickwork").bfloat16()
    assert model(torch.randint(1, 31, (2, 9))).logits.dtype == torch.bfloat16


def test_experts_of_another_kind_are_refused_by_name():
    model = build("Mixtral", experts_implementation="brickwork", hidden_act="gelu")
    with pytest.raises(ValueError, match=r"cannot run MixtralExperts: its activation is not silu"):
        model(torch.tensor([[1, 2]]))
    sizes = {"intermediate_size": 12, "num_local_experts": 4, "head_dim": 4}
    config = transformers.GptOssConfig(**(SIZES | sizes), experts_implementation="brickwork")
    with pytest.raises(ValueError, match="cannot run GptOssExperts: "):
        transformers.GptOssForCausalLM(config)(torch.tensor([[1, 2]]))
