"""Building blocks of sequence models."""

from brickwork.blocks.norm import AddNorm as AddNorm
from brickwork.blocks.norm import RMSNorm as RMSNorm
