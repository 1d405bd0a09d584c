"""The sampling loop of a masked-diffusion model: predict, pick, commit.

Shapes: B rows, P columns of the prompts, T columns of the canvas, K masks of a block, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from brickwork.blocks.diffusion_canvas import (
    RowDraws,
    as_mask,
    check_ids,
    lay_out,
    model_logits,
    row_generators,
    true_first,
)
from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.checks import check_integer, check_one_of

if TYPE_CHECKING:
    from brickwork.blocks.masked_diffusion import MaskedDiffusion

Rule = Literal["low_confidence", "random", "margin", "entropy", "threshold"]


@torch.no_grad()
def sample(
    diffusion: MaskedDiffusion,
    model: Callable[..., Any],
    prompt_ids: Tensor,
    *,
    gen_length: int,
    block_length: int,
    steps: int | None = None,
    temperature: float = 0.0,
    rule: Rule = "low_confidence",
    threshold: float | None = None,
    cfg_scale: float = 0.0,
    attention_mask: Tensor | None = None,
    suppress_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
    callback: Callable[[int, Tensor], object] | None = None,
) -> Tensor:
    """Continue each prompt by `gen_length` tokens and fill the masks inside it.

    A row's masks, from left to right, form blocks of `block_length` that are filled one after
    another. Each step predicts all masks of the block and commits the most confident; what is
    committed or given never changes.

    Arguments:
        model: called `model(ids, attention_mask=mask)` with ids (B, T) and mask (B, T, bool) or
            None; returns logits (B, T, V) or an object with `.logits`. Put it into eval mode.
        prompt_ids: (B, P); mask tokens inside are places to fill (infilling).
        gen_length: how many tokens to add to each row, 0 for infilling only.
        block_length: masks to a block; the last one may be shorter.
        steps: forward passes of a row (default: as many as masks, one token each), shared out
            evenly over its blocks and, in a block of n masks and s steps, committing n // s a
            step, the first n % s steps one more. A block takes at least one step; a step that
            would commit nothing is skipped, as its prediction would be the last one again.
            Under `rule="threshold"` only a limit: a block's last step commits the rest.
        temperature: 0 takes the likeliest token, otherwise exact samples of
            softmax(logits / temperature).
        rule: which masks to commit first, by p = softmax(logits), without temperature:
            `"low_confidence"`: highest p of the token taken; `"margin"`: highest difference of
            the two largest p; `"entropy"`: lowest entropy of p; `"random"`; `"threshold"`: all
            whose token's p is above `threshold`, at least one. Ties: the leftmost.
        threshold: in [0, 1], with `rule="threshold"` only.
        cfg_scale: w >= 0 of classifier-free guidance, `un + (w + 1) (cond - un)`, where un are
            the logits with every given token masked.
        attention_mask: (B, P), 1 or True for real tokens; padding may stand anywhere.
        suppress_ids: tokens that are never taken. Neither they nor the mask token have any
            probability, in sampling and in confidence.
        generator: source of randomness. Each row takes one seed from it, in row order, so that
            rows sampled one by one give a batch's results. Untouched if nothing is random.
        callback: called `callback(step, ids)` after each forward pass, 1 for the first, with
            the state so far, laid out as the result and free to keep.

    Returns:
        (B, P + gen_length) in prompt_ids' dtype, answers right behind their prompts. A row's
        padding stays in front of its first token if it stood there; other padding moves
        behind the answer. (A row without any token has all its padding in front.) A batch gives
        its rows' results as far as the model does: where confidences are equal but for rounding,
        as on a canvas of nothing but masks, the model's rounding decides which comes first.

    Raises:
        ValueError: an option outside its range, a wrong shape or dtype, given ids outside the
            vocabulary, or logits of another shape, or not finite, from the model.

    >>> from brickwork.blocks import MaskedDiffusion
    >>> def model(ids, attention_mask):  # prefers token 2, then 1
    ...     return torch.tensor([0.0, 1.0, 2.0, 9.0]).expand(*ids.shape, 4)
    >>> diffusion = MaskedDiffusion(mask_token_id=3)
    >>> diffusion.sample(model, torch.tensor([[1, 3, 0]]), gen_length=2, block_length=2, steps=2)
    tensor([[1, 2, 0, 2, 2]])
    """
    check_integer("gen_length", gen_length, least=0)
    check_integer("block_length", block_length, least=1)
    _check_options(steps, temperature, rule, threshold, cfg_scale)
    for token in suppress_ids:
        check_integer("each of suppress_ids", token, least=0)
    check_ids("prompt_ids", prompt_ids)
    real = as_mask("attention_mask", attention_mask, prompt_ids)
    mask_token_id, vocab_size = diffusion.mask_token_id, diffusion.vocab_size
    canvas = lay_out(prompt_ids, real, gen_length=gen_length, mask_token_id=mask_token_id)
    masks_BT = canvas.real & (canvas.ids == mask_token_id)
    known_BT = canvas.real & ~masks_BT
    _check_vocabulary(canvas.ids[known_BT], vocab_size)

    def predict_block(ids: Tensor, positions: Tensor) -> Tensor:
        return predict(
            model,
            ids,
            canvas.mask,
            positions,
            known=known_BT,
            cfg_scale=cfg_scale,
            mask_token_id=mask_token_id,
            vocab_size=vocab_size,
            suppress_ids=suppress_ids,
        )

    device = prompt_ids.device
    stochastic = temperature > 0 or rule == "random"
    generators = row_generators(len(prompt_ids), generator, device) if stochastic else []
    totals = masks_BT.sum(1).tolist()
    left_to_right = true_first(masks_BT)
    ids, step = canvas.ids, 0
    for start in range(0, max(totals, default=0), block_length):
        positions = left_to_right[:, start : start + block_length]
        sizes = [min(max(total - start, 0), block_length) for total in totals]
        column = torch.arange(positions.shape[1], device=device)
        pending = column < torch.tensor(sizes, device=device)[:, None]
        budgets = [block_steps(steps, total, start, block_length) for total in totals]
        while any(left := pending.sum(1).tolist()):
            logits = predict_block(ids, positions)
            if not logits.amax(-1)[pending].isfinite().all():
                raise ValueError("model must return logits with a finite maximum, got NaN or Inf")
            least = [pace(n, budget, rule) for n, budget in zip(left, budgets)]
            draw = RowDraws(generators, [size if n else 0 for n, size in zip(left, sizes)])
            tokens, chosen = pick(
                logits,
                pending,
                torch.tensor(least, device=device),
                rule=rule,
                threshold=threshold,
                temperature=temperature,
                draw=draw,
            )
            ids = commit(ids, positions, tokens, chosen)
            pending = pending & ~chosen
            budgets = [None if budget is None else budget - 1 for budget in budgets]
            step += 1
            if callback is not None:
                callback(step, canvas.as_given(ids))
    return canvas.as_given(ids)


def predict(
    model: Callable[..., Any],
    ids_BT: Tensor,
    mask_BT: Tensor | None,
    positions_BK: Tensor,
    *,
    known: Tensor,
    cfg_scale: float,
    mask_token_id: int,
    vocab_size: int | None,
    suppress_ids: Sequence[int] = (),
) -> Tensor:
    """Logits (B, K, V) at `positions`, guided, -Inf for the mask id and what else is suppressed.

    With guidance one forward pass holds the canvas and, below it, a copy with the `known` tokens
    masked: `logits = un + (cfg_scale + 1) (cond - un)`.
    """
    rows = len(ids_BT)
    if cfg_scale > 0:
        ids_BT = torch.cat([ids_BT, ids_BT.masked_fill(known, mask_token_id)])
        positions_BK = positions_BK.repeat(2, 1)
        mask_BT = None if mask_BT is None else mask_BT.repeat(2, 1)
    logits = model_logits(model, ids_BT, mask_BT, vocab_size)
    logits = logits[torch.arange(len(ids_BT), device=ids_BT.device)[:, None], positions_BK]
    logits = logits.to(compute_dtype(logits))
    if cfg_scale > 0:
        cond, un = logits[:rows], logits[rows:]
        impossible = (cond == -torch.inf) | (un == -torch.inf)
        logits = (un + (cfg_scale + 1) * (cond - un)).masked_fill(impossible, -torch.inf)
    size = logits.shape[-1]
    if max(suppress_ids, default=0) >= size:
        raise ValueError(f"suppress_ids must be below V = {size}, got {max(suppress_ids)}")
    barred = sorted(token for token in {*suppress_ids, mask_token_id} if token < size)
    if len(barred) == size:
        raise ValueError(f"suppress_ids must leave one of the {size} tokens besides the mask")
    return logits.index_fill_(-1, torch.tensor(barred, device=logits.device).long(), -torch.inf)


def pick(
    logits_BKV: Tensor,
    pending_BK: Tensor,
    least_B: Tensor,
    *,
    rule: Rule,
    threshold: float | None = None,
    temperature: float = 0.0,
    draw: RowDraws | None = None,
) -> tuple[Tensor, Tensor]:
    """A token (B, K) for every mask of the block, and which of them (B, K, bool) to commit.

    The `least` most confident pending ones of each row, the leftmost first where confidences are
    equal; under `threshold` also all others above it.

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
    rank = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    chosen = rank < least_B[:, None]
    if threshold is not None:
        chosen = chosen | (confidence > threshold)
    return tokens, chosen & pending_BK


def commit(ids_BT: Tensor, positions_BK: Tensor, tokens_BK: Tensor, chosen_BK: Tensor) -> Tensor:
    """A canvas with the chosen tokens at their positions and nothing else changed."""
    before = ids_BT.gather(1, positions_BK)
    after = torch.where(chosen_BK, tokens_BK.to(ids_BT.dtype), before)
    return ids_BT.scatter(1, positions_BK, after)


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
    """How many of a row's `left` masks this step commits, at least for `rule="threshold"`.

    >>> pace(8, 3, "random"), pace(5, 2, "random"), pace(2, 1, "random")
    (3, 3, 2)
    """
    if rule != "threshold":
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


def _check_vocabulary(ids: Tensor, vocab_size: int | None) -> None:
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if vocab_size is not None and not 0 <= low <= high < vocab_size:
        raise ValueError(f"prompt_ids must be in [0, {vocab_size}), got {low} to {high}")
    if low < 0:
        raise ValueError(f"prompt_ids must be at least 0, got {low}")


def _check_options(
    steps: int | None, temperature: float, rule: Rule, threshold: float | None, cfg_scale: float
) -> None:
    check_one_of("rule", rule, get_args(Rule))
    if steps is not None:
        check_integer("steps", steps, least=1)
    if (threshold is None) == (rule == "threshold"):
        raise ValueError(
            f"threshold must be given with rule='threshold' and with no other, got "
            f"{threshold!r} with {rule!r}"
        )
    if threshold is not None and not (_is_number(threshold) and 0 <= threshold <= 1):
        raise ValueError(f"threshold must be in [0, 1], got {threshold!r}")
    for argument, value in (("temperature", temperature), ("cfg_scale", cfg_scale)):
        if not (_is_number(value) and 0 <= value < math.inf):
            raise ValueError(f"{argument} must be a finite number of at least 0, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
