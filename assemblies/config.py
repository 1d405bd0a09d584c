"""What the configs of the three assemblies share: reading and writing `config.json`'s fields."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

ConfigType = TypeVar("ConfigType", bound="Config")

# Written into config.json by transformers for its own use; they say nothing about the computation.
_BOOKKEEPING = {
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type",
    "return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_bfloat16",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention",
    "id2label", "label2id", "problem_type", "cross_attention_hidden_size", "finetuning_task",
    "task_specific_params", "prefix", "sep_token_id", "decoder_start_token_id", "pruned_heads",
    "tokenizer_class", "tie_encoder_decoder",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the configs: a frozen dataclass whose fields are the original's field names."""

    model_type: ClassVar[str]

    @classmethod
    def from_dict(cls: type[ConfigType], values: Mapping[str, Any]) -> ConfigType:
        """A config from the fields of an original's `config.json`.

        Fields that transformers adds for its own bookkeeping are passed over.

        Raises:
            ValueError: another `model_type`, a field this model does not have, or a bad value.
        """
        model_type = values.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(f"model_type must be {cls.model_type!r}, got {model_type!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        given = {
            name: copy.deepcopy(value)
            for name, value in values.items()
            if name in known or (name not in _BOOKKEEPING and not name.startswith("_"))
        }
        unknown = sorted(given.keys() - known)
        if unknown:
            raise ValueError(f"{cls.__name__} has no fields {unknown}; it has {sorted(known)}")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """The fields of `config.json`, `model_type` first."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}


def check_size(**values: int | None) -> None:
    """Raise unless every value given is a positive integer (None is passed over)."""
    for name, value in values.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_token_id(vocab_size: int, **values: int | None) -> None:
    """Raise unless every id given is in the vocabulary (None is passed over)."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise ValueError(f"{name} must be in [0, vocab_size = {vocab_size}), got {value!r}")


def check_number(least: float, most: float = float("inf"), **values: float) -> None:
    """Raise unless every value given is a finite number in [least, most]."""
    for name, value in values.items():
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not least <= value <= most or value == float("inf"):
            raise ValueError(f"{name} must be a number in [{least}, {most}], got {value!r}")
