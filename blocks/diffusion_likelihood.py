"""How likely a masked-diffusion model finds tokens: the ELBO of rows, log-probabilities of tokens.

Shapes: B rows, T tokens, N masked copies of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from brickwork.blocks.diffusion_canvas import (
    as_mask,
    check_ids,
    left_align,
    masked_subsets,
    model_logits,
    row_generators,
    true_first,
)
from brickwork.kernels.checks import check_integer, check_one_of

if TYPE_CHECKING:
    from brickwork.blocks.masked_diffusion import MaskedDiffusion

Estimator = Literal["any_order", "coupled", "pseudo", "mean_field"]
RANDOM = ("any_order", "coupled")


class TokenLogProbs(NamedTuple):
    """`values` (B, T), in nats, 0 where nothing is scored; their sums over a row, `totals` (B,);
    and the standard errors of both, of the estimator's draws: 0 for one that draws nothing."""

    values: Tensor
    std_errors: Tensor
    totals: Tensor
    total_std_errors: Tensor


def token_log_probs(
    diffusion: MaskedDiffusion,
    model: Callable[..., Any],
    input_ids: Tensor,
    maskable: Tensor | None = None,
    *,
    estimator: Estimator = "any_order",
    attention_mask: Tensor | None = None,
    num_samples: int = 32,
    batch_size: int = 32,
    generator: torch.Generator | None = None,
) -> TokenLogProbs:
    """A log-probability for each token, for likelihood and for reinforcement learning.

    Let A_i(k) be the mean of `log p(x_i | x outside S)` over all sets S of k of a row's l maskable
    tokens that hold i.

    - `"any_order"`: `1/l Σ_k A_i(k)`, token i's share of the ELBO: its expected log-probability
      when the row is written in a random order. The totals are `log_likelihood`. A sample draws
      S, |S| = k uniform, and counts `l/k log p` for the tokens in it. Unbiased.
    - `"coupled"`: the same mean from S and its complement, two masked copies a sample, so that
      every token is scored once in each: `l/2k log p` for k < l. Unbiased, usually of less
      variance.
    - `"pseudo"`: `A_i(1)`, each token masked alone: l copies. Nothing is drawn.
    - `"mean_field"`: `A_i(l)`, all of them masked at once: one copy. Nothing is drawn.

    The k are drawn in strata, two samples in each, whose difference gives the standard errors:
    their squares are unbiased estimates of the variances.

    Papers: Ou et al., *Your Absorbing Discrete Diffusion Secretly Models the Conditional
    Distributions of Clean Data*, 2024; Zhao et al., *d1: Scaling Reasoning in Diffusion Large
    Language Models via Reinforcement Learning*, 2025 (`"mean_field"`); Gong et al., *DiffuCoder*,
    2025 (complementary masks).

    Arguments:
        model: as for `sample`. Gradients of `values` and `totals` flow to its parameters.
        input_ids, maskable, attention_mask: as for `log_likelihood`.
        estimator: see above.
        num_samples: of each row, an even number; of no effect on an estimator that draws nothing.
        batch_size: how many copies are one forward pass.
        generator: source of one seed for each row, in row order: equal seeds give equal masks, so
            that two models are compared on the same ones.

    Returns:
        TokenLogProbs(values, std_errors, totals, total_std_errors), float32 (float64 for float64
        logits).

    Raises:
        ValueError: a wrong shape, dtype or option, a masked target outside the vocabulary, or
            logits of another shape from the model.

    >>> from brickwork.blocks import MaskedDiffusion
    >>> def model(ids, attention_mask):  # three tokens, all equally likely
    ...     return torch.zeros(*ids.shape, 3)
    >>> diffusion = MaskedDiffusion(mask_token_id=3)
    >>> diffusion.token_log_probs(model, torch.tensor([[0, 2]]), estimator="mean_field").values
    tensor([[-1.0986, -1.0986]])
    """
    check_one_of("estimator", estimator, ("any_order", "coupled", "pseudo", "mean_field"))
    check_integer("num_samples", num_samples, least=2)
    check_integer("batch_size", batch_size, least=1)
    if num_samples % 2:
        raise ValueError(f"num_samples must be even, two to a stratum, got {num_samples}")
    ids, real, wanted, order = _aligned(diffusion, input_ids, maskable, attention_mask)
    random = estimator in RANDOM
    generators = row_generators(len(ids), generator, ids.device) if random else []
    scored = wanted.any(1).nonzero()[:, 0]
    copies = [
        _copies(estimator, wanted[r], num_samples, generators[r] if random else None)
        for r in scored.tolist()
    ]
    values = torch.zeros(ids.shape, device=ids.device, dtype=torch.float32)
    variances, total_variances = values, values.sum(1)
    if copies:
        counts = torch.tensor([len(masks) for masks, _ in copies], device=ids.device)
        rows = scored.repeat_interleave(counts)
        masks = torch.cat([masks for masks, _ in copies])
        scores = _scores(diffusion, model, ids, real, masks, rows, batch_size)
        scores = scores * torch.cat([weights for _, weights in copies])[:, None]
        values = values.to(scores.dtype)
        variances, total_variances = variances.to(scores.dtype), total_variances.to(scores.dtype)
        if random:  # R rows, H strata, two samples in each, one or two copies a sample
            pairs = scores.view(len(scored), num_samples // 2, 2, -1, ids.shape[1]).sum(3)
            values = values.index_copy(0, scored, pairs.mean((1, 2)))
            variances = variances.index_copy(0, scored, _variance(pairs))
            sums = _variance(pairs.sum(-1, keepdim=True))[:, 0]
            total_variances = total_variances.index_copy(0, scored, sums)
        else:
            values = values.index_add(0, rows, scores)
    totals = values.sum(1)
    values, variances = (
        each.new_zeros(input_ids.shape).scatter(1, order, each) for each in (values, variances)
    )
    return TokenLogProbs(values, variances.sqrt(), totals, total_variances.sqrt())


@torch.no_grad()
def log_likelihood(
    diffusion: MaskedDiffusion,
    model: Callable[..., Any],
    input_ids: Tensor,
    maskable: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    num_samples: int = 128,
    batch_size: int = 32,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Estimate each row's ELBO: a lower bound on log p(maskable tokens | the others), in nats.

    `E_k E_{S, |S| = k} [ l/k Σ_{i in S} log p(x_i | x outside S) ]`, k uniform on 1..l for a
    row of l maskable tokens: equal in expectation to the t-integral `-E_t [Σ_masked CE / t]`
    at eps = 0 and to the any-order autoregressive log-likelihood, averaged over all orders,
    but of less variance. One k is drawn in each of `num_samples` equal strata. Unbiased.

    Arguments:
        model: as for `sample`; no gradient is recorded.
        input_ids: (B, T).
        maskable: (B, T), the tokens to score; the others are given. Default: all real ones.
        attention_mask: (B, T), 1 or True for real tokens, padding anywhere; never scored.
        num_samples: masked copies of each row.
        batch_size: how many copies are one forward pass.
        generator: source of one seed for each row, in row order: rows one by one give a batch's
            estimates, and padding changes nothing.

    Returns:
        (B,), float32 (float64 for float64 logits); 0 for a row with nothing to score.

    Raises:
        ValueError: a wrong shape, dtype or option, a masked target outside the vocabulary, or
            logits of another shape from the model.
    """
    check_integer("num_samples", num_samples, least=1)
    check_integer("batch_size", batch_size, least=1)
    ids, real, wanted, _ = _aligned(diffusion, input_ids, maskable, attention_mask)
    generators = row_generators(len(ids), generator, ids.device)
    scored = wanted.any(1).nonzero()[:, 0]
    draws = [masked_subsets(wanted[r], num_samples, generators[r]) for r in scored.tolist()]
    result = torch.zeros(len(ids), device=ids.device, dtype=torch.float32)
    if not draws:
        return result
    masks = torch.cat([mask for mask, _ in draws])
    weights = torch.cat([weight for _, weight in draws])
    rows = scored.repeat_interleave(num_samples)
    scores = _scores(diffusion, model, ids, real, masks, rows, batch_size)
    estimates = (scores.sum(1) * weights).view(-1, num_samples).mean(1)
    return result.to(estimates.dtype).index_copy(0, scored, estimates)


def _aligned(
    diffusion: MaskedDiffusion, input_ids: Tensor, maskable: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows packed to the left, (B, L) each: ids, which are real, which are to be scored, and
    the column (B, L) of `input_ids` that each stood in."""
    check_ids("input_ids", input_ids)
    real = as_mask("attention_mask", mask, input_ids)
    wanted = as_mask("maskable", maskable, input_ids)
    real = torch.ones_like(input_ids, dtype=torch.bool) if real is None else real
    wanted = real if wanted is None else real & wanted
    order = true_first(real)
    ids, packed, wanted = left_align(input_ids, real, wanted, filler=diffusion.mask_token_id)
    return ids, packed, wanted, order[:, : ids.shape[1]]


def _copies(
    estimator: Estimator, wanted_T: Tensor, num_samples: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The masks (N, T) of a row's copies and the weights (N,) of what each scores."""
    where = wanted_T.nonzero()[:, 0]
    count = len(where)
    if generator is None:
        alone = torch.nn.functional.one_hot(where, len(wanted_T)).bool()
        masks = alone if estimator == "pseudo" else wanted_T[None]
        return masks, torch.ones(len(masks), device=masks.device)
    masks, weights = masked_subsets(wanted_T, num_samples, generator, per_stratum=2)
    if estimator == "any_order":
        return masks, weights
    masks = torch.stack((masks, wanted_T & ~masks), 1).flatten(0, 1)
    sizes = masks.sum(1)
    weights = count / (2.0 * sizes.clamp(min=1))
    return masks, weights.masked_fill(sizes == count, 1)


def _scores(
    diffusion: MaskedDiffusion,
    model: Callable[..., Any],
    ids: Tensor,
    real: Tensor,
    masks: Tensor,
    rows: Tensor,
    batch_size: int,
) -> Tensor:
    """log p (N, T) of the tokens masked in each copy, of row `rows[n]`; 0 elsewhere."""
    scores = []
    for copies in torch.arange(len(masks), device=ids.device).split(batch_size):
        row = rows[copies]
        noisy = ids[row].masked_fill(masks[copies], diffusion.mask_token_id)
        hidden = None if bool(real.all()) else real[row]
        logits = model_logits(model, noisy, hidden, diffusion.vocab_size)
        scores.append(-diffusion.cross_entropy(logits, ids[row], masks[copies]))
    return torch.cat(scores)


def _variance(pairs: Tensor) -> Tensor:
    """Of the mean over H strata of two samples each, (R, H, 2, ...): (R, ...)."""
    first, second = pairs.detach().unbind(2)
    return (first - second).square().sum(1) / (4 * pairs.shape[1] ** 2)
