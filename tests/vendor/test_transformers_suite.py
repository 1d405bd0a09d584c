"""transformers' own tests of models, from its source distribution, on ours.

Its mixin is read as it is; what it inherits that the distribution lacks (exporters, generation) is
empty here. `docs/vendor_tests.md` says what is left out, and why.
"""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hf_models import build, token_ids
from transformers.models.auto import modeling_auto

from brickwork.assemblies.hf import (
    LCPLMForMaskedLM,
    LCPLMModel,
    MiniLLaDAForMaskedLM,
    MiniLLaDAModel,
    RishForCausalLM,
    RishModel,
)

FOLDER = Path(os.environ["BRICKWORK_VENDOR"]).resolve() / "sources" / "transformers"
PACKAGE = "transformers_own_tests"

pytestmark = pytest.mark.filterwarnings("default")  # theirs warn of themselves

_LAYERS = (
    "looks for layers of a class of transformers'; tests/assemblies/test_hf_training.py has this"
)
_LENGTH = "runs past max_position_embeddings, which is an error here"
LEFT_OUT: dict[str, dict[str, str]] = {
    "all": {
        "test_generation_tester_mixin_inheritance": "the distribution lacks the generation tests",
        "test_gradient_checkpointing_enable_disable": _LAYERS,
        "test_training_gradient_checkpointing": _LAYERS,
        "test_training_gradient_checkpointing_use_reentrant_false": _LAYERS,
        "test_training_gradient_checkpointing_use_reentrant_true": _LAYERS,
        "test_model_forward_default_config_values": "makes a config whose ids do not fit",
    },
    "rish": {
        "test_bc_cache_name_forward": "wants a warning for the older name, which we just take",
        "test_causal_lm_loss_honors_shift_labels": "shifted labels are not taken",
        "test_model_rope_scaling_from_config_0_linear": _LENGTH,
        "test_model_rope_scaling_from_config_1_dynamic": _LENGTH,
        "test_model_rope_scaling_from_config_2_yarn": _LENGTH,
        "test_model_rope_with_partial_rotation": "Rish rotates whole heads",
    },
    "mini_llada": {
        "test_resize_tokens_embeddings": "cuts off the token that masks",
        "test_model_outputs_equivalence": "compares losses of two draws of noise",
    },
    "lc_plm": {
        "test_resize_tokens_embeddings": "wants as many rows as tokens, and ours are padded",
        "test_reverse_loading_mapping": "a tied tensor's second name is read, and never written",
        "test_resize_embeddings_untied": "wants as many rows as tokens, and ours are padded",
    },
}
# A config with every part that a checkpoint may name.
FIELDS: dict[str, dict] = {
    "rish": {},
    "mini_llada": {},
    "lc_plm": {
        **{"d_intermediate": 8, "n_layer": 2, "attn_layer_idx": [1], "attn_cfg": {"num_heads": 2}},
        "ssm_cfg": {"layer": "Mamba1", "d_state": 4, "bias": True},
    },
}


def _mixin() -> type:
    """`ModelTesterMixin`, from a package that stands for the folder of transformers' tests."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(FOLDER / "tests")]
    sys.modules[PACKAGE] = package
    for path, name in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        above, _, _ = path.partition(".")
        sys.modules[f"{PACKAGE}.{above}"] = ModuleType(f"{PACKAGE}.{above}")
        missing = ModuleType(f"{PACKAGE}.{path}")
        setattr(missing, name, type(name, (), {}))
        sys.modules[missing.__name__] = missing
    from importlib import import_module

    return import_module(f"{PACKAGE}.test_modeling_common").ModelTesterMixin


class ConfigAndInputs:
    """What the mixin asks for: a config, and inputs of a batch of 13 rows of 7 tokens."""

    batch_size, seq_length, is_training = 13, 7, True
    hidden_size = 16

    def __init__(self, parent, kind):
        self.parent, self.kind = parent, kind
        self.num_hidden_layers = self.get_config().num_hidden_layers

    def get_config(self):
        return build(self.kind, **FIELDS[self.kind]).config

    def prepare_config_and_inputs_for_common(self):
        ids = token_ids(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def suite(kind, *classes):
    """A test case of the mixin for these models, less what is left out."""

    def setup(self):
        self.model_tester = ConfigAndInputs(self, kind)

    def labelled(self, inputs, model_class, return_labels=False):
        """MiniLLaDA masks tokens itself: what it is to predict are the ids."""
        found = _MIXIN._prepare_for_class(self, inputs, model_class, return_labels=return_labels)
        if return_labels and kind == "mini_llada" and "labels" in found:
            found["labels"] = found["input_ids"]
        return found

    def mapping(self, **options):
        """The originals' names are those of models with heads."""
        _MIXIN.test_reverse_loading_mapping(self, skip_base_model=True, **options)

    left_out = LEFT_OUT["all"] | LEFT_OUT[kind]
    skipped = {name: unittest.skip(reason)(lambda self: None) for name, reason in left_out.items()}
    return type(
        f"{kind}_test",
        (_MIXIN, unittest.TestCase),
        {
            "all_model_classes": classes,
            "has_attentions": False,
            "setUp": setup,
            "_prepare_for_class": labelled,
            "test_reverse_loading_mapping": mapping,
            "__module__": __name__,
            **skipped,
        },
    )


_MIXIN = _mixin()
for _type, _names in {
    "rish_ai": {"MODEL": "RishModel", "MODEL_FOR_CAUSAL_LM": "RishForCausalLM"},
    "mini-llada": {"MODEL": "MiniLLaDAModel", "MODEL_FOR_MASKED_LM": "MiniLLaDAForMaskedLM"},
    "lc_plm": {"MODEL": "LCPLMModel", "MODEL_FOR_MASKED_LM": "LCPLMForMaskedLM"},
}.items():
    for _mapping, _name in _names.items():
        getattr(modeling_auto, f"{_mapping}_MAPPING_NAMES")[_type] = _name
TestRish = suite("rish", RishModel, RishForCausalLM)
TestMiniLLaDA = suite("mini_llada", MiniLLaDAModel, MiniLLaDAForMaskedLM)
TestLCPLM = suite("lc_plm", LCPLMModel, LCPLMForMaskedLM)
