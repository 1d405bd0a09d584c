from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from brickwork.assemblies import LCPLM, LCPLMConfig, MiniLLaDAConfig, RishConfig
from brickwork.blocks.rope import RoPE

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
    assert LCPLMConfig(layer="Mamba2").mixer_name() == "Mamba2"
    with pytest.raises(ValueError, match=r"layer must be one of \(None, 'Mamba1'\), got 'Mamba2'"):
        LCPLMConfig(ssm_cfg={"layer": "Mamba1"}, layer="Mamba2")


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


MAMBA2 = {"layer": "Mamba2", "headdim": 64}
HYBRID = {"attn_layer_idx": [0]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_layer_idx": 0}, "attn_layer_idx must be a list"),
        ({"attn_layer_idx": "0"}, "attn_layer_idx must be a list"),
        ({"attn_layer_idx": [True]}, "attn_layer_idx must be in"),
        ({"layer": 5}, "layer must be one of"),
        ({"ssm_cfg": "Mamba1"}, "ssm_cfg must be a dict or None, got 'Mamba1'"),
        ({"ssm_cfg": {"layer": 0}}, "ssm_cfg.layer"),
        ({"ssm_cfg": {"bias": "false"}}, "ssm_cfg.bias must be True or False"),
        ({"ssm_cfg": {"conv_bias": 0}}, "ssm_cfg.conv_bias"),
        ({"ssm_cfg": {"d_state": None}}, "ssm_cfg.d_state"),
        ({"ssm_cfg": {"expand": 1.5}}, "ssm_cfg.expand"),
        ({"ssm_cfg": {"dt_rank": 0}}, "ssm_cfg.dt_rank"),
        ({"ssm_cfg": {"use_fast_path": "no"}}, "ssm_cfg.use_fast_path"),
        ({"ssm_cfg": {"chunk_size": 0}}, "ssm_cfg.chunk_size"),
        ({"ssm_cfg": {1: 2}}, "ssm_cfg has no entries"),
        ({"ssm_cfg": MAMBA2 | {"norm_before_gate": "false"}}, "ssm_cfg.norm_before_gate"),
        ({"ssm_cfg": MAMBA2 | {"D_has_hdim": "false"}}, "ssm_cfg.D_has_hdim"),
        ({"ssm_cfg": MAMBA2 | {"dt_limit": None}}, "ssm_cfg.dt_limit must be two numbers"),
        ({"ssm_cfg": MAMBA2 | {"dt_limit": [0, "inf"]}}, "ssm_cfg.dt_limit"),
        ({"ssm_cfg": MAMBA2 | {"dt_limit": [float("nan"), 1]}}, "ssm_cfg.dt_limit"),
        ({"ssm_cfg": MAMBA2 | {"dt_limit": [2.0, 1.0]}}, "ssm_cfg.dt_limit"),
        ({"ssm_cfg": MAMBA2 | {"dt_limit": [float("inf")] * 2}}, "ssm_cfg.dt_limit"),
        ({"ssm_cfg": MAMBA2 | {"headdim": 100}}, "ssm_cfg.headdim must divide"),
        ({"ssm_cfg": MAMBA2 | {"ngroups": 5}}, "ssm_cfg.ngroups must divide the 48 heads"),
        ({"attn_cfg": [1]}, "attn_cfg must be a dict"),
        ({"attn_cfg": {"num_heads": "x"}}, "attn_cfg.num_heads"),
        (HYBRID | {"attn_cfg": {"num_heads": None}}, "attn_cfg.num_heads"),
        (HYBRID | {"attn_cfg": {"num_heads": 5}}, "attn_cfg.num_heads must divide d_model"),
        (HYBRID | {"attn_cfg": {"num_heads": 4, "num_heads_kv": 3}}, "num_heads_kv = 3"),
        (HYBRID | {"attn_cfg": {"num_heads": 4, "causal": None}}, "attn_cfg.causal"),
        (HYBRID | {"attn_cfg": {"num_heads": 4, "rotary_emb_dim": 3}}, "attn_cfg.rotary_emb_dim"),
        (HYBRID | {"attn_cfg": {"num_heads": 4, "rotary_emb_dim": -4}}, "attn_cfg.rotary_emb_dim"),
        (HYBRID | {"attn_cfg": {"num_heads": 4, "rotary_emb_dim": 386}}, "attn_cfg.rotary_emb_dim"),
        ({"attn_cfg": {"rotary_emb_interleaved": "no"}}, "attn_cfg.rotary_emb_interleaved"),
        ({"attn_cfg": {"rotary_emb_base": 1.0}}, "attn_cfg.rotary_emb_base"),
        ({"initializer_cfg": "x"}, "initializer_cfg must be a dict"),
        ({"initializer_cfg": {"n_residuals_per_layer": 0}}, "cfg.n_residuals_per_layer"),
        ({"initializer_cfg": {"initializer_range": -1}}, "initializer_cfg.initializer_range"),
        ({"initializer_cfg": {"initializer_range": "a"}}, "initializer_cfg.initializer_range"),
        ({"initializer_cfg": {"rescale_prenorm_residual": "no"}}, "rescale_prenorm_residual"),
        ({"d_intermediate": None}, "d_intermediate"),
        ({"d_intermediate": False}, "d_intermediate"),
        ({"d_model": None}, "d_model"),
    ],
)
def test_values_of_lc_plm_that_no_model_can_have(values, message):
    with pytest.raises(ValueError, match=message):
        LCPLMConfig(**values)


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (MiniLLaDAConfig, {"vocab_size": None}, "vocab_size"),
        (MiniLLaDAConfig, {"mask_token_id": None}, "mask_token_id"),
        (MiniLLaDAConfig, {"diffusion_eps": 2}, "diffusion_eps must be a number in"),
        (MiniLLaDAConfig, {"diffusion_eps": "x"}, "diffusion_eps"),
        (MiniLLaDAConfig, {"diffusion_eps": 1.0}, "diffusion_eps"),
        (MiniLLaDAConfig, {"dim": 6, "head": 2}, "dim must be an even multiple of head = 2"),
        (RishConfig, {"hidden_size": None}, "hidden_size"),
        (RishConfig, {"head_dim": 3}, "head_dim must be even"),
        (RishConfig, {"hidden_size": 96}, "hidden_size must be an even multiple"),
        (RishConfig, {"num_key_value_heads": 5}, "multiple of num_key_value_heads = 5, got 32"),
        (RishConfig, {"attention_dropout": 1.0}, "attention_dropout"),
        (RishConfig, {"rope_theta": -1}, "rope_theta must be a finite number greater than 1"),
        (RishConfig, {"rope_theta": None}, "rope_theta"),
        (RishConfig, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        (RishConfig, {"rope_scaling": [1]}, "rope_scaling must be a dict or None"),
        (RishConfig, {"rope_scaling": "linear"}, "rope_scaling must be a dict or None"),
        (RishConfig, {"rope_parameters": 3}, "rope_parameters must be a dict or None"),
        (RishConfig, {"rope_scaling": {"rope_type": "foo"}}, "rope_scaling: .*'foo'"),
        (RishConfig, {"rope_type": "foo"}, "rope_type: .*'foo'"),
        (RishConfig, {"rope_type": "linear"}, "rope_type: .* must have the key 'factor'"),
        (RishConfig, {"rope_type": 5}, "rope_type"),
        (RishConfig, {"rope_parameters": {"rope_type": ["linear"]}}, "rope_parameters: "),
    ],
)
def test_values_of_the_others_that_no_model_can_have(config_class, values, message):
    with pytest.raises(ValueError, match=message):
        config_class(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"ssm_cfg": {"d_state": 4, "dt_rank": "auto", "use_fast_path": False, "chunk_size": 8}},
        {"ssm_cfg": {"layer": None, "dt_rank": 3, "bias": True}, "d_intermediate": 16},
        {"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "ngroups": 2, "dt_limit": (0, float("inf"))}},
        {"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "D_has_hdim": True, "expand": 1}},
        {"attn_layer_idx": (0,), "attn_cfg": {"num_heads": 4, "rotary_emb_dim": 4}},
        {"attn_layer_idx": [0], "attn_cfg": {"num_heads": 3, "head_dim": 5, "num_heads_kv": None}},
        {"initializer_cfg": {"initializer_range": 0.1, "n_residuals_per_layer": 3}},
    ],
)
def test_what_the_config_of_lc_plm_accepts_can_be_built(values):
    with torch.device("meta"):
        LCPLM(LCPLMConfig(d_model=16, n_layer=1, **values))


RISH_SCALINGS_IGNORED = [
    ({"rope_scaling": {"factor": 8.0}}, "rope_scaling must name the rope_type"),
    ({"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, "rope_parameters must name the"),
    ({"rope_scaling": {"rope_type": "default", "junk": 2.0}}, "rope_scaling: .*'junk'"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling: .*'factor'"),
    ({"rope_type": "default", "rope_scaling": {"factor": 2.0}}, "rope_scaling and rope_type: "),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters: partial_rotary_factor must be 1",
    ),
    (
        {"rope_type": "yarn", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_type is given twice: 'yarn' and 'linear'",
    ),
    (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        "rope_theta is given twice: 10000.0 and 1000000.0",
    ),
    (
        {"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_theta": 1e6}},
        "rope_scaling and rope_parameters differ: rope_theta",
    ),
    (
        {
            "original_max_position_embeddings": 100,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 200,
            },
        },
        "original_max_position_embeddings is 200 and 100",
    ),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64}},
        "max_position_embeddings is 64 and 4096",
    ),
]


@pytest.mark.parametrize(("values", "message"), RISH_SCALINGS_IGNORED)
def test_no_part_of_a_rope_scaling_is_ignored(values, message):
    """R9: nor taken for another type."""
    with pytest.raises(ValueError, match=message):
        RishConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_type": "default"},
        {"rope_scaling": {}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0}},
        {"rope_scaling": {"rope_type": "default"}, "rope_type": "default"},
        {"rope_scaling": {"factor": None}},
        {"original_max_position_embeddings": 1024},
        {"rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 1.0}},
    ],
)
def test_spellings_of_no_scaling(values):
    assert RishConfig(**values).rope_options() == RishConfig().rope_options()


def test_values_of_rope_that_stand_in_one_place_are_used():
    linear = {"rope_type": "linear", "factor": 2.0}
    expected = RishConfig(rope_scaling=linear, rope_theta=1e4).rope_options()
    spellings = [
        {"rope_scaling": linear | {"rope_theta": 1e4}},
        {"rope_scaling": {"factor": 2.0}, "rope_type": "linear", "rope_theta": 1e4},
        {"rope_scaling": linear, "rope_parameters": {"rope_theta": 1e4}},
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": linear | {"rope_theta": 1e4},
            "rope_theta": 1e4,
        },
    ]
    for values in spellings:
        assert RishConfig(**values).rope_options() == expected
    default = RishConfig(rope_scaling={"rope_type": "default", "rope_theta": 1e4})
    assert RoPE(**default.rope_options()).base == 1e4


@pytest.mark.parametrize(
    ("config_class", "values"),
    [
        (LCPLMConfig, {"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.0, 1.0]}}),
        (LCPLMConfig, {"attn_layer_idx": [0], "attn_cfg": {"num_heads": 4}}),
        (LCPLMConfig, {"initializer_cfg": {"initializer_range": 0.1}}),
        (RishConfig, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (RishConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_a_config_shares_nothing_with_its_caller(config_class, values):
    """P1: nor does building change what the caller holds."""
    before = copy.deepcopy(values)
    config = config_class(**values)
    assert values == before
    for value in values.values():
        if isinstance(value, list):
            value.append(1)
            continue
        for entry in value.values():
            if isinstance(entry, list):
                entry.append(1)
        value["changed"] = 1
    assert config == config_class(**before)


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), [0.01, float("inf")], (0.0, 0.5)])
def test_dt_limit_comes_back_from_valid_json(dt_limit, tmp_path):
    config = LCPLMConfig(
        d_model=16, n_layer=1, ssm_cfg={"layer": "Mamba2", "headdim": 8, "dt_limit": dt_limit}
    )
    assert LCPLMConfig.from_dict(config.to_dict()) == config
    LCPLM(config).save_pretrained(tmp_path)
    loaded = LCPLM.from_pretrained(tmp_path)
    assert loaded.config == config
    assert loaded.layers[0].mixer.mamba_fwd.dt_limit == tuple(dt_limit)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "config.json").read_text(), parse_constant=refuse)


def test_infinity_as_python_spells_it_in_json_is_read():
    text = '{"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.0, Infinity]}}'
    config = LCPLMConfig.from_dict(json.loads(text))
    assert config.mixer_options()["dt_limit"] == [0.0, float("inf")]
    assert LCPLMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_longrope_factors_as_a_tuple_come_back_equal():
    factors = {"rope_type": "longrope", "short_factor": (1.0,) * 64, "long_factor": (2.0,) * 64}
    config = RishConfig(rope_scaling=factors, original_max_position_embeddings=1024)
    assert RishConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
