"""RishAI: a causal mixture-of-experts language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from brickwork.assemblies.assembly import Assembly
from brickwork.assemblies.checkpoint import Rename
from brickwork.assemblies.generation import generate
from brickwork.assemblies.head import logits_of, loss_of
from brickwork.assemblies.inputs import check_mask, check_per_layer, embed, padding
from brickwork.assemblies.outputs import RishOutput
from brickwork.assemblies.rish_config import RishConfig
from brickwork.assemblies.targets import next_token_labels
from brickwork.blocks.attention import Attention
from brickwork.blocks.kv_cache import KVCache, StaticKVCache
from brickwork.blocks.linear import Linear
from brickwork.blocks.moe import MoE, MoEOutput
from brickwork.blocks.moe_losses import load_balancing_loss
from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope import RoPE

_EXPERT = "model.layers.{i}.mlp.experts.{e}."
_GATE_UP = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight")


class Block(nn.Module):
    """`x += norm(attention(x)); x += norm(moe(x))`: the norm is on each branch's output."""

    def __init__(self, config: RishConfig, rope: RoPE) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Attention(dim, rope=rope, **config.attention_options())
        self.post_attention_layernorm = RMSNorm(dim, eps=eps)
        self.moe = MoE(dim, **config.moe_options())
        self.post_feedforward_layernorm = RMSNorm(dim, eps=eps)

    def forward(self, x: Tensor, routing: Tensor | None, **where: Any) -> tuple[Tensor, MoEOutput]:
        x = x + self.post_attention_layernorm(self.attention(x, **where))
        out = self.moe(x, routing=routing, mask=padding(where["mask"]))
        return x + self.post_feedforward_layernorm(out.y), out


class Rish(Assembly):
    """Causal language model of post-norm blocks with grouped-query attention and sparse experts.

    >>> import torch
    >>> config = RishConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=2, pad_token_id=None, eos_token_id=None)
    >>> model = Rish(config)
    >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
    torch.Size([1, 5])
    """

    config_class = RishConfig
    config: RishConfig
    table = (
        Rename("layers.{i}.attention.*", "model.layers.{i}.self_attn.*"),
        Rename("layers.{i}.moe.router.*", "model.layers.{i}.mlp.gate.*"),
        Rename("layers.{i}.moe.gate_up", _GATE_UP),
        Rename("layers.{i}.moe.down", _EXPERT + "down_proj.weight"),
        Rename("lm_head.*", "lm_head.*"),
        Rename("*", "model.*"),
    )

    def __init__(self, config: RishConfig) -> None:
        super().__init__()
        self.config = config
        dim, vocab = config.hidden_size, config.vocab_size
        self.rope = RoPE(**config.rope_options())
        self.embed_tokens = nn.Embedding(vocab, dim)
        blocks = (Block(config, self.rope) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(dim, vocab, bias=False)
        self.reset_parameters()

    def aliases(self) -> dict[str, str]:
        tied = {} if self.lm_head else {"lm_head.weight": "model.embed_tokens.weight"}
        return super().aliases() | tied

    def reset_parameters(self) -> None:
        """Matrices N(0, initializer_range), biases 0, norms 1."""
        super().reset_parameters()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cache: Sequence[KVCache | StaticKVCache] | None = None,
        routing: Sequence[Tensor] | None = None,
        return_logits: bool = True,
        output_hidden_states: bool = False,
    ) -> RishOutput:
        """Logits of the next token at every position; with `labels`, the loss.

        Arguments:
            input_ids: (B, T), or inputs_embeds (B, T, C).
            attention_mask: (B, T), 1 or True for real tokens; with a cache, of the new tokens.
            position_ids: (B, T); default: how many real tokens stand before in the row.
            seq_ids: (B, T), packed sequences: tokens attend within equal ids.
            labels: (B, T); the token at t is predicted at t - 1, -100 is not scored.
            cache: one per layer, updated in place. routing: expert indices per layer to replay.
            return_logits: False computes the loss without keeping all logits.
        """
        check_per_layer(len(self.layers), cache=cache, routing=routing)
        x = embed(self.embed_tokens, input_ids, inputs_embeds, labels)
        mask = check_mask("attention_mask", attention_mask, x)
        states, routed = [x], []
        where: dict[str, Any] = {"mask": mask, "positions": position_ids, "seq_ids": seq_ids}
        for i, layer in enumerate(self.layers):
            where["cache"] = None if cache is None else cache[i]
            x, out = self.run_layer(layer, x, None if routing is None else routing[i], **where)
            routed.append(out)
            states.append(x)
        states[-1] = x = self.norm(x)
        _, router_logits, indices, _ = zip(*routed)
        head = self.lm_head, self.embed_tokens
        logits = logits_of(x, *head) if return_logits else None
        loss = aux_loss = None
        if labels is not None or self.config.output_router_logits:
            k, balance = self.config.num_experts_per_tok, self.config.balance
            aux_loss = load_balancing_loss(router_logits, top_k=k, mask=mask, balance=balance)
        if labels is not None and aux_loss is not None:
            targets = next_token_labels(labels, mask=mask, seq_ids=seq_ids).flatten()
            loss = loss_of(x, logits, targets, *head)
            if self.config.router_aux_loss_coef:
                loss = loss + self.config.router_aux_loss_coef * aux_loss
        hidden_states = tuple(states) if output_hidden_states else None
        return RishOutput(logits, router_logits, loss, aux_loss, hidden_states, indices)

    generate = generate
