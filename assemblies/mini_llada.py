"""MiniLLaDA: a masked-diffusion language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brickwork.assemblies.assembly import Assembly
from brickwork.assemblies.checkpoint import Rename
from brickwork.assemblies.head import plain_weight
from brickwork.assemblies.inputs import check_mask, check_per_layer, embed, rows_at
from brickwork.assemblies.mini_llada_config import MiniLLaDAConfig
from brickwork.assemblies.mini_llada_pass import columns_pass
from brickwork.assemblies.outputs import MiniLLaDAOutput
from brickwork.assemblies.targets import noised
from brickwork.blocks.attention import Attention
from brickwork.blocks.block_kv_cache import BlockKVCache
from brickwork.blocks.linear import Linear
from brickwork.blocks.masked_diffusion import MaskedDiffusion, Noise
from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope import RoPE
from brickwork.blocks.swiglu import SwiGLU
from brickwork.kernels.cross_entropy import cross_entropy


class Block(nn.Module):
    """`x += attention(norm1(x)); x += mlp(norm2(x))`."""

    def __init__(self, config: MiniLLaDAConfig, rope: RoPE) -> None:
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.norm1 = RMSNorm(dim, eps=eps)
        self.attention = Attention(dim, num_heads=config.head, rope=rope)
        self.norm2 = RMSNorm(dim, eps=eps)
        self.mlp = SwiGLU(dim, hidden_dim=config.intermediate_size)

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), **where)
        return x + self.mlp(self.norm2(x))


class MiniLLaDA(Assembly):
    """Masked-diffusion language model of pre-norm blocks with bidirectional attention.

    Paper: Nie et al., *Large Language Diffusion Models*, 2025.

    >>> config = MiniLLaDAConfig(vocab_size=9, dim=8, depth=1, head=2, intermediate_size=8)
    >>> model = MiniLLaDA(config)
    >>> ids = torch.tensor([[1, 2, 3, 5]])
    >>> model(ids).logits.shape, model(ids, labels=ids).loss.isfinite().item()
    (torch.Size([1, 4, 9]), True)
    >>> model.diffusion.sample(model.eval(), ids, gen_length=2, block_length=2).shape
    torch.Size([1, 6])
    """

    config_class = MiniLLaDAConfig
    config: MiniLLaDAConfig
    columns_pass = columns_pass
    table = (
        Rename("layers.{i}.attention.*", "network.layers.{i}.mha.*"),
        Rename("layers.{i}.mlp.gate_up.*", "network.layers.{i}.gate_up_proj.*"),
        Rename("layers.{i}.mlp.down.*", "network.layers.{i}.down_proj.*"),
        Rename("*", "network.*"),
    )

    def __init__(self, config: MiniLLaDAConfig) -> None:
        super().__init__()
        self.config = config
        head_dim = config.dim // config.head
        rope = RoPE(head_dim, layout="interleaved", max_positions=config.max_seq_len)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, rope) for _ in range(config.depth))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size, bias=False)
        self.diffusion = MaskedDiffusion(
            mask_token_id=config.mask_token_id,
            eps=config.diffusion_eps,
            weighting=config.weighting,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every block by its own rule; embedding N(0, 0.02)."""
        super().reset_parameters()
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cache: Sequence[BlockKVCache] | None = None,
        logits_at: Tensor | None = None,
        noise: Noise | None = None,
        generator: torch.Generator | None = None,
        return_logits: bool = True,
        output_hidden_states: bool = False,
    ) -> MiniLLaDAOutput:
        """Logits of `input_ids`; with `labels`, of their noised copy, and its loss.

        Arguments:
            input_ids: (B, T), or inputs_embeds (B, T, C), without labels then.
            attention_mask: (B, T), 1 or True for real tokens.
            position_ids: (B, T); default: how many real tokens stand before in the row.
            seq_ids: (B, T), packed sequences: tokens attend within equal ids, and each sequence
                has noise and a loss as if it were a row.
            labels: (B, T), input_ids where a token may be masked and is to be predicted, else -100.
            cache: one per layer, updated in place; only the columns that it selects are given.
            logits_at: (B, K), without labels: the tokens that logits (B, K, V) are wanted for.
            noise: the masked copy to score, instead of a new draw from `generator`.
            return_logits: False computes the loss without keeping all logits.
        """
        check_per_layer(len(self.layers), cache=cache, kinds=(BlockKVCache,))
        noise, sequences = noised(
            self.diffusion,
            input_ids,
            labels,
            attention_mask=attention_mask,
            seq_ids=seq_ids,
            noise=noise,
            generator=generator,
        )
        ids = input_ids if noise is None else noise.noisy_ids
        x = embed(self.embed, ids, inputs_embeds, labels)
        mask = check_mask("attention_mask", attention_mask, x)
        states, where = [x], {"mask": mask, "positions": position_ids, "seq_ids": seq_ids}
        for i, layer in enumerate(self.layers):
            x = self.run_layer(layer, x, cache=None if cache is None else cache[i], **where)
            states.append(x)
        if logits_at is not None:
            x = rows_at("logits_at", x, logits_at, labels)
        states[-1] = x = self.norm(x)
        head, loss = plain_weight(self.head, self.embed), None
        logits = self.head(x) if return_logits or head is None else None
        if logits is not None and noise is not None and input_ids is not None:
            loss = self.diffusion.loss(logits, input_ids, noise, seq_ids=sequences)
        elif noise is not None and input_ids is not None and head is not None:
            weights = self.diffusion.token_weights(noise, seq_ids=sequences).flatten()
            targets = input_ids.masked_fill(~noise.mask, -100).flatten()
            loss = cross_entropy(x.flatten(0, 1), head, targets, weights=weights, reduction="sum")
        logits = logits if return_logits else None
        return MiniLLaDAOutput(logits, loss, noise, tuple(states) if output_hidden_states else None)
