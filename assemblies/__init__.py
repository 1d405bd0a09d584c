"""Reference models assembled from the blocks."""

from brickwork.assemblies.lc_plm import LCPLM as LCPLM
from brickwork.assemblies.lc_plm_config import LCPLMConfig as LCPLMConfig
from brickwork.assemblies.mini_llada import MiniLLaDA as MiniLLaDA
from brickwork.assemblies.mini_llada_config import MiniLLaDAConfig as MiniLLaDAConfig
from brickwork.assemblies.rish import Rish as Rish
from brickwork.assemblies.rish_config import RishConfig as RishConfig
