"""Memory of a training step over a large vocabulary, with and without all logits at once."""

from __future__ import annotations

import torch
from memory import peak_extra
from torch.nn import functional as F

from brickwork.kernels.cross_entropy import cross_entropy

TOKENS, WIDTH, VOCABULARY = 2048, 64, 100_352


def test_cross_entropy(tables):
    """At most 40 % of the step that makes the logits; loss and gradients are the same."""
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) / 8).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,))

    def with_logits():
        loss = F.cross_entropy(F.linear(hidden, weight), labels)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def without():
        loss = cross_entropy(hidden, weight, labels)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    for a, b in zip(without(), with_logits()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    ours, theirs = peak_extra(without), peak_extra(with_logits)
    tables["Peak extra memory of a training step, V = 100,352, 2048 tokens"] = [
        ("with all logits / MB", "cross_entropy / MB", "ratio"),
        (theirs // 10**6, ours // 10**6, f"{ours / theirs:.3f}"),
    ]
    assert ours <= 0.4 * theirs
