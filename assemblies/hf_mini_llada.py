"""MiniLLaDA for transformers: a backbone, and a masked-diffusion language model."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import can_return_tuple

from brickwork.assemblies.hf_config import MiniLLaDAHFConfig
from brickwork.assemblies.hf_model import AssemblyModel
from brickwork.assemblies.inputs import check_mask, embed
from brickwork.assemblies.mini_llada import MiniLLaDA
from brickwork.assemblies.targets import noised
from brickwork.blocks.masked_diffusion import MaskedDiffusion, Noise
from brickwork.blocks.norm import RMSNorm


class MiniLLaDAPreTrainedModel(AssemblyModel):
    """What the two share."""

    config_class = MiniLLaDAHFConfig
    base_model_prefix = "network"
    assembly_class = MiniLLaDA
    embedding_name = "embed"
    head_name = "head"
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up", "down")


class MiniLLaDAModel(MiniLLaDAPreTrainedModel):
    """MiniLLaDA without its head, `AutoModel`."""

    _keys_to_ignore_on_load_unexpected = [r"^head\."]  # noqa: RUF012

    embed: nn.Embedding
    norm: RMSNorm

    def __init__(self, config: MiniLLaDAHFConfig) -> None:
        super().__init__(config)
        self.lay()
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
        """The hidden state of every token.

        Arguments:
            input_ids: (B, T), or inputs_embeds (B, T, C).
            attention_mask: (B, T), 1 for real tokens.
        """
        self.no_attentions(output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = embed(self.embed, input_ids, inputs_embeds)
        mask = check_mask("attention_mask", attention_mask, x)
        states = [x]
        for i, layer in enumerate(self.layers):

            def call(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return layer(x, mask=mask, seq_ids=None)

            x = self.run_layer(i, call, x)
            states.append(x)
        states[-1] = x = self.norm(x)
        hidden_states = tuple(states) if output_hidden_states else None
        return BaseModelOutput(last_hidden_state=x, hidden_states=hidden_states)


class MiniLLaDAForMaskedLM(MiniLLaDAPreTrainedModel):
    """MiniLLaDA, `AutoModelForMaskedLM`. Its `diffusion` samples.

    >>> import torch
    >>> config = MiniLLaDAHFConfig(vocab_size=9, dim=8, depth=1, head=2, intermediate_size=8)
    >>> model, ids = MiniLLaDAForMaskedLM(config), torch.tensor([[1, 2, 3, 5]])
    >>> model(ids).logits.shape, model(ids, labels=ids).loss.isfinite().item()
    (torch.Size([1, 4, 9]), True)
    """

    # The loss is a mean over rows, whatever their lengths: a trainer averages it over its batches.
    accepts_loss_kwargs = False

    def __init__(self, config: MiniLLaDAHFConfig) -> None:
        super().__init__(config)
        self.network = MiniLLaDAModel(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.diffusion = MaskedDiffusion(
            mask_token_id=config.mask_token_id,
            eps=config.diffusion_eps,
            weighting=config.weighting,
        )
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
        noise: Noise | None = None,
    ) -> MaskedLMOutput:
        """Logits of `input_ids`; with `labels`, of their noised copy, and its loss.

        Arguments:
            labels: (B, T), input_ids where a token may be masked and is to be predicted, else -100:
                tokens are masked here, not by a collator.
            noise: the masked copy to score, instead of a new draw.
        """
        noise, _ = noised(
            self.diffusion,
            input_ids,
            labels,
            attention_mask=attention_mask,
            seq_ids=None,
            noise=noise,
            generator=None,
        )
        ids = input_ids if noise is None else noise.noisy_ids
        out = self.network(
            input_ids=ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.head(out.last_hidden_state)
        loss = None
        if noise is not None and input_ids is not None:
            loss = self.diffusion.loss(logits, input_ids, noise)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
