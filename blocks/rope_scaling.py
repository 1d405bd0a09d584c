"""Frequencies of RoPE beyond the length a model was trained on, from the dict that transformers'
configs call `rope_scaling` or `rope_parameters`.

F angles; exponents_F are 2i/R for the R = 2F rotated channels, so that `base^-exponents` are the
unscaled frequencies.

| type       | parameters ([x] may be missing)                                                     |
|------------|-------------------------------------------------------------------------------------|
| `default`  |                                                                                     |
| `linear`   | factor                                                                              |
| `dynamic`  | factor, max_position_embeddings                                                     |
| `yarn`     | factor, original_max_position_embeddings, [attention_factor], [mscale],             |
|            | [mscale_all_dim], [beta_fast], [beta_slow], [truncate]                              |
| `longrope` | short_factor, long_factor, original_max_position_embeddings, [factor],              |
|            | [attention_factor]                                                                  |
| `llama3`   | factor, low_freq_factor, high_freq_factor, original_max_position_embeddings         |

The type is `rope_type`, or `type` in older configs. A value of None means missing. Every type takes
max_position_embeddings and original_max_position_embeddings: of the one that a type needs and lacks
the other takes the place. Every type takes `rope_theta` and `partial_rotary_factor`, which must
agree with RoPE's `base` and `rotary_dim`. yarn's factor defaults to max_position_embeddings /
original_max_position_embeddings; longrope's is that ratio, where both are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from brickwork.kernels.checks import check_flag, check_integer

# Required and optional parameters; those of _COMMON are allowed everywhere.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}
_LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_LENGTHS)


def check_scaling(
    scaling: Mapping[str, object], *, base: float, head_dim: int, rotary_dim: int
) -> tuple[str, dict[str, Any]]:
    """The type and its parameters, complete; ValueError for anything unknown, missing or wrong."""
    if not isinstance(scaling, Mapping):
        raise ValueError(f"scaling must be a dict or None, got {scaling!r}")
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in scaling.items()
        if value is not None
    }
    kind = given.get("rope_type", given.get("type"))
    if kind not in tuple(_KEYS) or given.get("type", kind) != kind:
        raise ValueError(f"scaling must have one rope_type of {tuple(_KEYS)}, got {dict(scaling)}")
    required, optional = _KEYS[kind]
    for key in given:
        if key not in (*required, *optional, *_COMMON):
            raise ValueError(f"scaling of type {kind!r} has no key {key!r}, got {dict(scaling)}")
    for key, value in given.items():
        _check_parameter(key, value, rotary_dim // 2)
    _check_agreement(given, base, head_dim, rotary_dim)

    longest, original = (given.get(key) for key in _LENGTHS)
    if kind == "dynamic":
        if rotary_dim < 4:
            raise ValueError(
                f"rotary_dim must be at least 4 for scaling of type 'dynamic', got {rotary_dim}"
            )
        if longest and original and longest != original:
            raise ValueError(
                "scaling of type 'dynamic' has one length: max_position_embeddings = "
                f"{longest} and original_max_position_embeddings = {original} must be equal"
            )
        given.setdefault("max_position_embeddings", original)
    given.setdefault("original_max_position_embeddings", longest)
    if kind in ("yarn", "longrope") and longest and original:
        given.setdefault("factor", longest / original)
        if kind == "longrope" and not math.isclose(given["factor"], longest / original):
            raise ValueError(
                "factor must be max_position_embeddings / original_max_position_embeddings = "
                f"{longest} / {original} for scaling of type 'longrope', got {given['factor']!r}"
            )
    if kind == "longrope" and "attention_factor" not in given:
        required = (*required, "factor")
    for key in required:
        if given.get(key) is None:
            raise ValueError(
                f"scaling of type {kind!r} must have the key {key!r}, got {dict(scaling)}"
            )
    if given.get("beta_fast", 32) < given.get("beta_slow", 1):
        raise ValueError(
            "beta_fast (default 32) must be at least beta_slow (default 1), got "
            f"{given.get('beta_fast')!r} and {given.get('beta_slow')!r}"
        )
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise ValueError(
            "high_freq_factor must be greater than low_freq_factor, got "
            f"{given['high_freq_factor']!r} and {given['low_freq_factor']!r}"
        )
    if kind in ("yarn", "longrope"):
        given.setdefault("attention_factor", _attention_factor(kind, given))
    return kind, given


def scaled_inv_freq(
    kind: str,
    parameters: Mapping[str, Any],
    exponents_F: Tensor,
    base: float,
    lengths: Tensor | None = None,
) -> Tensor:
    """Radians per token: (F,) or, for a type that depends on `lengths`, (*lengths.shape, F)."""
    inv_freq = 1.0 / base**exponents_F
    if kind == "linear":
        return inv_freq / parameters["factor"]
    if kind == "dynamic":
        return inv_freq if lengths is None else _dynamic(parameters, exponents_F, base, lengths)
    if kind == "yarn":
        return _yarn(parameters, inv_freq, base)
    if kind == "longrope":
        return _longrope(parameters, inv_freq, lengths)
    if kind == "llama3":
        return _llama3(parameters, inv_freq)
    return inv_freq


def _dynamic(
    parameters: Mapping[str, Any], exponents_F: Tensor, base: float, lengths: Tensor
) -> Tensor:
    """Raise the base so that the slowest pair of channels turns as far over the whole sequence as
    over `factor` times its trained part, and the fastest as before."""
    factor, trained = parameters["factor"], parameters["max_position_embeddings"]
    rotary_dim = 2 * exponents_F.shape[0]
    stretch = factor * lengths.clamp(min=trained).to(exponents_F.dtype) / trained - (factor - 1)
    bases = base * stretch ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / bases[..., None] ** exponents_F


def _yarn(parameters: Mapping[str, Any], inv_freq_F: Tensor, base: float) -> Tensor:
    """Divide by `factor` the frequencies that turn fewer than beta_slow times within the original
    length, keep those that turn more than beta_fast times, blend linearly between."""
    num_angles = inv_freq_F.shape[0]

    def index(turns: float) -> float:  # of the (fractional) pair that turns so many times
        length = parameters["original_max_position_embeddings"]
        return num_angles * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    low = index(parameters.get("beta_fast", 32))
    high = index(parameters.get("beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_angles - 1)
    width = high - low or 0.001
    pairs = torch.arange(num_angles, device=inv_freq_F.device, dtype=inv_freq_F.dtype)
    slow_F = ((pairs - low) / width).clamp(0, 1)
    return inv_freq_F * (1 - slow_F) + inv_freq_F / parameters["factor"] * slow_F


def _longrope(parameters: Mapping[str, Any], inv_freq_F: Tensor, lengths: Tensor | None) -> Tensor:
    """Divide each frequency by its own factor: of one list up to the original length, of another
    for longer sequences."""
    short_F = inv_freq_F / inv_freq_F.new_tensor(parameters["short_factor"])
    if lengths is None:
        return short_F
    long_F = inv_freq_F / inv_freq_F.new_tensor(parameters["long_factor"])
    is_long = lengths > parameters["original_max_position_embeddings"]
    return torch.where(is_long[..., None], long_F, short_F)


def _llama3(parameters: Mapping[str, Any], inv_freq_F: Tensor) -> Tensor:
    """Divide by `factor` the frequencies that turn fewer than low_freq_factor times within the
    original length, keep those that turn more than high_freq_factor times, blend between."""
    turns_F = parameters["original_max_position_embeddings"] * inv_freq_F / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    fast_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return inv_freq_F * fast_F + inv_freq_F / parameters["factor"] * (1 - fast_F)


def _attention_factor(kind: str, parameters: Mapping[str, Any]) -> float:
    """What scores are scaled by (once for queries, once for keys) to stay sharp over more keys."""
    factor = parameters["factor"]
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return growth(mscale) / growth(mscale_all_dim)
    return growth(1.0)


def _check_parameter(key: str, value: object, num_angles: int) -> None:
    if key in ("rope_type", "type"):
        return
    if key in ("short_factor", "long_factor"):
        fits = (
            isinstance(value, (list, tuple))
            and len(value) == num_angles
            and all(is_positive(v) for v in value)
        )
        if not fits:
            raise ValueError(
                f"{key} must hold {num_angles} positive numbers (half of rotary_dim), got {value!r}"
            )
    elif key == "truncate":
        check_flag(key, value)
    elif key in _LENGTHS:
        check_integer(key, value, least=2)
    elif key == "factor":
        if not is_positive(value) or value < 1:
            raise ValueError(f"factor must be a finite number of at least 1, got {value!r}")
    elif not is_positive(value) and not (value == 0 and key.startswith("mscale")):
        raise ValueError(f"{key} must be a finite positive number, got {value!r}")


def _check_agreement(given: Mapping[str, Any], base: float, head_dim: int, rotary_dim: int) -> None:
    if given.get("rope_theta", base) != base:
        raise ValueError(
            f"rope_theta in scaling must equal base = {base}, got {given['rope_theta']!r}: pass it "
            "as base too"
        )
    part = given.get("partial_rotary_factor", rotary_dim / head_dim)
    if int(head_dim * part) != rotary_dim:
        raise ValueError(
            f"partial_rotary_factor in scaling must give rotary_dim = {rotary_dim} of head_dim = "
            f"{head_dim}, got {part!r}: pass rotary_dim too"
        )


def is_positive(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number greater than 0 (and not a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < math.inf
