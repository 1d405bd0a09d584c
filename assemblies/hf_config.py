"""The assemblies' configs for transformers: the same fields, checked by the same rules."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import transformers

try:
    from transformers import PreTrainedConfig
except ImportError as error:  # transformers 4
    raise ImportError(
        "brickwork.assemblies.hf needs transformers 5.17 or newer, which converts weights while it "
        f"loads them, got {transformers.__version__}; the models' own from_pretrained and "
        "save_pretrained need none and read the same folders"
    ) from error
from transformers.utils import logging

from brickwork.assemblies.config import Config
from brickwork.assemblies.lc_plm_config import LCPLMConfig
from brickwork.assemblies.mini_llada_config import MiniLLaDAConfig
from brickwork.assemblies.rish_config import RishConfig

logger = logging.get_logger(__name__)


class AssemblyConfig(PreTrainedConfig):
    """Base of the three: takes the fields of `ours` and what transformers adds to every config.

    Raises:
        ValueError: a bad value; a field that neither side knows is kept and logged, as other
            programs store their own beside ours.
    """

    ours: ClassVar[type[Config]] = Config
    # Not transformers' property over rope_parameters: Rish's configs may have both.
    rope_scaling: ClassVar[Any] = None

    def __post_init__(self, **fields: Any) -> None:
        known = {field.name for field in dataclasses.fields(self.ours)}
        mine = {name: fields.pop(name) for name in known & fields.keys()}
        for name, standard in self.attribute_map.items():
            if name in fields:
                mine[standard] = fields.pop(name)
        fields.pop("_save_id", None)  # of a folder that the assembly wrote; a new save is another
        model_type = fields.pop("model_type", self.model_type)
        config = self.ours.from_dict({"model_type": model_type, **mine})
        super().__post_init__(**fields)
        for name, value in dataclasses.asdict(config).items():
            setattr(self, name, value)
        theirs = {"attn_implementation", *dir(PreTrainedConfig())}
        others = sorted(fields.keys() - self.ours.passed_over() - theirs)
        if others := [name for name in others if not name.startswith("_")]:
            logger.warning(f"{type(self).__name__} has no fields {others}: they change nothing")

    def assembly_config(self) -> Config:
        """The assembly's own config.

        Raises:
            ValueError: a field was set to a bad value.
        """
        names = (field.name for field in dataclasses.fields(self.ours))
        return self.ours.from_dict({name: getattr(self, name) for name in names})

    # RoPE stays as the file spells it; the assembly's config reads every spelling.
    def convert_rope_params_to_dict(self, **fields: Any) -> dict[str, Any]:
        return fields

    def standardize_rope_params(self) -> None: ...

    def validate_rope(self, *args: Any, **options: Any) -> None: ...


class RishHFConfig(AssemblyConfig):
    """`RishConfig` for transformers."""

    model_type = "rish_ai"
    ours = RishConfig
    keys_to_ignore_at_inference: ClassVar = ["cache", "past_key_values"]
    attribute_map: ClassVar = {"num_local_experts": "num_experts"}


class MiniLLaDAHFConfig(AssemblyConfig):
    """`MiniLLaDAConfig` for transformers."""

    model_type = "mini-llada"
    ours = MiniLLaDAConfig
    attribute_map: ClassVar = {
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "head",
        "max_position_embeddings": "max_seq_len",
    }


class LCPLMHFConfig(AssemblyConfig):
    """`LCPLMConfig` for transformers."""

    model_type = "lc_plm"
    ours = LCPLMConfig
    attribute_map: ClassVar = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }
