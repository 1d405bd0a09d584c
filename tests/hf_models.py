"""Small models under transformers, for the tests of the adapter."""

from __future__ import annotations

from typing import Any

import torch

from brickwork.assemblies.hf import (
    LCPLMForMaskedLM,
    LCPLMHFConfig,
    MiniLLaDAForMaskedLM,
    MiniLLaDAHFConfig,
    RishForCausalLM,
    RishHFConfig,
)

KINDS = ("rish", "mini_llada", "lc_plm")


def rish(**fields: Any) -> RishForCausalLM:
    """Four query heads over two key/value heads, six experts of which two are chosen."""
    small = {
        **{"vocab_size": 29, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6},
        **{"num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.5},
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    }
    return RishForCausalLM(RishHFConfig(**(small | fields))).eval()


def mini_llada(**fields: Any) -> MiniLLaDAForMaskedLM:
    """Two heads, two layers."""
    small = {"vocab_size": 29, "dim": 16, "depth": 2, "head": 2, "intermediate_size": 24}
    return MiniLLaDAForMaskedLM(MiniLLaDAHFConfig(**(small | fields))).eval()


def lc_plm(**fields: Any) -> LCPLMForMaskedLM:
    """Two layers of tied Mamba-1."""
    small = {"d_model": 16, "n_layer": 2, "ssm_cfg": {"layer": "Mamba1", "d_state": 4}}
    return LCPLMForMaskedLM(LCPLMHFConfig(**(small | fields))).eval()


def build(kind: str, **fields: Any) -> Any:
    """One of the three."""
    return {"rish": rish, "mini_llada": mini_llada, "lc_plm": lc_plm}[kind](**fields)


def token_ids(*shape: int, vocab: int = 29) -> torch.Tensor:
    """Ids that no model uses for padding or masking."""
    return torch.randint(5, vocab, shape)


def left_padded(*lengths: int) -> dict[str, torch.Tensor]:
    """Rows of these lengths, padded on the left."""
    width = max(lengths)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {
        "input_ids": token_ids(len(lengths), width).masked_fill(~mask, 0),
        "attention_mask": mask.long(),
    }
