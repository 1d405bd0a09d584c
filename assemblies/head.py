"""The layer that turns last hidden states into logits, an own one or the embedding's other side."""

from __future__ import annotations

from torch import Tensor, nn

from brickwork.blocks.hooks import has_hooks
from brickwork.blocks.linear import Linear
from brickwork.kernels.cross_entropy import cross_entropy, token_cross_entropy
from brickwork.kernels.linear import linear


def logits_of(x: Tensor, head: nn.Module | None, embedding: nn.Embedding) -> Tensor:
    """`head(x)`, whatever took the head's place, or with None the product with the embedding."""
    return linear(x, embedding.weight) if head is None else head(x)


def plain_weight(head: nn.Module | None, embedding: nn.Embedding) -> Tensor | None:
    """The weight (V, C) whose product with x is all that the head computes, else None: a head with
    a bias, hooks or an adapter must be called."""
    if head is None:
        return embedding.weight
    if type(head) not in (nn.Linear, Linear) or head.bias is not None:
        return None
    return None if has_hooks(head) else head.weight


def loss_of(
    x: Tensor,
    logits: Tensor | None,
    targets: Tensor,
    head: nn.Module | None,
    embedding: nn.Embedding,
) -> Tensor:
    """The mean cross-entropy of `targets` (B T) from the logits or, where they are None, from the
    hidden states (B, T, C), without all logits at once if the head is a plain product."""
    weight = plain_weight(head, embedding)
    if logits is None and weight is not None:
        return cross_entropy(x.flatten(0, 1), weight, targets)
    logits = logits_of(x, head, embedding) if logits is None else logits
    return token_cross_entropy(logits.flatten(0, 1), targets)
