"""A model of one's own: Mamba, grouped attention and experts, trained on bytes for a moment."""

from pathlib import Path

import torch
from torch import Tensor, nn

from brickwork.blocks import Attention, Mamba2, MoE, Residual, RMSNorm, RoPE, load_balancing_loss


class Model(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        attention = Attention(
            dim, num_heads=4, num_kv_heads=2, qk_norm="head", rope=RoPE(dim // 4), causal=True
        )
        experts = MoE(dim, hidden_dim=dim, num_experts=8, top_k=2)
        layers = [Residual(m, norm=RMSNorm(dim)) for m in (Mamba2(dim), attention, experts)]
        self.body = nn.Sequential(nn.Embedding(256, dim), *layers)
        self.head = nn.Sequential(RMSNorm(dim), nn.Linear(dim, 256))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.body(ids)
        return self.head(out.y), out.router_logits


torch.manual_seed(0)
text = torch.tensor([*(Path(__file__).parent / "data/devils_dictionary.txt").read_bytes()])
model = Model(dim=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(101):
    batch = torch.stack([text[i : i + 65] for i in torch.randint(len(text) - 65, (16,))])
    logits, router_logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    (loss + 0.01 * load_balancing_loss([router_logits], top_k=2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step:3}: {loss.item():.3f} nats per byte")
