"""The libraries that brickwork is measured against, as runnable on a CPU."""

from __future__ import annotations

import copy
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brickwork.assemblies import Rish
from brickwork.blocks import BiMamba, Mamba1, Mamba2, MoE, MoEOutput


def mamba_ssm(module: str) -> Any:
    """A module of mamba-ssm, with empty modules for its compiled parts, absent on a CPU.

    The package is installed, or in the folder that `BRICKWORK_VENDOR` names (`make bench`).
    """
    vendor = os.environ.get("BRICKWORK_VENDOR")
    if vendor and str(Path(vendor).resolve()) not in sys.path:
        sys.path.append(str(Path(vendor).resolve()))
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        sys.modules.setdefault(name, types.ModuleType(name))
    return pytest.importorskip(f"mamba_ssm.{module}", exc_type=ImportError)


def transformers_mamba_mixer(ours: Mamba1) -> nn.Module:
    """transformers' Mamba mixer with the parameters of one of our own."""
    config_module = importlib.import_module("transformers.models.mamba.configuration_mamba")
    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    config = config_module.MambaConfig(
        hidden_size=ours.dim,
        state_size=ours.A_log.shape[1],
        conv_kernel=ours.conv1d.weight.shape[-1],
        expand=ours.A_log.shape[0] // ours.dim,
        time_step_rank=ours.dt_proj.weight.shape[1],
        num_hidden_layers=1,
    )
    theirs = module.MambaMixer(config, 0)
    projections = {"in_proj.weight": ours.in_proj.weight, "out_proj.weight": ours.out_proj.weight}
    theirs.load_state_dict(ours.state_dict() | projections)  # maybe borrowed, so not in the former
    return theirs


def transformers_mamba2_mixer(ours: Mamba2) -> nn.Module:
    """transformers' Mamba-2 mixer with the parameters of one of our own."""
    config_module = importlib.import_module("transformers.models.mamba2.configuration_mamba2")
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    inner = ours.out_proj.in_features
    config = config_module.Mamba2Config(
        hidden_size=ours.dim,
        state_size=ours.d_state,
        conv_kernel=ours.conv1d.weight.shape[-1],
        expand=inner // ours.dim,
        head_dim=ours.head_dim,
        num_heads=inner // ours.head_dim,
        n_groups=ours.num_groups,
        num_hidden_layers=1,
    )
    theirs = module.Mamba2Mixer(config, 0)
    theirs.load_state_dict(ours.state_dict())
    return theirs


def mambapy_block(ours: Mamba1) -> nn.Module:
    """mambapy's Mamba block with the parameters of one of our own."""
    mambapy = pytest.importorskip("mambapy.mamba")
    config = mambapy.MambaConfig(
        d_model=ours.dim,
        n_layers=1,
        d_state=ours.d_state,
        d_conv=ours.conv1d.weight.shape[-1],
        expand_factor=ours.A_log.shape[0] // ours.dim,
    )
    theirs = mambapy.MambaBlock(config)
    theirs.load_state_dict(ours.state_dict())
    return theirs


class TwoMambasWithFlips(nn.Module):
    """A BiMamba as wrappers write it: two whole mixers, the second on a flipped copy."""

    def __init__(self, ours: BiMamba) -> None:
        super().__init__()
        self.fwd, self.rev = ours.mamba_fwd, ours.mamba_rev

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.fwd(x) + self.rev(x.flip(1)).flip(1)


class TwoTransformersMambas(nn.Module):
    """The same wrapper around transformers' mixer."""

    def __init__(self, ours: BiMamba) -> None:
        super().__init__()
        self.fwd = transformers_mamba_mixer(ours.mamba_fwd)
        self.rev = transformers_mamba_mixer(ours.mamba_rev)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.fwd(x) + self.rev(x.flip(1)).flip(1)


def mambapy_scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """mambapy's parallel scan, on the arguments of `selective_scan` after softplus."""
    pscan = pytest.importorskip("mambapy.pscan").pscan
    decay = torch.exp(delta[..., None] * A)
    states = pscan(decay, (delta * x)[..., None] * B[:, :, None, :])
    return (states @ C[..., None])[..., 0] + D * x


def transformers_flex_olmo(ours: Rish) -> nn.Module:
    """transformers' FlexOlmo with the parameters of one of our Rish models."""
    config_module = importlib.import_module("transformers.models.flex_olmo")
    config = ours.config
    theirs = config_module.FlexOlmoForCausalLM(
        config_module.FlexOlmoConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    state = {k: v for k, v in ours.original_state_dict().items() if ".experts." not in k}
    for i, layer in enumerate(ours.layers):
        name = f"model.layers.{i}.mlp.experts."
        state |= {f"{name}gate_up_proj": layer.moe.gate_up, f"{name}down_proj": layer.moe.down}
    theirs.load_state_dict(state)
    return theirs.eval()


def flex_olmo(ours: Rish) -> nn.Module:
    """transformers' FlexOlmo, whose experts run by `grouped_mm`, with the parameters of ours."""
    transformers = pytest.importorskip("transformers")
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_experts")
    kept += ("num_attention_heads", "num_experts_per_tok", "norm_topk_prob", "rms_norm_eps")
    kept += ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    config = transformers.FlexOlmoConfig(
        **{name: getattr(ours.config, name) for name in kept},
        rope_parameters={"rope_type": "default", "rope_theta": ours.config.rope_theta},
    )
    theirs = transformers.FlexOlmoForCausalLM._from_config(
        config, experts_implementation="grouped_mm", attn_implementation="sdpa"
    )
    state = {n: t for n, t in ours.original_state_dict().items() if ".experts." not in n}
    for i, layer in enumerate(ours.layers):
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = layer.moe.gate_up.detach()
        state[f"model.layers.{i}.mlp.experts.down_proj"] = layer.moe.down.detach()
    theirs.load_state_dict(state)
    return theirs.train(ours.training)


class LoopOverExperts(nn.Module):
    """A MoE as the originals have it: three linear layers an expert, `index_add_` of what each
    makes of its tokens."""

    def __init__(self, ours: MoE) -> None:
        super().__init__()
        self.router, self.top_k, self.num_experts = ours.router, ours.top_k, ours.num_experts
        self.experts = nn.ModuleList()
        for gate_up, down in zip(ours.gate_up.detach(), ours.down.detach()):
            layers = nn.ModuleList()
            for weight in (*gate_up.chunk(2), down):
                layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.weight.data.copy_(weight)
                layers.append(layer)
            self.experts.append(layers)

    def forward(self, x: Tensor, **_: Any) -> MoEOutput:
        rows = x.reshape(-1, x.shape[-1])
        logits = self.router(rows)
        weights, indices = logits.softmax(-1).topk(self.top_k)
        y = torch.zeros_like(rows)
        chosen = nn.functional.one_hot(indices, self.num_experts).permute(2, 1, 0)
        for (gate, up, down), mine in zip(self.experts, chosen):
            k, token = torch.where(mine)
            row = rows[token]
            out = down(nn.functional.silu(gate(row)) * up(row)) * weights[token, k, None]
            y.index_add_(0, token, out)
        shape = x.shape[:-1]
        return MoEOutput(
            y.view(x.shape), logits.view(*shape, -1), indices.view(*shape, -1), weights
        )


def loop_over_experts(ours: Rish) -> nn.Module:
    """Our own model with each MoE as `LoopOverExperts`."""
    theirs = copy.deepcopy(ours)
    for layer in theirs.layers:
        layer.moe = LoopOverExperts(layer.moe)
    return theirs
