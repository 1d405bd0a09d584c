"""Which masks a step of a masked-diffusion sampler fills, and with what.

Shapes: B rows, K masks of a block, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from brickwork.blocks.diffusion_canvas import RowDraws
from brickwork.kernels.checks import check_integer, check_one_of

Rule = Literal["low_confidence", "random", "margin", "entropy", "threshold", "factor"]
PARALLEL = ("threshold", "factor")  # rules that say themselves how many to commit


def pick(
    logits_BKV: Tensor,
    pending_BK: Tensor,
    least_B: Tensor,
    *,
    rule: Rule,
    threshold: float | None = None,
    factor: float | None = None,
    temperature: float = 0.0,
    draw: RowDraws | None = None,
) -> tuple[Tensor, Tensor]:
    """A token (B, K) for every mask of the block, and which of them (B, K, bool) to commit.

    The `least` most confident pending ones of each row, the leftmost first where confidences are
    equal; under `threshold` also all others above it; with a `factor` the n most confident ones,
    n the largest with (n + 1) (1 - c_n) < factor, c_n being the n-th highest confidence.

    >>> logits = torch.tensor([[[0.0, 2.0], [3.0, 0.0], [0.0, 2.0]]])
    >>> pick(logits, torch.tensor([[True, False, True]]), torch.tensor([1]), rule="margin")
    (tensor([[1, 0, 1]]), tensor([[ True, False, False]]))
    """
    scores = logits_BKV
    if temperature > 0:
        assert draw is not None
        peak = scores.amax(-1, keepdim=True)
        scores = (scores - peak) / temperature + gumbel(draw(scores), draw(scores))
    tokens = scores.argmax(-1)
    confidence = _confidence(logits_BKV, tokens, rule, draw)
    confidence = confidence.masked_fill(~pending_BK, -torch.inf)
    ordered, order = confidence.sort(dim=1, descending=True, stable=True)
    chosen = order.argsort(dim=1) < _count(ordered, least_B, factor)[:, None]
    if threshold is not None:
        chosen = chosen | (confidence > threshold)
    return tokens, chosen & pending_BK


def _count(ordered_BK: Tensor, least_B: Tensor, factor: float | None) -> Tensor:
    """How many of each row's confidences, the highest first, to commit: (B,)."""
    if factor is None:
        return least_B
    after = torch.arange(2, ordered_BK.shape[1] + 2, device=ordered_BK.device)
    return ((1 - ordered_BK) * after < factor).sum(1).maximum(least_B)


def _confidence(logits_BKV: Tensor, tokens_BK: Tensor, rule: Rule, draw: RowDraws | None) -> Tensor:
    if rule == "random":
        assert draw is not None
        return draw(logits_BKV[..., 0])
    probabilities = logits_BKV.softmax(-1)
    if rule == "entropy":
        return -torch.special.entr(probabilities).sum(-1)
    if rule == "margin":
        best = probabilities.topk(min(2, probabilities.shape[-1])).values
        return best[..., 0] - best[..., 1:].sum(-1)
    return probabilities.gather(-1, tokens_BK[..., None])[..., 0]


def block_steps(steps: int | None, masks: int, start: int, block_length: int) -> int | None:
    """The steps of the block that starts at mask `start` of a row's `masks`; None if unbounded.

    `steps` are shared out evenly, the first blocks take the remainder; every block takes one.

    >>> [block_steps(7, 12, start, 4) for start in (0, 4, 8)]
    [3, 2, 2]
    """
    if steps is None:
        return None
    blocks = max(1, -(-masks // block_length))
    return max(1, steps // blocks + (start // block_length < steps % blocks))


def pace(left: int, steps_left: int | None, rule: Rule) -> int:
    """How many of a row's `left` masks this step commits, at least if the rule is parallel.

    >>> pace(8, 3, "random"), pace(5, 2, "random"), pace(2, 1, "random")
    (3, 3, 2)
    """
    if rule not in PARALLEL:
        if steps_left is None:
            return min(left, 1)
        return -(-left // max(1, steps_left))
    return left if steps_left == 1 else min(left, 1)


def gumbel(u: Tensor, v: Tensor) -> Tensor:
    """Standard Gumbel noise from two tensors of uniform draws in [0, 1).

    `v` fills the bits below u's last one: with u alone no float32 draw exceeds 16.7, and at the
    size of a real vocabulary the winners are so coarse that ties shift probability.

    Paper: Zheng et al., *Masked Diffusion Models are Secretly Time-Agnostic Masked Models and
    Exploit Inaccurate Categorical Sampling*, 2024.
    """
    half_ulp = torch.finfo(u.dtype).eps / 2
    fine = (u + v * half_ulp).clamp(max=1 - half_ulp)
    return -(-torch.log1p(-fine)).clamp(min=torch.finfo(u.dtype).tiny).log()


def check_options(
    steps: int | None,
    temperature: float,
    rule: Rule,
    threshold: float | None,
    factor: float | None,
    cfg_scale: float,
) -> None:
    """ValueError for an option of `sample` out of its range, or that does not go with the rule."""
    check_one_of("rule", rule, get_args(Rule))
    if steps is not None:
        check_integer("steps", steps, least=1)
    for argument, value in (("threshold", threshold), ("factor", factor)):
        if (value is None) == (rule == argument):
            raise ValueError(
                f"{argument} must be given with rule={argument!r} and with no other, got "
                f"{value!r} with {rule!r}"
            )
    if threshold is not None and not (_is_number(threshold) and 0 <= threshold <= 1):
        raise ValueError(f"threshold must be in [0, 1], got {threshold!r}")
    if factor is not None and not (_is_number(factor) and 0 < factor < math.inf):
        raise ValueError(f"factor must be a finite number above 0, got {factor!r}")
    for argument, value in (("temperature", temperature), ("cfg_scale", cfg_scale)):
        if not (_is_number(value) and 0 <= value < math.inf):
            raise ValueError(f"{argument} must be a finite number of at least 0, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
