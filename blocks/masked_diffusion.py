"""Masked diffusion: the noise, the training loss, the likelihood.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from brickwork.blocks import diffusion_likelihood, diffusion_sampler
from brickwork.blocks.diffusion_canvas import (
    as_mask,
    check_ids,
    cut_vocabulary,
    free_to_look_at,
    sequence_index,
    uniform,
)
from brickwork.kernels.backend import autocast_off, compute_dtype
from brickwork.kernels.checks import check_floating, check_integer, check_one_of, check_shapes

Weighting = Literal["elbo", "uniform"]
Denominator = Literal["row", "batch", "tokens"]


class Noise(NamedTuple):
    """A masked copy of a batch, each field (B, T).

    `noisy_ids` are the ids with the mask token where `mask` is True, `p` the probability with which
    each position was masked: 0 where it was not maskable.
    """

    noisy_ids: Tensor
    mask: Tensor
    p: Tensor


class MaskedDiffusion:
    """Diffusion over token sequences whose noise is a mask token. It has no parameters.

    Training draws t ~ U(0, 1) for each row, masks each maskable token with probability
    `p = (1 - eps) t + eps`, and scores the model's prediction of the *same* position (no shift):
    `loss = Σ_masked CE / p`, divided by the number of maskable tokens (`weighting="elbo"`, an upper
    bound on the negative log-likelihood per token), or the plain mean of CE over the masked tokens
    (`weighting="uniform"`).

    Papers: Nie et al., *Large Language Diffusion Models*, 2025; Sahoo et al., *Simple and Effective
    Masked Diffusion Language Models*, 2024; Ou et al., *Your Absorbing Discrete Diffusion Secretly
    Models the Conditional Distributions of Clean Data*, 2024.

    Arguments:
        mask_token_id: the id that stands for noise.
        eps: the least masking probability, in [0, 1). Default: 1e-3 for `"elbo"`, 0 (`p = t`) for
            `"uniform"`.
        weighting: `"elbo"` or `"uniform"`.
        vocab_size: how many columns of the logits are tokens; further ones, which only pad the
            head, take no probability anywhere. Default: all are.

    Which tokens are real or maskable is what the masks say; nothing is inferred from an id.

    >>> diffusion = MaskedDiffusion(mask_token_id=4)
    >>> ids = torch.tensor([[3, 1, 2, 0]])
    >>> noise = diffusion.noise(ids, t=torch.tensor([0.5]), u=torch.tensor([[0.9, 0.2, 0.4, 0.7]]))
    >>> noise.noisy_ids
    tensor([[3, 4, 4, 0]])
    >>> diffusion.loss(torch.zeros(1, 4, 5), ids, noise)  # 2 masked · ln 5 / p, over 4 tokens
    tensor(1.6078)
    """

    def __init__(
        self,
        *,
        mask_token_id: int,
        eps: float | None = None,
        weighting: Weighting = "elbo",
        vocab_size: int | None = None,
    ) -> None:
        check_integer("mask_token_id", mask_token_id, least=0)
        check_one_of("weighting", weighting, ("elbo", "uniform"))
        if eps is None:
            eps = 1e-3 if weighting == "elbo" else 0.0
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
            raise ValueError(f"eps must be in [0, 1), got {eps!r}")
        if vocab_size is not None:
            check_integer("vocab_size", vocab_size, least=1)
        self.mask_token_id = mask_token_id
        self.eps = eps
        self.weighting: Weighting = weighting
        self.vocab_size = vocab_size

    def __repr__(self) -> str:
        return (
            f"MaskedDiffusion(mask_token_id={self.mask_token_id}, eps={self.eps}, "
            f"weighting={self.weighting!r}, vocab_size={self.vocab_size})"
        )

    def noise(
        self,
        input_ids: Tensor,
        maskable: Tensor | None = None,
        *,
        seq_ids: Tensor | None = None,
        generator: torch.Generator | None = None,
        t: Tensor | None = None,
        u: Tensor | None = None,
    ) -> Noise:
        """Mask each maskable token of a row with the row's probability.

        Arguments:
            input_ids: (B, T) int64 or int32.
            maskable: (B, T) bool or 0/1, True where a token may be masked and is to be predicted
                (for instance `labels != -100`, padding excluded). Default: everywhere.
            seq_ids: (B, T) integers, runs of equal ids are packed sequences: each has a t of its
                own, as if it were a row. Padding between them takes the id of the one before it.
            generator: source of t and u; equal seeds give equal noise on every device.
            t: (B,) in [0, 1] instead of a draw from U(0, 1]; with seq_ids (B, N), the n-th of a row
                for its n-th sequence.
            u: (B, T) in [0, 1) instead of a draw; a token is masked where u < p.

        Raises:
            ValueError: a wrong shape or dtype, or a t that gives no masking probability above 0.
        """
        check_ids("input_ids", input_ids)
        allowed = as_mask("maskable", maskable, input_ids)
        check_floating(t=t, u=u)
        index = sequence_index(seq_ids, input_ids)
        shape_of_t = "B" if index is None else "B N"
        check_shapes(input_ids=(input_ids, "B T"), t=(t, shape_of_t), u=(u, "B T"))
        if t is not None and free_to_look_at(t):
            possible = (t >= 0) & (t <= 1) & ((1 - self.eps) * t + self.eps > 0)
            if not possible.all():
                raise ValueError(f"t must be in [0, 1], above 0 where eps is 0, got {t}")
        if t is not None and index is not None and free_to_look_at(index):
            most = int(index.max()) + 1 if index.numel() else 0
            if t.shape[1] < most:
                raise ValueError(f"t must have a value for each of {most} sequences, got {t}")
        device = input_ids.device if generator is None else generator.device
        rows, tokens = input_ids.shape
        if t is None:  # how many sequences there are is not looked at: one draw for each token
            size = (rows,) if index is None else (rows, tokens)
            t = 1 - uniform(*size, generator=generator, device=device)
        if u is None:
            u = uniform(rows, tokens, generator=generator, device=device)
        t, u = t.to(input_ids.device), u.to(input_ids.device)
        t = t[:, None].expand_as(u) if index is None else t.gather(1, index)
        p = (1 - self.eps) * t + self.eps
        mask = u < p
        if allowed is not None:
            p = p.masked_fill(~allowed, 0)
            mask = mask & allowed
        return Noise(input_ids.masked_fill(mask, self.mask_token_id), mask, p)

    def token_weights(
        self,
        noise: Noise,
        *,
        denominator: Denominator | None = None,
        seq_ids: Tensor | None = None,
    ) -> Tensor:
        """The weight (B, T) of each token's cross-entropy: `loss = Σ weight · CE`.

        For a loss that never holds all logits give them, flattened, to
        `brickwork.kernels.cross_entropy` as `weights` with `reduction="sum"`, and as labels the
        ids where `noise.mask`, -100 elsewhere.

        A masked token weighs 1 / p (`"elbo"`, with the p that it was masked with) or 1
        (`"uniform"`), divided according to `denominator`, where a row *counts* its maskable tokens
        (`"elbo"`) or its masked ones (`"uniform"`):

        - `"row"`: by the row's count; then the mean over rows that count any. Rows weigh the same.
        - `"batch"`: by the number of rows with a maskable token: the mean over rows of their sums.
        - `"tokens"`: by the count of the batch. Tokens weigh the same.

        Default: `"row"` for `"elbo"`, `"tokens"` (the plain mean) for `"uniform"`. With `seq_ids`
        (B, T), as for `noise`, a packed sequence is what a row is without.
        """
        if denominator is None:
            denominator = "row" if self.weighting == "elbo" else "tokens"
        check_one_of("denominator", denominator, ("row", "batch", "tokens"))
        check_shapes(**{"noise.mask": (noise.mask, "B T"), "noise.p": (noise.p, "B T")})
        p, mask = noise.p, noise.mask
        maskable = p > 0
        weights = mask.to(p.dtype)
        if self.weighting == "elbo":
            weights = weights / p.masked_fill(~mask, 1)
        counted = maskable if self.weighting == "elbo" else mask
        index = sequence_index(seq_ids, mask)
        if denominator == "tokens":
            return weights / counted.sum().clamp(min=1)
        if denominator == "batch":
            return weights / (_sums(maskable, index) > 0).sum().clamp(min=1)
        sums = _sums(counted, index)
        count = sums if index is None else sums.gather(1, index)
        return weights / (count.clamp(min=1) * (sums > 0).sum().clamp(min=1))

    def loss(
        self,
        logits: Tensor,
        input_ids: Tensor,
        noise: Noise,
        *,
        denominator: Denominator | None = None,
        seq_ids: Tensor | None = None,
    ) -> Tensor:
        """The weighted cross-entropy () of the masked tokens, 0 with a graph if none is masked.

        Arguments:
            logits: (B, T, V) for `noise.noisy_ids`, any floating dtype; position i predicts token
                i. What they hold where nothing is masked, NaN included, has no effect.
            input_ids: (B, T), the tokens before the noise: the targets.
            noise: what `noise(input_ids, ...)` returned.
            denominator: `"row"`, `"batch"` or `"tokens"`, see `token_weights`.
            seq_ids: (B, T), packed sequences, as `noise` was given: each counts as a row.

        Returns:
            (), in float32 (float64 for float64 logits), also under autocast.

        Raises:
            ValueError: a wrong shape or dtype, or (looked at on the CPU only, where it stalls
                nothing) a masked target outside the vocabulary.
        """
        check_ids("input_ids", input_ids)
        check_floating(logits=logits)
        check_shapes(
            input_ids=(input_ids, "B T"),
            logits=(logits, "B T V"),
            **{"noise.mask": (noise.mask, "B T"), "noise.p": (noise.p, "B T")},
        )
        losses = self.cross_entropy(logits, input_ids, noise.mask)
        noise = noise._replace(p=noise.p.to(losses.dtype))
        weights = self.token_weights(noise, denominator=denominator, seq_ids=seq_ids)
        return (losses * weights).sum()

    log_likelihood = diffusion_likelihood.log_likelihood
    token_log_probs = diffusion_likelihood.token_log_probs
    sample = diffusion_sampler.sample

    def cross_entropy(self, logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """-log p(ids), (B, T), 0 where `mask` is False whatever the logits hold there."""
        logits = cut_vocabulary(logits, self.vocab_size)
        targets = ids.long().masked_fill(~mask, 0)
        size = logits.shape[-1]
        if free_to_look_at(targets) and not ((targets >= 0) & (targets < size)).all():
            raise ValueError(
                f"input_ids must be in [0, {size}) where masked, got "
                f"{int(targets.min())} to {int(targets.max())}"
            )
        hidden = logits.masked_fill(~mask[..., None], 0)  # NaN · 0 in the backward pass is NaN
        with autocast_off(logits):
            losses = torch.nn.functional.cross_entropy(
                hidden.to(compute_dtype(logits)).flatten(0, 1), targets.flatten(), reduction="none"
            )
        return losses.view(mask.shape).masked_fill(~mask, 0)


def _sums(marked_BT: Tensor, index_BT: Tensor | None) -> Tensor:
    """How many are marked in each row (B, 1), or in each packed sequence (B, T)."""
    if index_BT is None:
        return marked_BT.sum(1, keepdim=True)
    zeros = torch.zeros_like(index_BT)
    return zeros.scatter_add(1, index_BT, marked_BT.to(index_BT.dtype))
