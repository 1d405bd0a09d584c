"""Config of LC-PLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from brickwork.assemblies.config import Config, check_number, check_size, check_token_id
from brickwork.kernels.checks import check_flag, check_one_of

# mamba-ssm's names: ours.
_MAMBA1 = {name: name for name in ("d_state", "d_conv", "expand", "dt_rank", "bias", "conv_bias")}
_MAMBA2 = {name: name for name in _MAMBA1 if name != "dt_rank"} | {
    "headdim": "head_dim",
    "ngroups": "num_groups",
    "dt_limit": "dt_limit",
    "D_has_hdim": "D_has_hdim",
    "norm_before_gate": "norm_before_gate",
}
# These choose a kernel or its tile, and change no result: every backend here chooses its own.
_KERNEL_CHOICES = {"use_fast_path", "use_mem_eff_path", "chunk_size"}
_ATTENTION = {
    "num_heads", "num_heads_kv", "head_dim", "causal", "qkv_proj_bias", "out_proj_bias",
    "rotary_emb_dim", "rotary_emb_base", "rotary_emb_interleaved",
}  # fmt: skip
_INITIALIZER = {"initializer_range", "rescale_prenorm_residual", "n_residuals_per_layer"}


@dataclass(frozen=True, kw_only=True)
class LCPLMConfig(Config):
    """The original's fields. `ssm_cfg` and `attn_cfg` take mamba-ssm's names."""

    model_type: ClassVar[str] = "lc_plm"

    d_model: int = 1536
    d_intermediate: int = 0
    n_layer: int = 48
    vocab_size: int = 33
    ssm_cfg: dict[str, Any] | None = field(default_factory=lambda: {"layer": "Mamba1"})
    layer: str | None = None
    attn_layer_idx: list[int] | None = field(default_factory=list)
    attn_cfg: dict[str, Any] | None = field(default_factory=dict)
    norm_epsilon: float = 1e-5
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    initializer_cfg: dict[str, Any] | None = None
    bidirectional: bool = True
    bidirectional_strategy: Literal["add", "ew_multiply"] = "add"
    bidirectional_weight_tie: bool = True
    tie_embeddings: bool = False
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        check_size(d_model=self.d_model, n_layer=self.n_layer, vocab_size=self.vocab_size)
        check_size(pad_vocab_size_multiple=self.pad_vocab_size_multiple)
        if self.d_intermediate != 0:
            check_size(d_intermediate=self.d_intermediate)
        check_token_id(self.vocab_size, pad_token_id=self.pad_token_id)
        check_number(0, norm_epsilon=self.norm_epsilon)
        for flag in ("rms_norm", "residual_in_fp32", "fused_add_norm", "bidirectional"):
            check_flag(flag, getattr(self, flag))
        for flag in ("bidirectional_weight_tie", "tie_embeddings"):
            check_flag(flag, getattr(self, flag))
        check_one_of("bidirectional_strategy", self.bidirectional_strategy, ("add", "ew_multiply"))
        check_one_of("layer", self.mixer_name(), ("Mamba1", "Mamba2"))
        for i in self.attn_layer_idx or []:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.n_layer:
                raise ValueError(f"attn_layer_idx must be in [0, {self.n_layer}), got {i!r}")
        if self.attn_layer_idx and "num_heads" not in (self.attn_cfg or {}):
            raise ValueError("attn_cfg must give num_heads where attn_layer_idx names a layer")
        _check_known("attn_cfg", self.attn_cfg or {}, _ATTENTION)
        _check_known("initializer_cfg", self.initializer_cfg or {}, _INITIALIZER)
        self.mixer_options()

    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: `vocab_size` rounded up."""
        return math.ceil(self.vocab_size / self.pad_vocab_size_multiple) * (
            self.pad_vocab_size_multiple
        )

    def hidden_dim(self) -> int:
        """Width of the MLP: `d_intermediate` rounded up to a multiple of 128."""
        return math.ceil(self.d_intermediate / 128) * 128

    def norm_options(self) -> dict[str, Any]:
        """The keyword arguments of the AddNorm blocks; fused or not, they compute the same."""
        kind = "rms" if self.rms_norm else "layer"
        fp32 = self.residual_in_fp32
        return {"kind": kind, "eps": self.norm_epsilon, "residual_in_fp32": fp32}

    def mixer_name(self) -> str:
        """`"Mamba1"` or `"Mamba2"`."""
        return (self.ssm_cfg or {}).get("layer") or self.layer or "Mamba1"

    def mixer_options(self) -> dict[str, Any]:
        """The keyword arguments of the Mamba block."""
        given = self.ssm_cfg or {}
        names = _MAMBA1 if self.mixer_name() == "Mamba1" else _MAMBA2
        _check_known("ssm_cfg", given, names.keys() | _KERNEL_CHOICES | {"layer"})
        options = {names[k]: v for k, v in given.items() if k in names}
        if options.get("dt_rank") == "auto":
            del options["dt_rank"]
        return options

    def bimamba_options(self) -> dict[str, Any]:
        """The keyword arguments of the BiMamba block, less `mixer`."""
        combine = "add" if self.bidirectional_strategy == "add" else "multiply"
        tie = self.bidirectional_weight_tie
        return {"combine": combine, "tie": tie, **self.mixer_options()}

    def initializer(self) -> tuple[float, float]:
        """Standard deviation of the embedding, and the factor on the weights that end a branch."""
        given = self.initializer_cfg or {}
        residuals = given.get("n_residuals_per_layer", 2 if self.d_intermediate else 1)
        scaled = given.get("rescale_prenorm_residual", True)
        scale = 1 / math.sqrt(residuals * self.n_layer) if scaled else 1.0
        return given.get("initializer_range", 0.02), scale

    def attention_options(self) -> dict[str, Any]:
        """The keyword arguments of the attention block, less `rope`."""
        given = self.attn_cfg or {}
        return {
            "num_heads": given["num_heads"],
            "num_kv_heads": given.get("num_heads_kv"),
            "head_dim": given.get("head_dim"),
            "causal": given.get("causal", False),
            "bias": given.get("qkv_proj_bias", True),
            "out_bias": given.get("out_proj_bias", True),
        }

    def rope_options(self) -> dict[str, Any] | None:
        """The arguments of the attention layers' RoPE block, or None without one."""
        given = self.attn_cfg or {}
        if not given.get("rotary_emb_dim", 0):
            return None
        return {
            "head_dim": given.get("head_dim") or self.d_model // given["num_heads"],
            "rotary_dim": given["rotary_emb_dim"],
            "base": given.get("rotary_emb_base", 10000.0),
            "layout": "interleaved" if given.get("rotary_emb_interleaved", False) else "half",
        }


def _check_known(name: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(f"{name} has no entries {unknown}; it has {sorted(known)}")
