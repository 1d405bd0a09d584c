"""Building blocks of sequence models."""

from brickwork.blocks.attention import Attention as Attention
from brickwork.blocks.bimamba import BiMamba as BiMamba
from brickwork.blocks.block_kv_cache import BlockKVCache as BlockKVCache
from brickwork.blocks.kv_cache import KVCache as KVCache
from brickwork.blocks.kv_cache import StaticKVCache as StaticKVCache
from brickwork.blocks.mamba1 import Mamba1 as Mamba1
from brickwork.blocks.mamba2 import Mamba2 as Mamba2
from brickwork.blocks.mamba_mixer import MambaState as MambaState
from brickwork.blocks.masked_diffusion import MaskedDiffusion as MaskedDiffusion
from brickwork.blocks.masked_diffusion import Noise as Noise
from brickwork.blocks.moe import MoE as MoE
from brickwork.blocks.moe import MoEOutput as MoEOutput
from brickwork.blocks.moe import load_balancing_loss as load_balancing_loss
from brickwork.blocks.moe import router_z_loss as router_z_loss
from brickwork.blocks.norm import AddNorm as AddNorm
from brickwork.blocks.norm import RMSNorm as RMSNorm
from brickwork.blocks.packing import Collator as Collator
from brickwork.blocks.packing import SequenceBatch as SequenceBatch
from brickwork.blocks.packing import pack as pack
from brickwork.blocks.packing import pad as pad
from brickwork.blocks.param_groups import decay_parameter_groups as decay_parameter_groups
from brickwork.blocks.residual import Residual as Residual
from brickwork.blocks.rope import RoPE as RoPE
from brickwork.blocks.swiglu import SwiGLU as SwiGLU
