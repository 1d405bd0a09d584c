"""Config of LC-PLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from brickwork.assemblies.config import (
    Config,
    check_dict,
    check_number,
    check_size,
    check_token_id,
    given,
)
from brickwork.assemblies.lc_plm_sections import (
    KERNEL_CHOICES,
    MIXERS,
    check_attn_cfg,
    check_initializer_cfg,
    check_ssm_cfg,
)
from brickwork.kernels.checks import check_flag, check_integer, check_one_of

# Where mamba-ssm's name is not ours.
_OUR_NAMES = {"headdim": "head_dim", "ngroups": "num_groups"}


@dataclass(frozen=True, kw_only=True)
class LCPLMConfig(Config):
    """The original's fields. `ssm_cfg` and `attn_cfg` take mamba-ssm's names."""

    model_type: ClassVar[str] = "lc_plm"

    d_model: int = 1536
    d_intermediate: int = 0
    n_layer: int = 48
    vocab_size: int = 33
    ssm_cfg: dict[str, Any] | None = field(default_factory=dict)
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
        super().__post_init__()
        check_size(d_model=self.d_model, n_layer=self.n_layer, vocab_size=self.vocab_size)
        check_size(pad_vocab_size_multiple=self.pad_vocab_size_multiple)
        check_integer("d_intermediate", self.d_intermediate, least=0)
        check_token_id(self.vocab_size, **given(pad_token_id=self.pad_token_id))
        check_number(0, norm_epsilon=self.norm_epsilon)
        for flag in ("rms_norm", "residual_in_fp32", "fused_add_norm", "bidirectional"):
            check_flag(flag, getattr(self, flag))
        for flag in ("bidirectional_weight_tie", "tie_embeddings"):
            check_flag(flag, getattr(self, flag))
        check_one_of("bidirectional_strategy", self.bidirectional_strategy, ("add", "ew_multiply"))
        for name in ("ssm_cfg", "attn_cfg", "initializer_cfg"):
            check_dict(name, getattr(self, name))
        check_one_of("layer", self.layer, (None, *MIXERS))
        check_one_of("ssm_cfg.layer", self.mixer_name(), MIXERS)
        check_one_of("layer", self.layer, (None, self.mixer_name()))
        check_ssm_cfg(self.ssm_cfg or {}, self.mixer_name(), self.d_model)
        self._check_attn_layer_idx()
        check_attn_cfg(self.attn_cfg or {}, self.d_model, used=bool(self.attn_layer_idx))
        check_initializer_cfg(self.initializer_cfg or {})

    def _check_attn_layer_idx(self) -> None:
        layers = [] if self.attn_layer_idx is None else self.attn_layer_idx
        if not isinstance(layers, list):
            raise ValueError(f"attn_layer_idx must be a list of integers, got {layers!r}")
        for i in layers:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.n_layer:
                raise ValueError(f"attn_layer_idx must be in [0, {self.n_layer}), got {i!r}")

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
        entries = self.ssm_cfg or {}
        passed_over = KERNEL_CHOICES.keys() | {"layer"}
        if entries.get("dt_rank") == "auto":
            passed_over |= {"dt_rank"}
        return {_OUR_NAMES.get(k, k): v for k, v in entries.items() if k not in passed_over}

    def bimamba_options(self) -> dict[str, Any]:
        """The keyword arguments of the BiMamba block, less `mixer`."""
        combine = "add" if self.bidirectional_strategy == "add" else "multiply"
        tie = self.bidirectional_weight_tie
        return {"combine": combine, "tie": tie, **self.mixer_options()}

    def initializer(self) -> tuple[float, float]:
        """Standard deviation of the embedding, and the factor on the weights that end a branch."""
        entries = self.initializer_cfg or {}
        residuals = entries.get("n_residuals_per_layer", 2 if self.d_intermediate else 1)
        scaled = entries.get("rescale_prenorm_residual", True)
        scale = 1 / math.sqrt(residuals * self.n_layer) if scaled else 1.0
        return entries.get("initializer_range", 0.02), scale

    def attention_options(self) -> dict[str, Any]:
        """The keyword arguments of the attention block, less `rope`."""
        entries = self.attn_cfg or {}
        return {
            "num_heads": entries["num_heads"],
            "num_kv_heads": entries.get("num_heads_kv"),
            "head_dim": entries.get("head_dim"),
            "causal": entries.get("causal", False),
            "bias": entries.get("qkv_proj_bias", True),
            "out_bias": entries.get("out_proj_bias", True),
        }

    def rope_options(self) -> dict[str, Any] | None:
        """The arguments of the attention layers' RoPE block, or None without one."""
        entries = self.attn_cfg or {}
        if not entries.get("rotary_emb_dim", 0):
            return None
        return {
            "head_dim": entries.get("head_dim") or self.d_model // entries["num_heads"],
            "rotary_dim": entries["rotary_emb_dim"],
            "base": entries.get("rotary_emb_base", 10000.0),
            "layout": "interleaved" if entries.get("rotary_emb_interleaved", False) else "half",
        }
