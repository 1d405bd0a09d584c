"""What the configs of the three assemblies share: reading and writing `config.json`'s fields."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard, TypeVar

ConfigType = TypeVar("ConfigType", bound="Config")

# Written into config.json by transformers for its own use; they say nothing about the computation.
_BOOKKEEPING = {
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type",
    "return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_bfloat16",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention",
    "id2label", "label2id", "problem_type", "cross_attention_hidden_size", "finetuning_task",
    "task_specific_params", "prefix", "sep_token_id", "decoder_start_token_id", "pruned_heads",
    "tokenizer_class", "tie_encoder_decoder", "use_cache",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the configs: a frozen dataclass whose fields are the original's field names.

    Dicts and sequences are copied, tuples to lists, so that a config shares nothing with its caller
    and equals what is read back from its `config.json`.
    """

    model_type: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _from_json(getattr(self, field.name)))

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
        fields = {
            name: value
            for name, value in values.items()
            if name in known or (name not in _BOOKKEEPING and not name.startswith("_"))
        }
        unknown = sorted(fields.keys() - known)
        if unknown:
            raise ValueError(f"{cls.__name__} has no fields {unknown}; it has {sorted(known)}")
        return cls(**fields)

    @staticmethod
    def passed_over() -> set[str]:
        """The fields of a `config.json` that say nothing about the computation."""
        return set(_BOOKKEEPING)

    def to_dict(self) -> dict[str, Any]:
        """The fields of `config.json`, `model_type` first.

        JSON has no infinity: it is spelled `{"__float__": "Infinity"}`, as transformers does.
        """
        return {"model_type": self.model_type, **_to_json(dataclasses.asdict(self))}


_INFINITY = {"__float__": "Infinity"}


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value == _INFINITY:
            return math.inf
        return {key: _from_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_from_json(entry) for entry in value]
    return copy.deepcopy(value)


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_to_json(entry) for entry in value]
    return dict(_INFINITY) if isinstance(value, float) and value == math.inf else value


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None: of fields that may be null, those there are to check."""
    return {name: value for name, value in values.items() if value is not None}


def check_size(**values: object) -> None:
    """Raise unless every value is a positive integer."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_token_id(vocab_size: int, **values: object) -> None:
    """Raise unless every id is in the vocabulary."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise ValueError(f"{name} must be in [0, vocab_size = {vocab_size}), got {value!r}")


def check_number(least: float, most: float = math.inf, **values: object) -> None:
    """Raise unless every value is a finite number in [least, most]."""
    for name, value in values.items():
        if not is_number(value) or not least <= value <= most:
            raise ValueError(f"{name} must be a finite number in [{least}, {most}], got {value!r}")


def check_fraction(**values: object) -> None:
    """Raise unless every value is a number in [0, 1)."""
    for name, value in values.items():
        if not is_number(value) or not 0 <= value < 1:
            raise ValueError(f"{name} must be a number in [0, 1), got {value!r}")


def check_base(**values: object) -> None:
    """Raise unless every value can be a base of RoPE: a finite number greater than 1."""
    for name, value in values.items():
        if not is_number(value) or value <= 1:
            raise ValueError(f"{name} must be a finite number greater than 1, got {value!r}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite int or float (and not a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -math.inf < value < math.inf


def check_dict(name: str, value: object) -> None:
    """Raise unless `value` is a dict or None."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a dict or None, got {value!r}")
