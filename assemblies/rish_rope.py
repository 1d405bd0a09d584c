"""RoPE of Rish: one set of arguments from the places where its config may spell them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brickwork.assemblies.config import check_base
from brickwork.blocks.rope import RoPE

if TYPE_CHECKING:
    from brickwork.assemblies.rish_config import RishConfig


def rope_options(config: RishConfig) -> dict[str, Any]:
    """The arguments of RoPE from `rope_theta`, `rope_type`, `rope_scaling`, `rope_parameters`,
    `original_max_position_embeddings` and `max_position_embeddings`.

    `rope_scaling` and `rope_parameters` are one dict, in older and newer spelling; a value of None
    means missing. A value that stands in two places must be the same in both; only a `rope_theta`
    that is the config's default gives way to another one.

    Raises:
        ValueError: a value is given twice and differs, a scaling without a type, or one that is
            incomplete or that Rish cannot compute.
    """
    where = [
        name
        for name in ("rope_scaling", "rope_parameters", "rope_type")
        if getattr(config, name) is not None
    ]
    source = " and ".join(where) or "rope_type"
    scaling = _one_dict(config)
    base = _base(config, scaling.pop("rope_theta", None))
    part = scaling.pop("partial_rotary_factor", 1.0)
    if part != 1:
        raise ValueError(
            f"{source}: partial_rotary_factor must be 1 (Rish rotates whole heads), got {part!r}"
        )
    scaling = _typed(config, scaling, source)
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        _merge(scaling, {name: getattr(config, name)}, f"{source} and the config")
    kind = scaling["rope_type"]
    if kind == "default" and scaling.get("factor") == 1:
        del scaling["factor"]  # the original cannot be built without one, so its configs have it
    options: dict[str, Any] = {
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        "base": base,
        "scaling": scaling,
        "max_positions": None if kind == "dynamic" else config.max_position_embeddings,
    }
    try:
        RoPE(**options)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return options | {"scaling": None if kind == "default" else scaling}


def _one_dict(config: RishConfig) -> dict[str, Any]:
    """`rope_scaling` and `rope_parameters` in one, the type as `rope_type`, without None."""
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        values = {k: v for k, v in (getattr(config, name) or {}).items() if v is not None}
        kind = values.pop("type", None)
        if kind is not None and values.setdefault("rope_type", kind) != kind:
            raise ValueError(
                f"{name}: rope type is given twice: type is {kind!r} and rope_type "
                f"{values['rope_type']!r}"
            )
        _merge(merged, values, "rope_scaling and rope_parameters")
    return merged


def _base(config: RishConfig, base: Any) -> float:
    if base is None:
        return config.rope_theta
    check_base(rope_theta=base)
    if config.rope_theta not in (base, type(config).rope_theta):
        raise ValueError(f"rope_theta is given twice: {config.rope_theta!r} and {base!r}")
    return base


def _typed(config: RishConfig, scaling: dict[str, Any], source: str) -> dict[str, Any]:
    """`scaling` with its `rope_type`, which may stand in the config instead."""
    kind = scaling.get("rope_type", config.rope_type)
    if kind is None and scaling:
        raise ValueError(f"{source} must name the rope_type of its scaling, got {scaling}")
    if config.rope_type not in (None, kind):
        raise ValueError(f"rope_type is given twice: {config.rope_type!r} and {kind!r}")
    return {**scaling, "rope_type": kind or "default"}


def _merge(into: dict[str, Any], values: dict[str, Any], places: str) -> None:
    for name, value in values.items():
        if value is not None and into.setdefault(name, value) != value:
            raise ValueError(f"{places} differ: {name} is {into[name]!r} and {value!r}")
