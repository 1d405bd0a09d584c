"""Entries of the dicts in LC-PLM's config, and what their values must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from brickwork.assemblies.config import check_base, check_number, check_size, is_number
from brickwork.kernels.checks import check_flag, check_integer, check_one_of

Check = Callable[[str, object], None]

MIXERS = ("Mamba1", "Mamba2")


def _size(name: str, value: object) -> None:
    check_size(**{name: value})


def _size_or_none(name: str, value: object) -> None:
    if value is not None:
        check_size(**{name: value})


def _rank(name: str, value: object) -> None:
    if value not in (None, "auto"):
        check_size(**{name: value})


def _limits(name: str, value: object) -> None:
    """As Mamba-2 wants its step sizes' limits; the high one may be infinite."""
    if isinstance(value, list) and len(value) == 2:
        low, high = value
        if is_number(low) and (high == math.inf or is_number(high)) and 0 <= low <= high:
            return
    raise ValueError(f"{name} must be two numbers, 0 <= low <= high, got {value!r}")


def _rotary_dim(name: str, value: object) -> None:
    if value is not None:
        check_integer(name, value, least=0)


def _base(name: str, value: object) -> None:
    check_base(**{name: value})


def _at_least_0(name: str, value: object) -> None:
    check_number(0, math.inf, **{name: value})


# These choose a kernel or its tile, and change no result: every backend here chooses its own.
KERNEL_CHOICES: dict[str, Check] = {
    "use_fast_path": check_flag,
    "use_mem_eff_path": check_flag,
    "chunk_size": _size_or_none,
}
_SSM: dict[str, Check] = KERNEL_CHOICES | {
    "layer": partial(check_one_of, allowed=(None, *MIXERS)),
    "d_state": _size,
    "d_conv": _size,
    "expand": _size,
    "bias": check_flag,
    "conv_bias": check_flag,
}
_SSM_OF: dict[str, dict[str, Check]] = {
    "Mamba1": _SSM | {"dt_rank": _rank},
    "Mamba2": _SSM
    | {
        "headdim": _size,
        "ngroups": _size,
        "dt_limit": _limits,
        "D_has_hdim": check_flag,
        "norm_before_gate": check_flag,
    },
}
_ATTENTION: dict[str, Check] = {
    "num_heads": _size,
    "num_heads_kv": _size_or_none,
    "head_dim": _size_or_none,
    "causal": check_flag,
    "qkv_proj_bias": check_flag,
    "out_proj_bias": check_flag,
    "rotary_emb_dim": _rotary_dim,
    "rotary_emb_base": _base,
    "rotary_emb_interleaved": check_flag,
}
_INITIALIZER: dict[str, Check] = {
    "initializer_range": _at_least_0,
    "rescale_prenorm_residual": check_flag,
    "n_residuals_per_layer": _size,
}


def check_ssm_cfg(ssm_cfg: Mapping[str, Any], mixer: str, d_model: int) -> None:
    """Raise unless the mixer of that name can be built with these entries."""
    _check_entries("ssm_cfg", ssm_cfg, _SSM_OF[mixer])
    if mixer == "Mamba1":
        return
    inner = ssm_cfg.get("expand", 2) * d_model
    headdim, ngroups = ssm_cfg.get("headdim", 64), ssm_cfg.get("ngroups", 1)
    if inner % headdim:
        raise ValueError(f"ssm_cfg.headdim must divide expand · d_model = {inner}, got {headdim}")
    if inner // headdim % ngroups:
        raise ValueError(
            f"ssm_cfg.ngroups must divide the {inner // headdim} heads of width headdim = "
            f"{headdim}, got {ngroups}"
        )


def check_attn_cfg(attn_cfg: Mapping[str, Any], d_model: int, *, used: bool) -> None:
    """Raise unless these entries are valid and, where `used`, an attention layer has them all."""
    _check_entries("attn_cfg", attn_cfg, _ATTENTION)
    if not used:
        return
    if "num_heads" not in attn_cfg:
        raise ValueError("attn_cfg must give num_heads where attn_layer_idx names a layer")
    heads = attn_cfg["num_heads"]
    kv_heads, head_dim = attn_cfg.get("num_heads_kv") or heads, attn_cfg.get("head_dim")
    if heads % kv_heads:
        raise ValueError(
            f"attn_cfg.num_heads must be a multiple of num_heads_kv = {kv_heads}, got {heads}"
        )
    if head_dim is None and d_model % heads:
        raise ValueError(
            f"attn_cfg.num_heads must divide d_model = {d_model} unless head_dim is given, "
            f"got {heads}"
        )
    head_dim, rotary_dim = head_dim or d_model // heads, attn_cfg.get("rotary_emb_dim") or 0
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"attn_cfg.rotary_emb_dim must be even and at most the heads' width {head_dim}, "
            f"got {rotary_dim}"
        )


def check_initializer_cfg(initializer_cfg: Mapping[str, Any]) -> None:
    """Raise unless these entries are valid."""
    _check_entries("initializer_cfg", initializer_cfg, _INITIALIZER)


def _check_entries(field: str, entries: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    unknown = sorted(str(name) for name in entries.keys() - checks.keys())
    if unknown:
        raise ValueError(f"{field} has no entries {unknown}; it has {sorted(checks)}")
    for name, value in entries.items():
        checks[name](f"{field}.{name}", value)
