"""Cross-entropy of a head over chunks of tokens: the logits of one chunk at a time.

S tokens, R scored tokens, C width, V vocabulary.

The gradient of a sum of losses is known when the losses are, so that the logits of a chunk serve
both and are never computed again; single losses learn their gradients in the backward pass, which
computes the logits once more. PyTorch's own `linear_cross_entropy` does the same, but it takes no
weights of tokens, adds up a bfloat16 loss in bfloat16, and returns a gradient without a graph where
a second derivative is asked for, which a larger sum then lacks without a word.

There are no Triton kernels for it. Nearly all of the time goes into the three products with the
head, which the vendors' libraries do; what a kernel could save is some passes over the float32
logits of one chunk, and whether that pays can only be measured on a GPU, which was not done.
Nothing here waits for the GPU, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels.backend import autocast_off, compute_dtype

IGNORED = torch.iinfo(torch.int64).min  # no wrong label of a caller's is taken for it
CHUNK_ENTRIES = 2**24  # logits held at once; with fewer, a large head is read too often


def cross_entropy_chunked(
    hidden_SC: Tensor, weight_VC: Tensor, labels_S: Tensor, share_S: Tensor | None
) -> Tensor:
    """The single losses (S,), or with `share` (S,) the scalar `Σ share · loss`.

    Labels that are `IGNORED` are not scored; `share` is 0 there.
    """
    dtype = torch.promote_types(hidden_SC.dtype, weight_VC.dtype)
    device = hidden_SC.device.type
    # On the CPU products are float32 anyway; rounding what they multiply would gain nothing.
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and device != "cpu" and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    hidden, weight = hidden_SC.to(dtype), weight_VC.to(dtype)
    if share_S is None:
        return token_losses(hidden, weight, labels_S)
    train = torch.is_grad_enabled()
    wanted = [train and hidden.requires_grad, train and weight.requires_grad]
    return summed_loss(hidden, weight, labels_S, share_S, wanted)[0]


@torch.library.custom_op("brickwork::token_losses", mutates_args=())
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The single losses (S,)."""
    return _run(hidden, weight, labels, None, (False, False))[0]


@torch.library.custom_op("brickwork::token_losses_backward", mutates_args=())
def token_losses_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and weight; those not wanted are empty."""
    _, grad_hidden, grad_weight = _run(hidden, weight, labels, grad, wanted)
    return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype)


@torch.library.custom_op("brickwork::summed_loss", mutates_args=())
def summed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, share: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`Σ share · loss`, the single losses, and the gradients of hidden and weight that are wanted
    (the others are empty), not yet rounded to their dtype: upstream may scale them up."""
    losses, grad_hidden, grad_weight = _run(hidden, weight, labels, share, wanted)
    return (losses * share).sum(), losses, grad_hidden, grad_weight


@torch.library.custom_op("brickwork::summed_loss_backward", mutates_args=())
def summed_loss_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    share: Tensor,
    losses: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and share. The first three tensors are here so that the
    result depends on them, and a second derivative raises instead of lacking a term."""
    return (
        (grad_hidden * grad).to(hidden.dtype),
        (grad_weight * grad).to(weight.dtype),
        losses * grad,
    )


def _run(
    hidden: Tensor, weight: Tensor, labels: Tensor, share: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses (S,), and of `Σ share · loss` the gradients of hidden and weight."""
    scored = labels != IGNORED
    with autocast_off(hidden):
        if hidden.device.type != "cpu":  # to find the scored rows would wait for the device
            hidden = torch.where(scored[:, None], hidden, 0)
            labels = torch.where(scored, labels, 0)
            share = None if share is None else torch.where(scored, share, 0)
            losses, *grads = _over_chunks(hidden, weight, labels, share, wanted)
            return torch.where(scored, losses, 0), grads[0], grads[1]
        rows = scored.nonzero()[:, 0]
        share = None if share is None else share[rows]
        losses, grad_hidden, grad_weight = _over_chunks(
            hidden[rows], weight, labels[rows], share, wanted
        )
        all_losses = losses.new_zeros(len(labels)).index_copy_(0, rows, losses)
        if wanted[0]:
            whole = losses.new_zeros(hidden.shape)
            grad_hidden = whole.index_copy_(0, rows, grad_hidden)
        return all_losses, grad_hidden, grad_weight


def _over_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, share: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """`_run` for R rows that are all scored; the gradients in the compute dtype."""
    (count, width), vocabulary = hidden.shape, len(weight)
    wide = compute_dtype(hidden)
    # Products of narrow numbers, added up and returned wide; float16 has too little range for it.
    narrow = hidden.is_cuda and hidden.dtype == torch.bfloat16
    head = weight if narrow else weight.to(wide)
    losses = torch.empty(count, dtype=wide, device=hidden.device)
    grad_hidden = losses.new_zeros(count if wanted[0] else 0, width)
    grad_weight = losses.new_zeros(vocabulary if wanted[1] else 0, width)
    # As many logits as hidden states, so that memory grows with S as that of any layer does.
    step = min(count, max(1, max(CHUNK_ENTRIES, hidden.numel()) // vocabulary))
    buffer = torch.empty(0 if narrow else step, vocabulary, dtype=wide, device=hidden.device)
    for start in range(0, count, step or 1):
        mine = slice(start, start + step)
        rows, label = hidden[mine].to(head.dtype), labels[mine, None]
        if narrow:
            logits = torch.mm(rows, head.mT, out_dtype=wide)
        else:
            logits = torch.mm(rows, head.mT, out=buffer[: len(rows)])
        target, top = logits.gather(1, label), logits.amax(1, keepdim=True)
        total = logits.sub_(top).exp_().sum(1, keepdim=True)
        losses[mine] = (total.log() - (target - top))[:, 0]
        if share is None:
            continue
        part = share[mine, None].to(wide)
        grad = logits.mul_(part / total)
        grad = grad.scatter_(1, label, grad.gather(1, label) - part).to(head.dtype)
        for want, whole, left, right in (
            (wanted[0], grad_hidden[mine], grad, head),
            (wanted[1], grad_weight, grad.mT, rows),
        ):
            if want and narrow:
                whole += torch.mm(left, right, out_dtype=wide)
            elif want:
                whole.addmm_(left, right)
    return losses, grad_hidden, grad_weight


@token_losses.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return hidden.new_empty(labels.shape, dtype=compute_dtype(hidden))


@token_losses_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    return _fake_gradients(hidden, weight, wanted, None)


@summed_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, labels: Tensor, share: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses = hidden.new_empty(labels.shape, dtype=compute_dtype(hidden))
    return losses.new_empty(()), losses, *_fake_gradients(hidden, weight, wanted, losses.dtype)


@summed_loss_backward.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    share: Tensor,
    losses: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(grad_hidden.shape),
        weight.new_empty(grad_weight.shape),
        torch.empty_like(losses),
    )


def _fake_gradients(
    hidden: Tensor, weight: Tensor, wanted: Sequence[bool], dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    count, width = hidden.shape
    return (
        hidden.new_empty(count if wanted[0] else 0, width, dtype=dtype),
        weight.new_empty(len(weight) if wanted[1] else 0, width, dtype=dtype),
    )


def _setup_single(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_single(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:2])
    found = token_losses_backward(grad, *ctx.saved_tensors, wanted)
    return (*(g if want else None for g, want in zip(found, wanted)), None)


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, losses, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(losses, grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)
    hidden, weight, _, share, ctx.wanted = inputs
    ctx.save_for_backward(hidden, weight, share, losses, grad_hidden, grad_weight)


def _backward_sum(ctx: Any, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    needs_hidden, needs_weight, _, needs_share, _ = ctx.needs_input_grad
    if grad is None:
        return (None,) * 5
    if (needs_hidden and not ctx.wanted[0]) or (needs_weight and not ctx.wanted[1]):
        raise RuntimeError("cross_entropy: the graph was made for other inputs that need gradients")
    by_hidden, by_weight, by_share = summed_loss_backward(grad, *ctx.saved_tensors)
    return (
        by_hidden if needs_hidden else None,
        by_weight if needs_weight else None,
        None,
        by_share if needs_share else None,
        None,
    )


def _no_second_backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise RuntimeError(
        "cross_entropy: backend 'chunked' can be differentiated once; take backend='torch', or "
        "brickwork.kernels.backend.prefer('torch'), for second derivatives"
    )


token_losses.register_autograd(_backward_single, setup_context=_setup_single)
token_losses_backward.register_autograd(_no_second_backward)
summed_loss.register_autograd(_backward_sum, setup_context=_setup_sum)
summed_loss_backward.register_autograd(_no_second_backward)
