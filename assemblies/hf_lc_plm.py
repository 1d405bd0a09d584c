"""LC-PLM for transformers: a backbone, and a protein language model."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import can_return_tuple

from brickwork.assemblies.hf_config import LCPLMHFConfig
from brickwork.assemblies.hf_model import AssemblyModel, summed_loss
from brickwork.assemblies.inputs import check_mask, embed
from brickwork.assemblies.lc_plm import LCPLM
from brickwork.blocks.mamba_mixer import MambaMixer
from brickwork.blocks.norm import AddNorm


class OneWay(nn.Module):
    """A mixer under the name that checkpoints have for it with both directions and with one."""

    def __init__(self, mixer: MambaMixer) -> None:
        super().__init__()
        self.mamba_fwd = mixer

    def reset_parameters(self) -> None:
        """Draw the mixer anew."""
        self.mamba_fwd.reset_parameters()

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        return self.mamba_fwd(x, **where)


class LCPLMPreTrainedModel(AssemblyModel):
    """What the two share."""

    config_class = LCPLMHFConfig
    base_model_prefix = "backbone"
    assembly_class = LCPLM
    embedding_name = "embedding"
    head_name = "lm_head"
    lora_targets = ("in_proj", "out_proj", "x_proj", "q_proj", "k_proj", "v_proj", "o_proj",
                    "gate_up", "down")  # fmt: skip

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """As transformers does, for `vocab_size` without the rows that only pad it: these come
        anew, up to a multiple of `pad_vocab_size_multiple`."""
        config, resize = self.config, super().resize_token_embeddings
        if pad_to_multiple_of is not None:
            raise ValueError(
                "pad_to_multiple_of must be None: pad_vocab_size_multiple = "
                f"{config.pad_vocab_size_multiple} pads the table, got {pad_to_multiple_of}"
            )
        if new_num_tokens is None:
            backbone: Any = self.base_model
            return backbone.embedding
        multiple = config.pad_vocab_size_multiple
        resize(config.vocab_size, None, mean_resizing)
        table = resize(math.ceil(new_num_tokens / multiple) * multiple, None, mean_resizing)
        config.vocab_size = self.vocab_size = new_num_tokens
        return table


class LCPLMModel(LCPLMPreTrainedModel):
    """LC-PLM without its head, `AutoModel`."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    embedding: nn.Embedding
    norm_f: AddNorm

    def __init__(self, config: LCPLMHFConfig) -> None:
        super().__init__(config)
        self.lay()
        for layer in self.layers:
            if isinstance(layer.mixer, MambaMixer):
                layer.mixer = OneWay(layer.mixer)
        names = [name for name, _ in self.named_parameters()]
        self._keep_in_fp32_modules_strict = [
            wide
            for wide in ("A_log", "D", "dt_bias", "dt_proj.bias")
            if any(name.endswith(f".{wide}") for name in names)
        ]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutput:
        """The hidden state of every residue, 0 at padding.

        Arguments:
            input_ids: (B, T), or inputs_embeds (B, T, C).
            attention_mask: (B, T), 1 for real tokens.
        """
        self.no_attentions(output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        vocab = self.config.vocab_size
        hidden = embed(self.embedding, input_ids, inputs_embeds, vocab_size=vocab)
        if any(p.is_meta for p in self.layers.parameters()) and not hidden.is_meta:
            # A mixer reads parameters of modules that it does not call, whose hooks fetch them.
            raise ValueError(
                "device_map must leave every layer of LCPLMModel on a device, not on the disk"
            )
        mask = check_mask("attention_mask", attention_mask, hidden)
        residual, states = None, [hidden]
        for i, layer in enumerate(self.layers):

            def call(hidden: Tensor, residual: Tensor | None, layer: nn.Module = layer) -> Any:
                return layer(hidden, residual, mask, None)

            hidden, residual = self.run_layer(i, call, hidden, residual)
            if output_hidden_states:
                states.append(residual + hidden)
        hidden, _ = self.norm_f(hidden, residual)
        if mask is not None:
            hidden = hidden.masked_fill(~mask[..., None], 0.0)
        hidden_states = (*states[:-1], hidden) if output_hidden_states else None
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=hidden_states)


class LCPLMForMaskedLM(LCPLMPreTrainedModel):
    """LC-PLM, `AutoModelForMaskedLM`.

    >>> import torch
    >>> model = LCPLMForMaskedLM(LCPLMHFConfig(d_model=16, n_layer=1))
    >>> model(torch.tensor([[0, 4, 5, 32, 2]])).logits.shape
    torch.Size([1, 5, 33])
    """

    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: LCPLMHFConfig) -> None:
        super().__init__(config)
        self.backbone = LCPLMModel(config)
        rows, width = self.backbone.embedding.weight.shape
        self.lm_head = nn.Linear(width, rows, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput:
        """Logits (B, T, vocab_size) in float32; with `labels` (B, T), the mean cross-entropy at the
        same positions where they are not -100, or its sum divided by `num_items_in_batch`."""
        out = self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.lm_head(out.last_hidden_state)[..., : self.config.vocab_size].float()
        loss = None
        if labels is not None:
            mask = check_mask("attention_mask", attention_mask, out.last_hidden_state)
            targets = labels.to(logits.device)
            targets = targets if mask is None else targets.masked_fill(~mask, -100)
            loss, _ = summed_loss(logits, targets, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
