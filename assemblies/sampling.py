"""Picking the next token from a model's logits (B, V)."""

from __future__ import annotations

import torch
from torch import Tensor

from brickwork.kernels.checks import check_integer


def pick(
    logits_BV: Tensor,
    generator: torch.Generator | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Tensor:
    """One token per row (B,), the likeliest at temperature 0, otherwise sampled.

    Raises:
        RuntimeError: a row with NaN, an infinite or no finite logit.

    >>> pick(torch.tensor([[0.0, 2.0, 1.0]]), None, 0.0, None, None)
    tensor([1])
    """
    peak, likeliest = logits_BV.max(-1, keepdim=True)  # of a row with NaN the maximum is NaN
    if not peak.isfinite().all():
        row = int((~peak[:, 0].isfinite()).int().argmax())
        raise RuntimeError(
            f"row {row}: the model's logits must have a finite maximum, got {peak[row].item()}"
        )
    if temperature == 0:
        return likeliest[:, 0]
    smallest = torch.finfo(logits_BV.dtype).tiny  # below it the quotients would be NaN
    logits_BV = (logits_BV - peak) / max(temperature, smallest)
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    if top_p is not None and top_p < 1:  # at 1 a rounded sum would drop the rarest tokens
        ordered, order = logits_BV.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        dropped = (before >= top_p).scatter(-1, order, before >= top_p)
        logits_BV = logits_BV.masked_fill(dropped, -torch.inf)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """ValueError for an option out of its range, or that has no effect."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number of at least 0, got {temperature}")
    if top_k is not None:
        check_integer("top_k", top_k, least=1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if temperature == 0 and (top_k, top_p) != (None, None):
        raise ValueError("top_k and top_p sample: give a temperature above 0 with them")
