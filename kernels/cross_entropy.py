"""Cross-entropy of a language-model head: from hidden states, or from logits.

S tokens, C width, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype, why_not_opaque
from brickwork.kernels.checks import (
    check_floating,
    check_integer,
    check_one_of,
    check_shapes,
    values_readable,
)

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    hidden_SC: Tensor,
    weight_VC: Tensor,
    labels_S: Tensor,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    vocab_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The loss of predicting `labels` with the head `weight`, without keeping all logits.

    `CE_s = logsumexp_v(h_s · W_v) - h_s · W_label(s)`, 0 where the label is `ignore_index`; such a
    row of `hidden` has no influence, whatever it holds. With token weights w (1 by default)
    `"sum"` is `Σ w_s CE_s`, `"mean"` that sum divided by the *number* of scored labels (not by the
    sum of w), `"none"` the terms `w_s CE_s`. Where nothing is scored the loss is 0 and so are its
    gradients. The diffusion bound `Σ CE / p` is `weights=1 / p` with `"sum"`.

    `"torch"`, the reference, keeps the logits in float32 (float64 if an argument is). `"chunked"`
    keeps those of one chunk of tokens at a time, computes only what is scored (on the CPU), and has
    its gradients ready when the loss is (for `"none"` it computes the logits again). All but the
    products is float32, and on the CPU these too; on other devices bfloat16 tensors, and under
    autocast all, are multiplied as they are and added up in float32. It can be differentiated
    once. `auto` takes it except in `torch.export`, `torch.jit.trace` and `torch.func` transforms.

    Paper: Wijmans et al., *Cut Your Losses in Large-Vocabulary Language Models*, 2025.

    Arguments:
        hidden_SC: (S, C), floating point; S may be 0.
        weight_VC: (V, C), floating point.
        labels_S: (S,), int32 or int64, in [0, vocab_size) or `ignore_index`.
        weights: (S,), floating point, or None.
        reduction: `"mean"`, `"sum"` or `"none"`.
        ignore_index: the label that is not scored.
        vocab_size: how many rows of `weight` are tokens; further ones take no probability. None:
            all.
        backend: see `brickwork.kernels.backend`.

    Returns:
        A scalar, or (S,) for `"none"`, float32 (float64 for float64).

    Raises:
        ValueError: a wrong shape, dtype, `reduction` or `vocab_size`; a label out of range.
        BackendUnavailable: a backend was named that cannot run here.

    >>> hidden, head = torch.zeros(3, 4), torch.ones(8, 4)
    >>> cross_entropy(hidden, head, torch.tensor([1, 7, -100]))  # ln 8
    tensor(2.0794)
    >>> cross_entropy(hidden, head, torch.tensor([1, 2, -100]), vocab_size=4, reduction="none")
    tensor([1.3863, 1.3863, 0.0000])
    """
    check_floating(hidden=hidden_SC, weight=weight_VC, weights=weights)
    check_shapes(
        hidden=(hidden_SC, "S C"),
        weight=(weight_VC, "V C"),
        labels=(labels_S, "S"),
        weights=(weights, "S"),
    )
    check_one_of("reduction", reduction, ("mean", "sum", "none"))
    vocab_size = _check_vocab_size(vocab_size, weight_VC.shape[0])
    _check_labels(labels_S, vocab_size, ignore_index)
    if choose("cross_entropy", backend, chunked=why_not_opaque) == "chunked":
        weight = _tokens_only(weight_VC, vocab_size)
        return _by_chunks(hidden_SC, weight, labels_S, weights, reduction, ignore_index)
    return cross_entropy_reference(
        hidden_SC,
        weight_VC,
        labels_S,
        weights=weights,
        reduction=reduction,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
    )


def cross_entropy_reference(
    hidden_SC: Tensor,
    weight_VC: Tensor,
    labels_S: Tensor,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> Tensor:
    """The specification of `cross_entropy`."""
    dtype = compute_dtype(hidden_SC, weight_VC)
    with autocast_off(hidden_SC):
        scored = (labels_S != ignore_index)[:, None]
        hidden = torch.where(scored, hidden_SC.to(dtype), 0)
        logits = hidden @ _tokens_only(weight_VC, vocab_size).to(dtype).mT
    return _token_cross_entropy(logits, labels_S, weights, reduction, ignore_index)


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    reduction: Reduction,
    ignore_index: int,
) -> Tensor:
    from brickwork.kernels.cross_entropy_chunked import IGNORED, cross_entropy_chunked

    scored = labels != ignore_index
    labels = torch.where(scored, labels.long(), IGNORED)
    if reduction == "none":
        return reduce(cross_entropy_chunked(hidden, weight, labels, None), scored, weights, "none")
    share = scored.to(compute_dtype(hidden, weight))
    if weights is not None:
        share = torch.where(scored, weights.to(share.dtype), 0)
    if reduction == "mean":
        share = share / scored.sum().clamp(min=1)
    return cross_entropy_chunked(hidden, weight, labels, share)


def token_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> Tensor:
    """`cross_entropy` for logits that exist already, by the same rules; any leading shape.

    Arguments:
        logits: (..., V), floating point.
        labels: (...), int32 or int64, in [0, vocab_size) or `ignore_index`.
        weights: (...), floating point, or None.
        reduction, ignore_index: as in `cross_entropy`.
        vocab_size: how many columns of the logits are tokens. None: all.

    Returns:
        A scalar, or (...) for `"none"`, float32 (float64 for float64).

    Raises:
        ValueError: a wrong shape, dtype, `reduction` or `vocab_size`; a label out of range.

    >>> token_cross_entropy(torch.zeros(2, 3, 8), torch.full((2, 3), 5))  # ln 8
    tensor(2.0794)
    """
    check_floating(logits=logits, weights=weights)
    check_shapes(logits=(logits, "... V"))
    for name, tensor in (("labels", labels), ("weights", weights)):
        if tensor is not None and tensor.shape != logits.shape[:-1]:
            raise ValueError(
                f"{name} must have the leading shape of logits, {tuple(logits.shape[:-1])}, "
                f"got {tuple(tensor.shape)}"
            )
    check_one_of("reduction", reduction, ("mean", "sum", "none"))
    vocab_size = _check_vocab_size(vocab_size, logits.shape[-1])
    _check_labels(labels, vocab_size, ignore_index)
    scored = (labels != ignore_index)[..., None]
    logits = torch.where(scored, logits[..., :vocab_size].to(compute_dtype(logits)), 0)
    return _token_cross_entropy(logits, labels, weights, reduction, ignore_index)


def _token_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None, reduction: Reduction, ignore_index: int
) -> Tensor:
    """From logits in the compute dtype whose rows without a label are finite."""
    scored = labels != ignore_index
    with autocast_off(logits):
        losses = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            torch.where(scored, labels, -100).reshape(-1).long(),
            reduction="none",
        ).reshape(labels.shape)
    return reduce(losses, scored, weights, reduction)


def reduce(losses: Tensor, scored: Tensor, weights: Tensor | None, reduction: Reduction) -> Tensor:
    """Weight the losses of single tokens, all 0 where not `scored`, and add them up."""
    if weights is not None:
        losses = losses * torch.where(scored, weights.to(losses.dtype), 0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / scored.sum().clamp(min=1) if reduction == "mean" else total


def _tokens_only(weight: Tensor, vocab_size: int | None) -> Tensor:
    """The rows that are tokens; where all are, no slice, whose gradient would be one more copy."""
    return weight if vocab_size in (None, len(weight)) else weight[:vocab_size]


def _check_vocab_size(vocab_size: int | None, rows: int) -> int:
    if rows == 0:
        raise ValueError("the vocabulary must have at least one row, got none")
    if vocab_size is None:
        return rows
    check_integer("vocab_size", vocab_size, least=1)
    if vocab_size > rows:
        raise ValueError(
            f"vocab_size must be at most the vocabulary rows, {rows}, got {vocab_size}"
        )
    return vocab_size


def _check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels must be int32 or int64, got {labels.dtype}")
    if labels.numel() == 0 or labels.device.type != "cpu" or not values_readable(labels):
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))
    if wrong.any():
        raise ValueError(
            f"labels must be in [0, {vocab_size}), the vocabulary, or ignore_index = "
            f"{ignore_index}, got {labels[wrong][0].item()}"
        )
