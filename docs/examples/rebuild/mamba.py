"""Mamba from blocks, under the names of transformers' checkpoints."""

from __future__ import annotations

from torch import Tensor, nn

from brickwork.blocks import Mamba1, RMSNorm
from brickwork.blocks.mamba_mixer import MambaState


class Layer(nn.Module):
    """`x += mixer(norm(x))`."""

    def __init__(self, config) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mixer = Mamba1(
            config.hidden_size,
            d_state=config.state_size,
            d_conv=config.conv_kernel,
            expand=config.expand,
            dt_rank=config.time_step_rank,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
        )

    def forward(self, x: Tensor, mask: Tensor | None, state: MambaState | None) -> Tensor:
        return x + self.mixer(self.norm(x), mask=mask, state=state)


class Mamba(nn.Module):
    """Called with token ids (B, T), maybe a padding mask and one state per layer; logits (B, T, V).

    `config` is a transformers MambaConfig. The head is the embedding.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, ids: Tensor, mask: Tensor | None = None, caches=None) -> Tensor:
        x = self.embeddings(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, caches[i] if caches else None)
        return nn.functional.linear(self.norm_f(x), self.embeddings.weight)

    def new_caches(self) -> list[MambaState]:
        return [MambaState() for _ in self.layers]

    def load(self, state: dict[str, Tensor]) -> Mamba:
        """The state dict of a transformers MambaForCausalLM."""
        ours = {name.removeprefix("backbone."): t for name, t in state.items()}
        ours.pop("lm_head.weight", None)  # the embedding's own
        self.load_state_dict(ours)
        return self
