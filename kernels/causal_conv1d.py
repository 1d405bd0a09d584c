"""The short causal convolution, one filter per channel, in front of a scan.

B batch, T tokens, C channels, W width of the filters.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from brickwork.kernels.backend import autocast_off, choose, compute_dtype
from brickwork.kernels.checks import check_flag, check_floating, check_one_of, check_shapes
from brickwork.kernels.sequences import check_mask, check_seq_ids, sequence_starts

Activation = Literal["silu"] | None


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
    choose("causal_conv1d", backend)
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
    if mask is not None:  # move the real tokens together, to the side where the scan begins
        order = (mask if reverse else ~mask).sort(dim=1, stable=True).indices
        back = order.argsort(dim=1)
        x = _take(x.masked_fill(~mask[..., None], 0), order)
        seq_ids = None if seq_ids is None else seq_ids.gather(1, order)
        gathered = mask.gather(1, order)
    else:
        gathered = None
    T, W = x.shape[1], weight.shape[1]
    dtype = compute_dtype(x, weight, bias, initial_state)
    with autocast_off(x):
        if initial_state is None:
            before = x.new_zeros(x.shape[0], W - 1, x.shape[2])
        else:
            before = rearrange(initial_state, "b c w -> b w c").to(x.dtype)
        extended = torch.cat([x, before.flip(1)] if reverse else [before, x], 1)
        starts = sequence_starts(seq_ids, gathered, reverse=reverse)
        runs = None if starts is None else _runs(starts, W - 1, reverse)
        own = 0 if reverse else W - 1  # where the extended axis holds the tokens themselves
        y = torch.zeros_like(x, dtype=dtype)
        for k in range(W):
            at = slice(k, k + T) if reverse else slice(W - 1 - k, W - 1 - k + T)
            tap = extended[:, at].to(dtype)
            if runs is not None:
                other = runs[:, at] != runs[:, own : own + T]
                tap = tap.masked_fill(other[..., None], 0)
            y = y + tap * weight[:, W - 1 - k].to(dtype)
        if bias is not None:
            y = y + bias.to(dtype)
        if activation == "silu":
            y = torch.nn.functional.silu(y)
        y = y.to(x.dtype)
        final = _last(extended, runs, T, W - 1, gathered, reverse)
        if mask is not None:
            y = _take(y, back).masked_fill(~mask[..., None], 0)
        return CausalConv1dOutput(y, rearrange(final, "b w c -> b c w"))


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


def _runs(starts: Tensor, width: int, reverse: bool) -> Tensor:
    """Numbers of the sequences along the extended axis; the initial state belongs to number 0."""
    if reverse:
        return pad(starts.flip(1).cumsum(1).flip(1), (0, width))
    return pad(starts.cumsum(1), (width, 0))


def _last(
    extended: Tensor,
    runs: Tensor | None,
    T: int,
    width: int,
    gathered: Tensor | None,
    reverse: bool,
) -> Tensor:
    """The `width` tokens that the scan read last, oldest first, zeros if of another sequence."""
    if gathered is None:
        first = torch.full((extended.shape[0],), 0 if reverse else T, device=extended.device)
    else:
        count = gathered.sum(1)
        first = T - count if reverse else count
    at = first[:, None] + torch.arange(width, device=extended.device)
    final = _take(extended, at)
    if runs is not None and T:
        latest = runs[:, 0] if reverse else runs[:, -1]
        final = final.masked_fill((runs.gather(1, at) != latest[:, None])[..., None], 0)
    return final.flip(1) if reverse else final


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of `tensor` (B, T, C) along T by `index` (B, S)."""
    return tensor.gather(1, index[..., None].expand(-1, -1, tensor.shape[2]))
