"""The sampling loop of a masked-diffusion model: predict, pick, commit.

Shapes: B rows, P columns of the prompts, T columns of the canvas, K masks of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brickwork.blocks.diffusion_canvas import (
    Canvas,
    RowDraws,
    as_mask,
    check_ids,
    lay_out,
    row_generators,
    true_first,
)
from brickwork.blocks.diffusion_predictor import Cache, LogitsProcessor, Predictor
from brickwork.blocks.diffusion_rules import Rule, block_steps, check_options, pace, pick
from brickwork.kernels.checks import check_integer

if TYPE_CHECKING:
    from brickwork.blocks.masked_diffusion import MaskedDiffusion


@dataclass
class SampleReport:
    """What sampling took: `forward_passes` of the model, `full_passes`, those of them that covered
    the whole canvas, and `tokens` committed, in all rows."""

    forward_passes: int = 0
    full_passes: int = 0
    tokens: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """How many tokens a pass committed, in all rows; 0 without passes."""
        return self.tokens / self.forward_passes if self.forward_passes else 0.0


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
    factor: float | None = None,
    cfg_scale: float = 0.0,
    attention_mask: Tensor | None = None,
    suppress_ids: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    logits_processor: LogitsProcessor | None = None,
    cache: Cache | None = None,
    refresh_every: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callable[[int, Tensor], object] | None = None,
    report: SampleReport | None = None,
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
            Under the parallel rules only a limit: a block's last step commits the rest.
        temperature: 0 takes the likeliest token, otherwise exact samples of
            softmax(logits / temperature).
        rule: which masks to commit first, by p = softmax(logits), without temperature:
            `"low_confidence"`: highest p of the token taken; `"margin"`: highest difference of
            the two largest p; `"entropy"`: lowest entropy of p; `"random"`. Two are parallel:
            `"threshold"`: all whose token's p is above `threshold`; `"factor"`: the n with the
            highest p, n the largest with (n + 1) (1 - p_n) < `factor`; at least one. Ties: the
            leftmost.
        threshold: in [0, 1], with `rule="threshold"` only.
        factor: above 0, with `rule="factor"` only. At most 1, a step commits what greedy steps one
            by one would, if the model's p are the conditionals of one distribution.
        cfg_scale: w >= 0 of classifier-free guidance, `un + (w + 1) (cond - un)`, where un are
            the logits with every given token masked.
        attention_mask: (B, P), 1 or True for real tokens; padding may stand anywhere.
        suppress_ids: tokens that are never taken. Neither they nor the mask token have any
            probability, in sampling and in confidence.
        stop_ids: tokens that end an answer: when one is committed among a row's `gen_length`
            tokens, all masks behind it take its id and cost no step.
        logits_processor: called `logits_processor(ids, positions, logits)` with the canvas (B, T),
            the columns of the block's masks (B, K) and their logits (B, K, V), guided, before
            tokens are suppressed; returns what to use instead. A row's canvas is its prompt's real
            tokens, then its answer, then filler.
        cache: None, `"prefix"` or `"dual"`, the block caches of Fast-dLLM, for a model of
            `Attention` blocks that takes `position_ids`, `cache` (a `BlockKVCache` for each) and
            `logits_at`, as MiniLLaDA does. A block's first pass covers the canvas; the further ones
            only its columns from the block's first mask on (`"prefix"`), or the block's masks
            (`"dual"`), and see the keys and values that the others had in the first. An
            approximation, since what is committed changes those too; exact where a pass
            leaves nothing out.
        refresh_every: with a cache, cover the canvas anew at every so many-th pass of a block; 1 is
            exact. Default: only at its first.
        generator: source of randomness. Each row takes one seed from it, in row order, so that
            rows sampled one by one give a batch's results. Untouched if nothing is random.
        callback: called `callback(step, ids)` after each forward pass, 1 for the first, with
            the state so far, laid out as the result and free to keep. It must not change the
            model.
        report: a `SampleReport`, to which this call's counts are added.

    Returns:
        (B, P + gen_length) in prompt_ids' dtype, answers right behind their prompts. A row's
        padding stays in front of its first token if it stood there; other padding moves
        behind the answer. (A row without any token has all its padding in front.) A batch gives
        its rows' results as far as the model does: where confidences are equal but for rounding,
        as on a canvas of nothing but masks, the model's rounding decides which comes first.

    Raises:
        ValueError: an option outside its range, a wrong shape or dtype, given ids outside the
            vocabulary, a cache for a model without attention, or logits of another shape, or not
            finite, from the model.

    Paper of caches and parallel rules: Wu et al., *Fast-dLLM: Training-free Acceleration of
    Diffusion LLM by Enabling KV Cache and Parallel Decoding*, 2025.

    >>> from brickwork.blocks import MaskedDiffusion
    >>> def model(ids, attention_mask):  # prefers token 2, then 1
    ...     return torch.tensor([0.0, 1.0, 2.0, 9.0]).expand(*ids.shape, 4)
    >>> diffusion = MaskedDiffusion(mask_token_id=3)
    >>> diffusion.sample(model, torch.tensor([[1, 3, 0]]), gen_length=2, block_length=2, steps=2)
    tensor([[1, 2, 0, 2, 2]])
    """
    check_integer("gen_length", gen_length, least=0)
    check_integer("block_length", block_length, least=1)
    check_options(steps, temperature, rule, threshold, factor, cfg_scale)
    check_ids("prompt_ids", prompt_ids)
    real = as_mask("attention_mask", attention_mask, prompt_ids)
    mask_token_id, device = diffusion.mask_token_id, prompt_ids.device
    canvas = lay_out(prompt_ids, real, gen_length=gen_length, mask_token_id=mask_token_id)
    masks_BT = canvas.real & (canvas.ids == mask_token_id)
    known_BT = canvas.real & ~masks_BT
    _check_vocabulary(canvas.ids[known_BT], diffusion.vocab_size)
    stop = _Stop(stop_ids, canvas, mask_token_id) if stop_ids else None
    predict = Predictor(
        model,
        canvas,
        known=known_BT,
        cfg_scale=cfg_scale,
        mask_token_id=mask_token_id,
        vocab_size=diffusion.vocab_size,
        suppress_ids=suppress_ids,
        logits_processor=logits_processor,
        cache=cache,
        refresh_every=refresh_every,
    )
    stochastic = temperature > 0 or rule == "random"
    generators = row_generators(len(prompt_ids), generator, device) if stochastic else []
    totals = masks_BT.sum(1).tolist()
    left_to_right = true_first(masks_BT)
    ids, committed = canvas.ids, 0
    for start in range(0, max(totals, default=0), block_length):
        positions = left_to_right[:, start : start + block_length]
        sizes = [min(max(total - start, 0), block_length) for total in totals]
        column = torch.arange(positions.shape[1], device=device)
        pending = column < torch.tensor(sizes, device=device)[:, None]
        if stop is not None:
            pending = pending & (ids.gather(1, positions) == mask_token_id)
        budgets = [block_steps(steps, total, start, block_length) for total in totals]
        predict.begin(positions, sizes)
        while any(left := pending.sum(1).tolist()):
            logits = predict(ids)
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
                factor=factor,
                temperature=temperature,
                draw=draw,
            )
            ids = commit(ids, positions, tokens, chosen)
            committed += int(chosen.sum())
            pending = pending & ~chosen
            if stop is not None:
                ids = stop(ids)
                pending = pending & (ids.gather(1, positions) == mask_token_id)
            budgets = [None if budget is None else budget - 1 for budget in budgets]
            if callback is not None:
                callback(predict.passes, canvas.as_given(ids))
    if report is not None:
        report.forward_passes += predict.passes
        report.full_passes += predict.full_passes
        report.tokens += committed
    return canvas.as_given(ids)


def commit(ids_BT: Tensor, positions_BK: Tensor, tokens_BK: Tensor, chosen_BK: Tensor) -> Tensor:
    """A canvas with the chosen tokens at their positions and nothing else changed."""
    before = ids_BT.gather(1, positions_BK)
    after = torch.where(chosen_BK, tokens_BK.to(ids_BT.dtype), before)
    return ids_BT.scatter(1, positions_BK, after)


class _Stop:
    """Fills the masks behind the first stop id of each row's answer with that id."""

    def __init__(self, stop_ids: Sequence[int], canvas: Canvas, mask_token_id: int) -> None:
        for token in stop_ids:
            check_integer("each of stop_ids", token, least=0)
            if token == mask_token_id:
                raise ValueError(f"stop_ids must not hold the mask token, {token}")
        self.stops = torch.tensor(list(stop_ids), device=canvas.ids.device)
        self.mask_token_id = mask_token_id
        self.column = torch.arange(canvas.ids.shape[1], device=canvas.ids.device)
        begin = canvas.prompt_real.sum(1, keepdim=True)
        self.answer = canvas.real & (self.column >= begin)

    def __call__(self, ids_BT: Tensor) -> Tensor:
        stopped = torch.isin(ids_BT, self.stops) & self.answer
        last = ids_BT.shape[1] - 1
        first = torch.where(stopped, self.column, last).amin(1, keepdim=True)
        behind = (self.column > first) & (ids_BT == self.mask_token_id) & self.answer
        return torch.where(behind, ids_BT.gather(1, first), ids_BT)


def _check_vocabulary(ids: Tensor, vocab_size: int | None) -> None:
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if vocab_size is not None and not 0 <= low <= high < vocab_size:
        raise ValueError(f"prompt_ids must be in [0, {vocab_size}), got {low} to {high}")
    if low < 0:
        raise ValueError(f"prompt_ids must be at least 0, got {low}")
