"""LC-PLM: a bidirectional Mamba protein language model."""

from __future__ import annotations

import math

from torch import Tensor, nn

from brickwork.assemblies.assembly import Assembly
from brickwork.assemblies.checkpoint import Rename
from brickwork.assemblies.head import logits_of
from brickwork.assemblies.inputs import check_mask, embed
from brickwork.assemblies.lc_plm_config import LCPLMConfig
from brickwork.assemblies.lc_plm_mixer import mixer
from brickwork.assemblies.outputs import LCPLMOutput
from brickwork.blocks.linear import Linear
from brickwork.blocks.norm import AddNorm
from brickwork.blocks.swiglu import SwiGLU
from brickwork.kernels.cross_entropy import token_cross_entropy

# Python warns when a module that its package imports is run by `python -m`, unless it has a path.
__path__: list[str] = []

_LAYER = "bimamba.backbone.layers.{i}"


def _packed(kind: str) -> tuple[str, ...]:
    return tuple(f"layers.{{i}}.mixer.{x}_proj.{kind}" for x in "qkv")


class Block(nn.Module):
    """`residual += hidden; hidden = mixer(norm(residual))`, then the same with an MLP if any."""

    def __init__(self, config: LCPLMConfig, index: int) -> None:
        super().__init__()
        self.norm = AddNorm(config.d_model, **config.norm_options())
        self.mixer = mixer(config, index)
        self.norm2 = (
            AddNorm(config.d_model, **config.norm_options()) if config.d_intermediate else None
        )
        self.mlp = SwiGLU(config.d_model, hidden_dim=config.hidden_dim()) if self.norm2 else None

    def forward(
        self, hidden: Tensor, residual: Tensor | None, mask: Tensor | None, seq_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.norm(hidden, residual)
        hidden = self.mixer(hidden, mask=mask, seq_ids=seq_ids)
        if self.norm2 is not None and self.mlp is not None:
            hidden, residual = self.norm2(hidden, residual)
            hidden = self.mlp(hidden)
        return hidden, residual


class LCPLM(Assembly):
    """Protein language model of bidirectional Mamba blocks, trained on masked residues.

    Paper: Wang et al., *Long-context Protein Language Modeling Using Bidirectional Mamba with
    Shared Projection Layers*, 2024.

    >>> import torch
    >>> model = LCPLM(LCPLMConfig(d_model=16, n_layer=1))
    >>> model(torch.tensor([[0, 4, 5, 32, 2]])).logits.shape
    torch.Size([1, 5, 33])
    """

    config_class = LCPLMConfig
    config: LCPLMConfig
    table = (
        Rename("layers.{i}.mixer.mamba_*", f"{_LAYER}.mixer.mamba_*"),
        Rename(_packed("weight"), f"{_LAYER}.mixer.in_proj.weight"),
        Rename(_packed("bias"), f"{_LAYER}.mixer.in_proj.bias"),
        Rename("layers.{i}.mixer.o_proj.*", f"{_LAYER}.mixer.out_proj.*"),
        Rename("layers.{i}.mixer.*", f"{_LAYER}.mixer.mamba_fwd.*"),
        Rename("layers.{i}.mlp.gate_up.weight", f"{_LAYER}.mlp.fc1.weight", swap_halves=True),
        Rename("layers.{i}.mlp.down.weight", f"{_LAYER}.mlp.fc2.weight"),
        Rename("lm_head.weight", "lm_head.weight"),
        Rename("*", "bimamba.backbone.*"),
    )

    def __init__(self, config: LCPLMConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.padded_vocab_size()
        self.embedding = nn.Embedding(rows, config.d_model)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm_f = AddNorm(config.d_model, **config.norm_options())
        head = Linear(config.d_model, rows, bias=False)
        self.lm_head = None if config.tie_embeddings else head
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Blocks by their own rules, embedding N(0, 0.02), branches scaled down with depth."""
        super().reset_parameters()
        std, branch_scale = self.config.initializer()
        nn.init.normal_(self.embedding.weight, std=std)
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "mlp.down.weight")):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                parameter.data *= branch_scale

    def aliases(self) -> dict[str, str]:
        tied = {} if self.lm_head else {"lm_head.weight": "bimamba.backbone.embedding.weight"}
        return super().aliases() | tied

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> LCPLMOutput:
        """Logits of the residue at every position; with `labels` (B, T), the mean cross-entropy
        at the same positions where they are not -100.

        `input_ids` (B, T) or `inputs_embeds` (B, T, C); `attention_mask` (B, T), 1 for real
        tokens (the others' last hidden state is 0); `seq_ids` (B, T) for packed sequences.
        """
        vocab = self.config.vocab_size
        hidden = embed(self.embedding, input_ids, inputs_embeds, labels, vocab_size=vocab)
        mask = check_mask("attention_mask", attention_mask, hidden)
        residual, states = None, [hidden]
        for layer in self.layers:
            hidden, residual = self.run_layer(layer, hidden, residual, mask, seq_ids)
            if output_hidden_states:
                states.append(residual + hidden)
        hidden, _ = self.norm_f(hidden, residual)
        if mask is not None:
            hidden = hidden.masked_fill(~mask[..., None], 0.0)
        hidden_states = (*states[:-1], hidden) if output_hidden_states else None
        logits = logits_of(hidden, self.lm_head, self.embedding)[..., :vocab].float()
        loss = None
        if labels is not None:
            targets = labels if mask is None else labels.masked_fill(~mask, -100)
            loss = token_cross_entropy(logits.flatten(0, 1), targets.flatten())
        return LCPLMOutput(logits, hidden, loss, hidden_states)


if __name__ == "__main__":
    from brickwork.assemblies.lc_plm_cli import main

    main()
