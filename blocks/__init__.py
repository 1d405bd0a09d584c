"""Building blocks of sequence models."""

from brickwork.blocks.norm import AddNorm as AddNorm
from brickwork.blocks.norm import RMSNorm as RMSNorm
from brickwork.blocks.residual import Residual as Residual
