from __future__ import annotations

import copy
import dataclasses

import pytest

from brickwork.assemblies import LCPLMConfig, MiniLLaDAConfig, RishConfig

CONFIGS = [MiniLLaDAConfig, RishConfig, LCPLMConfig]


@pytest.mark.parametrize("config_class", CONFIGS)
def test_defaults_round_trip(config_class):
    config = config_class()
    assert config_class.from_dict(config.to_dict()) == config
    assert config.to_dict()["model_type"] == config_class.model_type


@pytest.mark.parametrize("config_class", CONFIGS)
def test_bookkeeping_is_passed_over_and_unknown_fields_are_errors(config_class):
    values = {"architectures": ["X"], "transformers_version": "5.0", "_name_or_path": "x"}
    assert config_class.from_dict(values) == config_class()
    with pytest.raises(ValueError, match=r"has no fields \['dropuot'\]"):
        config_class.from_dict({"dropuot": 0.1})
    with pytest.raises(ValueError, match=r"model_type must be .*, got 'llama'"):
        config_class.from_dict({"model_type": "llama"})
    with pytest.raises(TypeError, match="dropuot"):
        config_class(dropuot=0.1)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_configs_are_frozen_and_do_not_share_the_callers_dicts(config_class):
    values = config_class().to_dict()
    before = copy.deepcopy(values)
    config = config_class.from_dict(values)
    for value in values.values():
        if isinstance(value, dict):
            value["changed"] = 1
        if isinstance(value, list):
            value.append(1)
    assert config == config_class.from_dict(before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3


@pytest.mark.parametrize(
    ("config_class", "field", "value"),
    [
        (MiniLLaDAConfig, "dim", 0),
        (MiniLLaDAConfig, "dim", 2050),
        (MiniLLaDAConfig, "depth", True),
        (MiniLLaDAConfig, "mask_token_id", 52000),
        (MiniLLaDAConfig, "weighting", "sum"),
        (RishConfig, "num_experts_per_tok", 8),
        (RishConfig, "hidden_act", "gelu"),
        (RishConfig, "num_hidden_layers", 2.0),
        (RishConfig, "pad_token_id", -1),
        (RishConfig, "eos_token_id", 100352),
        (RishConfig, "num_attention_heads", 5),
        (RishConfig, "balance", "mean"),
        (RishConfig, "attention_bias", 1),
        (RishConfig, "initializer_range", -0.1),
        (RishConfig, "attention_dropout", 1.5),
        (RishConfig, "router_aux_loss_coef", float("nan")),
        (MiniLLaDAConfig, "norm_eps", None),
        (LCPLMConfig, "pad_vocab_size_multiple", 0),
        (LCPLMConfig, "d_intermediate", -1),
        (LCPLMConfig, "ssm_cfg", {"layer": "Mamba3"}),
        (LCPLMConfig, "ssm_cfg", {"d_sate": 16}),
        (LCPLMConfig, "attn_layer_idx", [48]),
        (LCPLMConfig, "attn_layer_idx", [0]),
        (LCPLMConfig, "attn_cfg", {"heads": 2}),
        (LCPLMConfig, "initializer_cfg", {"std": 1.0}),
        (LCPLMConfig, "bidirectional_strategy", "concat"),
        (LCPLMConfig, "pad_token_id", 33),
        (LCPLMConfig, "norm_epsilon", -1.0),
    ],
)
def test_impossible_values_name_the_field(config_class, field, value):
    name = {"ssm_cfg": "layer|ssm_cfg", "attn_layer_idx": "attn_layer_idx|attn_cfg"}.get(
        field, field
    )
    name = "hidden_size" if field == "num_attention_heads" else name
    with pytest.raises(ValueError, match=name):
        config_class(**{field: value})


def test_null_sections_of_lc_plm():
    config = LCPLMConfig.from_dict({"ssm_cfg": None, "attn_layer_idx": None, "attn_cfg": None})
    assert config.mixer_name() == "Mamba1"
    assert LCPLMConfig(ssm_cfg={"d_state": 8}, layer="Mamba2").mixer_name() == "Mamba2"
    assert LCPLMConfig(ssm_cfg={"layer": "Mamba1"}, layer="Mamba2").mixer_name() == "Mamba1"


def test_vocabulary_padding_keeps_the_true_size():
    """P1"""
    config = LCPLMConfig()
    assert (config.vocab_size, config.padded_vocab_size()) == (33, 40)
    assert LCPLMConfig(vocab_size=40).padded_vocab_size() == 40
    assert LCPLMConfig(pad_vocab_size_multiple=1).padded_vocab_size() == 33


def test_rope_of_rish_may_be_spelled_either_way():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = RishConfig(rope_scaling=scaling, rope_theta=1e4)
    new = RishConfig(rope_parameters=scaling | {"rope_theta": 1e4})
    typed = RishConfig(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e4)
    assert old.rope_options() == new.rope_options() == typed.rope_options()
    with pytest.raises(ValueError, match="rope_scaling and rope_parameters differ"):
        RishConfig(rope_scaling=scaling, rope_parameters=scaling | {"factor": 3.0})
    with pytest.raises(ValueError, match="rope type is given twice"):
        RishConfig(rope_scaling=scaling | {"type": "yarn"})


def test_longrope_length_may_stand_at_either_level():
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "rope_type": "longrope"}
    top = RishConfig(rope_scaling=factors, original_max_position_embeddings=1024)
    inside = RishConfig(rope_scaling=factors | {"original_max_position_embeddings": 1024})
    assert top.rope_options() == inside.rope_options()
