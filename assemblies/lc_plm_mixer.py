"""What mixes the tokens in a layer of LC-PLM."""

from __future__ import annotations

from torch import nn

from brickwork.assemblies.lc_plm_config import LCPLMConfig
from brickwork.blocks.attention import Attention
from brickwork.blocks.bimamba import BiMamba
from brickwork.blocks.mamba1 import Mamba1
from brickwork.blocks.mamba2 import Mamba2
from brickwork.blocks.rope import RoPE


def mixer(config: LCPLMConfig, index: int) -> nn.Module:
    """Attention where the config wants it, else Mamba in one direction or both."""
    if index in (config.attn_layer_idx or []):
        rope = RoPE(**options) if (options := config.rope_options()) else None
        return Attention(config.d_model, rope=rope, **config.attention_options())
    mamba = Mamba1 if config.mixer_name() == "Mamba1" else Mamba2
    if not config.bidirectional:
        return mamba(config.d_model, **config.mixer_options())
    return BiMamba(config.d_model, mixer=mamba, **config.bimamba_options())
