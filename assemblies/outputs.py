"""What the forwards of the assemblies return: dataclasses that torch.export takes apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from brickwork.blocks.masked_diffusion import Noise


@dataclass
class MiniLLaDAOutput:
    """`logits` (B, T, V) or None, `loss` () if labels were given, `noise` that the loss is of,
    and `hidden_states`: the embedding, every block's output, the last after the final norm."""

    logits: Tensor | None
    loss: Tensor | None = None
    noise: Noise | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class RishOutput:
    """`logits` (B, T, V) or None, `router_logits`: per layer (B, T, E), `loss` () if labels were
    given, with `aux_loss` () in it, `hidden_states`: the embedding, every block's output, the
    last after the final norm, and `indices`: the experts chosen, per layer (B, T, K)."""

    logits: Tensor | None
    router_logits: tuple[Tensor, ...]
    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    indices: tuple[Tensor, ...] | None = None


@dataclass
class LCPLMOutput:
    """`logits` (B, T, vocab_size) in float32, `last_hidden_state` (B, T, C) after the final norm,
    `loss` () if labels were given, and `hidden_states`: what every block takes, and the last."""

    logits: Tensor
    last_hidden_state: Tensor
    loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


for _output in (MiniLLaDAOutput, RishOutput, LCPLMOutput):
    torch.export.register_dataclass(
        _output, serialized_type_name=f"{_output.__module__}.{_output.__name__}"
    )
