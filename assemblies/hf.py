"""The assemblies in transformers, and our experts under its mixture-of-experts models.

Importing this module registers the assemblies: then `AutoConfig`, `AutoModel`,
`AutoModelForCausalLM` (Rish) and `AutoModelForMaskedLM` (MiniLLaDA, LC-PLM) load their folders by
the `model_type` in `config.json`, and no code comes from the folder. Needs
`pip install 'brickwork[hf]'`.

>>> from transformers import AutoModelForMaskedLM
>>> config = AutoConfig.for_model("lc_plm", d_model=16, n_layer=1)
>>> type(AutoModelForMaskedLM.from_config(config)).__name__
'LCPLMForMaskedLM'
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from brickwork.assemblies.hf_config import LCPLMHFConfig as LCPLMHFConfig
from brickwork.assemblies.hf_config import MiniLLaDAHFConfig as MiniLLaDAHFConfig
from brickwork.assemblies.hf_config import RishHFConfig as RishHFConfig
from brickwork.assemblies.hf_conversion import register_conversions
from brickwork.assemblies.hf_experts import register_experts as register_experts
from brickwork.assemblies.hf_lc_plm import LCPLMForMaskedLM as LCPLMForMaskedLM
from brickwork.assemblies.hf_lc_plm import LCPLMModel as LCPLMModel
from brickwork.assemblies.hf_mini_llada import MiniLLaDAForMaskedLM as MiniLLaDAForMaskedLM
from brickwork.assemblies.hf_mini_llada import MiniLLaDAModel as MiniLLaDAModel
from brickwork.assemblies.hf_rish import RishForCausalLM as RishForCausalLM
from brickwork.assemblies.hf_rish import RishModel as RishModel
from brickwork.assemblies.hf_tokenizer import protein_tokenizer as protein_tokenizer

for _config, _model, _auto, _head in (
    (RishHFConfig, RishModel, AutoModelForCausalLM, RishForCausalLM),
    (MiniLLaDAHFConfig, MiniLLaDAModel, AutoModelForMaskedLM, MiniLLaDAForMaskedLM),
    (LCPLMHFConfig, LCPLMModel, AutoModelForMaskedLM, LCPLMForMaskedLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    _auto.register(_config, _head, exist_ok=True)
register_conversions()
