"""The libraries that bench/gpu.py holds our ops against, each loaded when it is its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Run = Callable[..., Any]


def expert_loop(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Any:
    """One expert after the other, as the original does it."""
    y = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, choice = torch.where(indices == e)
        gate, up = F.linear(x[token], gate_up[e]).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, down[e]) * weights[token, choice, None].to(x.dtype)
        y = y.index_add(0, token, out)
    return y


def grouped_experts() -> Run:
    from transformers.models.flex_olmo import configuration_flex_olmo, modeling_flex_olmo

    def run(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Any:
        config = configuration_flex_olmo.FlexOlmoConfig(
            hidden_size=x.shape[1],
            intermediate_size=down.shape[2],
            num_experts=down.shape[0],
            num_experts_per_tok=indices.shape[1],
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            module = modeling_flex_olmo.FlexOlmoExperts(config)
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(module, parameters, (x, indices, weights.to(x.dtype)))

    return run


def liger_rms_norm() -> Run:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "gemma", False)


def liger_add_norm() -> Run:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-5, 0.0, "gemma", False)


def liger_swiglu() -> Run:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


def liger_cross_entropy() -> Run:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda x, w, labels: LigerFusedLinearCrossEntropyFunction.apply(x, w, labels)


def quack_norm(name: str, add: bool = False) -> Callable[[], Run]:
    def load() -> Run:
        norm = getattr(__import__("quack"), name)
        if add:
            return lambda x, r, w: norm(x, w, residual=r, eps=1e-5)
        return lambda x, w: norm(x, w, eps=1e-6)

    return load


def fla_norm() -> Run:
    from fla.modules.layernorm import rms_norm as fused

    return lambda x, w: fused(x, w, None, eps=1e-6)


def vendor_conv() -> Run:
    from causal_conv1d import causal_conv1d_fn

    return lambda x, w, b: causal_conv1d_fn(x.mT, w, b, activation="silu").mT


def vendor_scan() -> Run:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def run(x: Tensor, d: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, z: Tensor) -> Any:
        to = [t.mT.contiguous() for t in (x, d, b, c, z)]
        return selective_scan_fn(*to[:2], A, *to[2:4], D, to[4], None, True).mT

    return run


def vendor_ssd() -> Run:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return lambda x, d, A, b, c, D: mamba_chunk_scan_combined(
        x, d, A, b, c, 256, D=D, dt_softplus=True
    )
