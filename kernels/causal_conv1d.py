"""The short causal convolution, one filter per channel, in front of a scan.

B batch, T tokens, C channels, W width of the filters.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from brickwork.kernels.backend import autocast_off, choose, compute_dtype, why_not_opaque
from brickwork.kernels.checks import check_flag, check_floating, check_one_of, check_shapes
from brickwork.kernels.sequences import (
    check_mask,
    check_seq_ids,
    scan_order,
    scan_ranks,
    sequence_starts,
    take_tokens,
    why_not_plain,
)

Activation = Literal["silu"] | None
WIDEST_IN_TRITON = 8  # the window and its gradients must fit the registers


class CausalConv1dOutput(NamedTuple):
    """`y` (B, T, C) and `final_state` (B, C, W - 1), both in x's dtype."""

    y: Tensor
    final_state: Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    reverse: bool = False,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> CausalConv1dOutput:
    """Convolve every channel with its own filter over the tokens so far.

    `y_t = act(bias + Σ_k weight[W-1-k] · x_{t-k})`, k = 0 … W-1; `reverse` reads x_{t+k} instead.
    Tokens before the first of their sequence are 0, or come from `initial_state`.

    Paper: Gu and Dao, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces*, 2023.

    Arguments:
        x: (B, T, C), floating point.
        weight: (C, W), any width of at least 1; the last column meets the token itself.
        bias: (C,).
        activation: None or `"silu"`.
        reverse: run from the last token to the first.
        mask: (B, T), True or 1 at real tokens. The others are passed over: the filter spans real
            tokens only, and y = 0 at the others.
        seq_ids: (B, T), integers that mark packed sequences; the filter never spans two
            (see `brickwork.kernels.sequences`).
        initial_state: (B, C, W - 1), the tokens before the first in scan direction, the most
            recent last; they belong to that first token's sequence.
        backend: see `brickwork.kernels.backend`.

    Returns:
        CausalConv1dOutput(y, final_state): the last W - 1 real tokens of the last sequence, zeros
        where it has fewer; what `initial_state` takes to go on.

    Raises:
        ValueError: a wrong shape, dtype, activation or flag.
        BackendUnavailable: a backend was named that cannot run here.

    >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    >>> y, state = causal_conv1d(x, torch.tensor([[10.0, 1.0]]))
    >>> y.flatten(), state.flatten()
    (tensor([ 1., 12., 23.]), tensor([3.]))
    """
    size = check_conv(x, weight, bias, activation, reverse, initial_state)
    mask = check_mask(mask, size)
    check_seq_ids(seq_ids, size)
    chosen = choose(
        "causal_conv1d",
        backend,
        torch=lambda: why_not_plain(x),
        cpu=lambda: _why_not_cpu(x),
        causal_conv1d=lambda: _why_not_package(x, weight, bias, initial_state, mask),
        triton=lambda: _why_not_triton(x, weight, bias, initial_state),
        chunked=lambda: _why_not_chunked(x),
    )
    if chosen == "torch":
        return causal_conv1d_reference(
            x,
            weight,
            bias,
            activation=activation,
            reverse=reverse,
            mask=mask,
            seq_ids=seq_ids,
            initial_state=initial_state,
        )
    starts = sequence_starts(seq_ids, mask, reverse=reverse)
    if chosen == "causal_conv1d":
        from brickwork.kernels.causal_conv1d_causal_conv1d import causal_conv1d_causal_conv1d

        y = causal_conv1d_causal_conv1d(x, weight, bias, initial_state, starts, activation, reverse)
    elif chosen == "cpu":
        from brickwork.kernels.causal_conv1d_cpu import causal_conv1d_cpu

        y = causal_conv1d_cpu(x, weight, bias, initial_state, mask, starts, activation, reverse)
    elif chosen == "triton":
        from brickwork.kernels.causal_conv1d_triton import causal_conv1d_triton

        y = causal_conv1d_triton(x, weight, bias, initial_state, mask, starts, activation, reverse)
    else:
        from brickwork.kernels.causal_conv1d_chunked import causal_conv1d_chunked

        y = causal_conv1d_chunked(x, weight, bias, initial_state, mask, starts, activation, reverse)
    final = last_tokens(x, initial_state, mask, starts, width=weight.shape[1] - 1, reverse=reverse)
    return CausalConv1dOutput(y, final)


def _why_not_cpu(x: Tensor) -> str | None:
    from brickwork.kernels.causal_conv1d_cpu import why_not

    return why_not(x)


def _why_not_triton(x: Tensor, weight: Tensor, *others: Tensor | None) -> str | None:
    from brickwork.kernels.triton_support import why_not

    if weight.shape[1] > WIDEST_IN_TRITON:
        return f"it takes widths up to {WIDEST_IN_TRITON}, got {weight.shape[1]}"
    return why_not(x, weight, *others)


def _why_not_package(*tensors: Any) -> str | None:
    from brickwork.kernels.causal_conv1d_causal_conv1d import why_not

    return why_not(*tensors)


def _why_not_chunked(x: Tensor) -> str | None:
    if x.device.type != "cpu":
        return f"it takes CPU tensors, got {x.device.type}"
    return why_not_opaque()


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    reverse: bool = False,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> CausalConv1dOutput:
    """The specification of `causal_conv1d`."""
    starts = sequence_starts(seq_ids, mask, reverse=reverse)
    final = last_tokens(x, initial_state, mask, starts, width=weight.shape[1] - 1, reverse=reverse)
    with autocast_off(x):
        if mask is None:
            y = _convolve(x, weight, bias, initial_state, starts, activation, reverse)
        else:  # move the real tokens together, in scan order, and their results back
            order = scan_order(mask, reverse=reverse)
            together = take_tokens(x.masked_fill(~mask[..., None], 0), order)
            starts = None if starts is None else starts.gather(1, order)
            y = _convolve(together, weight, bias, initial_state, starts, activation, False)
            y = take_tokens(y, scan_ranks(mask, reverse=reverse)).masked_fill(~mask[..., None], 0)
    return CausalConv1dOutput(y, final)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
    activation: Activation,
    reverse: bool,
) -> Tensor:
    T, W = x.shape[1], weight.shape[1]
    dtype = compute_dtype(x, weight, bias, initial_state)
    if initial_state is None:
        before = x.new_zeros(x.shape[0], W - 1, x.shape[2])
    else:
        before = initial_state.to(x.dtype).mT
    extended = torch.cat([x, before.flip(1)] if reverse else [before, x], 1)
    y = torch.zeros_like(x, dtype=dtype)
    for k in range(W):
        first = k if reverse else W - 1 - k
        tap = extended[:, first : first + T].to(dtype)
        if starts is not None:
            tap = tap.masked_fill(starts_within(starts, k, reverse)[..., None], 0)
        y = y + tap * weight[:, W - 1 - k].to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return (torch.nn.functional.silu(y) if activation == "silu" else y).to(x.dtype)


def last_tokens(
    x: Tensor,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    *,
    width: int,
    reverse: bool,
) -> Tensor:
    """(B, C, width): the real tokens that a scan over x (B, T, C) reads last, oldest first.

    Before them those of `initial_state`, or zeros; zeros too where they are of another sequence.
    """
    batch, T, channels = x.shape
    if initial_state is None:
        initial_state = x.new_zeros(batch, channels, width)
    before = initial_state.to(x.dtype).mT
    if T == 0 or width == 0:
        return before.mT
    if mask is None:
        count = torch.full((batch, 1), T, device=x.device)
        order = torch.arange(T, device=x.device).expand(batch, T)
        order = order.flip(1) if reverse else order
    else:
        count, order = mask.sum(1, keepdim=True), scan_order(mask, reverse=reverse)
    rank = count + torch.arange(-width, 0, device=x.device)
    at = rank.clamp(min=0)
    tokens = take_tokens(x, order.gather(1, at))
    earlier = take_tokens(before, (rank + width).clamp(max=width - 1))
    final = torch.where((rank < 0)[..., None], earlier, tokens)
    if starts is not None:
        runs = starts.gather(1, order).cumsum(1)
        run = runs.gather(1, at)  # that of the initial state is the first token's, 0
        final = final.masked_fill((run != runs[:, -1:])[..., None], 0)
    return final.mT


def starts_within(starts: Tensor, count: int, reverse: bool) -> Tensor:
    """(B, T), whether a sequence starts at a token or at one of the `count` - 1 before it."""
    T = starts.shape[1]
    found = torch.zeros_like(starts)
    for k in range(count):
        padded = pad(starts, (0, k) if reverse else (k, 0))
        found = found | (padded[:, k:] if reverse else padded[:, :T])
    return found


def check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    reverse: bool,
    initial_state: Tensor | None,
) -> tuple[int, int]:
    """Raise unless the arguments of `causal_conv1d` fit; the sizes (B, T)."""
    check_floating(x=x, weight=weight, bias=bias, initial_state=initial_state)
    check_one_of("activation", activation, (None, "silu"))
    check_flag("reverse", reverse)
    sizes = check_shapes(x=(x, "B T C"), weight=(weight, "C W"), bias=(bias, "C"))
    if sizes["W"] < 1:
        raise ValueError(f"weight must have a width W of at least 1, got {tuple(weight.shape)}")
    state = (sizes["B"], sizes["C"], sizes["W"] - 1)
    if initial_state is not None and tuple(initial_state.shape) != state:
        raise ValueError(
            f"initial_state must have shape (B, C, W - 1) = {state}, "
            f"got {tuple(initial_state.shape)}"
        )
    return sizes["B"], sizes["T"]
