"""Rish for transformers: a backbone, and a causal language model that generates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import can_return_tuple

from brickwork.assemblies.hf_cache import CACHE_NAME, LayerCache, one_cache
from brickwork.assemblies.hf_config import RishHFConfig
from brickwork.assemblies.hf_model import AssemblyModel, summed_loss
from brickwork.assemblies.inputs import check_mask, embed
from brickwork.assemblies.rish import Rish
from brickwork.assemblies.targets import next_token_labels
from brickwork.blocks.moe_losses import load_balancing_loss
from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope import RoPE


class RishPreTrainedModel(AssemblyModel):
    """What the two share."""

    config_class = RishHFConfig
    base_model_prefix = "model"
    assembly_class = Rish
    embedding_name = "embed_tokens"
    head_name = "lm_head"
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "router")


class RishModel(RishPreTrainedModel):
    """Rish without its head, `AutoModel`."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    rope: RoPE
    embed_tokens: nn.Embedding
    norm: RMSNorm

    def __init__(self, config: RishHFConfig) -> None:
        super().__init__(config)
        self.lay()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        past_key_values: Any = None,
    ) -> MoeModelOutputWithPast:
        """The hidden state of every token.

        Arguments:
            input_ids: (B, T), or inputs_embeds (B, T, C).
            attention_mask: (B, S), 1 for real tokens, of those in the cache and the new ones; or
                (B, 1, T, S), which keys a query sees, bool or added to the scores.
            position_ids: (B, T); default: how many real tokens stand before in the row.
            cache: a cache of transformers', or under its older name past_key_values.
            use_cache: return a cache; default: the config's value, and False in training.
            output_router_logits: return the raw logits (B · T, E) of every layer.
        """
        self.no_attentions(output_attentions)
        cache = one_cache(cache, past_key_values)
        if self.recomputes() and cache is not None:
            raise ValueError("cache must be None while layers are recomputed in the backward pass")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None and not self.recomputes():
            cache = DynamicCache(config=self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits

        x = embed(self.embed_tokens, input_ids, inputs_embeds)
        past = 0 if cache is None else cache.get_seq_length()
        real, rules = _split_mask(attention_mask, x, past)
        new = None if real is None else real[:, real.shape[1] - x.shape[1] :]
        where = _positions(real, past, x)
        if position_ids is None:
            position_ids = where
        elif (
            self.rope.length_dependent
            and cache is not None
            and not torch.equal(*torch.broadcast_tensors(where, position_ids))
        ):
            raise ValueError(
                "position_ids must count the real tokens where a cache holds keys that a RoPE "
                f"of type {self.rope.scaling} turns anew at every length"
            )
        mask = tuple(m for m in (new, rules) if m is not None) or None
        states, router_logits = [x], []
        for i, layer in enumerate(self.layers):
            held = None if cache is None else LayerCache(cache, i, real)

            def call(x: Tensor, layer: nn.Module = layer, held: Any = held) -> Any:
                y, out = layer(x, None, mask=mask, positions=position_ids, seq_ids=None, cache=held)
                return y, out.router_logits

            x, logits = self.run_layer(i, call, x)
            router_logits.append(logits.flatten(0, 1))
            states.append(x)
        states[-1] = x = self.norm(x)
        return MoeModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=tuple(states) if output_hidden_states else None,
            router_logits=tuple(router_logits) if output_router_logits else None,
            **{CACHE_NAME: cache if use_cache else None},
        )


class RishForCausalLM(RishPreTrainedModel, GenerationMixin):
    """Rish, `AutoModelForCausalLM`.

    >>> config = RishHFConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    ...     eos_token_id=None)
    >>> model = RishForCausalLM(config).eval()
    >>> ids = torch.tensor([[1, 2]])
    >>> model.generate(ids, max_new_tokens=3, do_sample=False).shape
    torch.Size([1, 5])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: RishHFConfig) -> None:
        super().__init__(config)
        self.model = RishModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: Any = None,
    ) -> MoeCausalLMOutputWithPast:
        """As `RishModel`, and:

        Arguments:
            labels: (B, T); the token at t is predicted at t - 1, -100 is not scored.
            logits_to_keep: how many of the last logits to return, 0 for all, or which, as a tensor
                of indices; the loss is always of all labels.
            num_items_in_batch: what the loss is divided by instead of its number of labels: how
                many there are in all the batches of an optimizer's step. The balancing loss, a mean
                over this batch, counts by this batch's share of them.
        """
        config = self.config
        if output_router_logits is None:
            output_router_logits = config.output_router_logits
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_router_logits=True,
            return_dict=True,
        )
        hidden = out.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden if labels is not None else hidden[:, kept])
        mask = None
        if attention_mask is not None and attention_mask.ndim == 2:
            mask = check_mask("attention_mask", attention_mask[:, -hidden.shape[1] :], hidden)
        loss = aux_loss = None
        if labels is not None or output_router_logits:
            aux_loss = load_balancing_loss(
                out.router_logits,
                top_k=config.num_experts_per_tok,
                mask=mask,
                balance=config.balance,
            )
        if labels is not None and aux_loss is not None:
            targets = next_token_labels(labels.to(logits.device), mask=mask)
            loss, share = summed_loss(logits, targets, num_items_in_batch)
            if config.router_aux_loss_coef:
                loss = loss + config.router_aux_loss_coef * share * aux_loss.to(loss.device)
            logits = logits[:, kept]
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=out.hidden_states,
            router_logits=out.router_logits if output_router_logits else None,
            **{CACHE_NAME: out.get(CACHE_NAME)},
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers does; a cache whose keys a length-dependent RoPE would now turn by other
        angles starts anew, so that cached ids are the uncached ones.

        Raises:
            ValueError: it would have to, and `input_ids` are not all tokens so far.
        """
        # The names of these arguments are what transformers looks for.
        cache, mask = kwargs.get(CACHE_NAME), kwargs.get("attention_mask")
        rope = self.model.rope
        past = 0 if cache is None or not rope.length_dependent else int(cache.get_seq_length())
        if cache is not None and past:
            new_only = kwargs.get("next_sequence_length") is None  # of a chunk, or by the caller
            total = input_ids.shape[1] + (past if new_only else 0)
            total = total if mask is None else mask.shape[1]
            real = input_ids.new_ones(1, total) if mask is None else mask
            now, then = real.sum(1), real[:, :past].sum(1)
            if not torch.equal(*(rope.inv_freq(real.device, n) for n in (now, then))):
                several = total > past + 1 and not kwargs.get("is_first_iteration")
                if input_ids.shape[1] < total or inputs_embeds is not None or several:
                    raise ValueError(
                        f"a RoPE of type {rope.scaling} turns the {past} tokens in the cache anew "
                        f"at {total} tokens: pass all input_ids, no chunks of them and no "
                        "inputs_embeds, and decode one token at a time"
                    )
                cache.reset()
                if int(cache.get_seq_length()):  # transformers up to 5.17 only fills it with zeros
                    cache.crop(-past)
                kwargs["next_sequence_length"] = None
        return super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )

    def create_masks_for_generate(self, **kwargs: Any) -> Any:
        """A mask of four axes for a static cache, so that its shape is one for all steps; not where
        the padding says at which positions the tokens in the cache stand."""
        if self.model.rope.length_dependent:
            return kwargs["attention_mask"]
        return create_masks_for_generate(**kwargs)


def _split_mask(
    mask: Tensor | None, x: Tensor, past: int | Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What is real (B, past + T), bool, and any other rule (B, 1, T, S)."""
    if mask is None or mask.ndim == 4:
        return None, mask
    total = x.shape[1] + int(past)
    if mask.ndim != 2 or mask.shape != (x.shape[0], total):
        raise ValueError(
            f"attention_mask must have shape (B, S) = {(x.shape[0], total)}, of all tokens so far, "
            f"or (B, 1, T, S), got {tuple(mask.shape)}"
        )
    return check_mask("attention_mask", mask, x.new_empty(mask.shape)), None


def _positions(real: Tensor | None, past: int | Tensor, x: Tensor) -> Tensor:
    """(B or 1, T), how many real tokens stand before."""
    if real is None:
        return (torch.arange(x.shape[1], device=x.device) + past)[None]
    return (real.long().cumsum(1) - 1).clamp(min=0)[:, real.shape[1] - x.shape[1] :]
