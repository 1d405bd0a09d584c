"""The selective scan of Mamba-1: a linear recurrence with an input-dependent step per channel.

B batch, T tokens, E channels, N state, G groups of B and C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype, why_not_opaque
from brickwork.kernels.checks import check_flag, check_floating, check_shapes
from brickwork.kernels.recurrence import recur
from brickwork.kernels.sequences import (
    check_mask,
    check_seq_ids,
    sequence_starts,
    why_not_plain,
)


class SelectiveScanOutput(NamedTuple):
    """`y` (B, T, E) in x's dtype and `final_state` (B, E, N) in float32 (float64 for float64)."""

    y: Tensor
    final_state: Tensor


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    softplus: bool = False,
    reverse: bool = False,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> SelectiveScanOutput:
    """Run every channel's state through the tokens.

    With Δ_t = delta_t + delta_bias (softplus of it if `softplus`), for every channel e
    `h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_t` (N numbers) and
    `y_t = (C_t · h_t + D x_t) · silu(z_t)`, the last factor only if z is given.

    Paper: Gu and Dao, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces*, 2023.

    Arguments:
        x, delta, z: (B, T, E), floating point.
        A: (E, N), the continuous-time decay, negative in a stable model.
        B, C: (B, T, N), or (B, T, G, N) where channel e belongs to group e // (E / G).
        D, delta_bias: (E,).
        softplus: apply softplus to the step sizes, after the bias.
        reverse: run from the last token to the first.
        mask: (B, T), True or 1 at real tokens. The others are passed over: state kept, y = 0.
        seq_ids: (B, T), integers that mark packed sequences; the state is 0 where one starts
            (see `brickwork.kernels.sequences`).
        initial_state: (B, E, N) before the first token in scan direction; it belongs to that
            token's sequence.
        backend: see `brickwork.kernels.backend`.

    Returns:
        SelectiveScanOutput(y, final_state): the state after the last real token in scan direction,
        the leftmost if `reverse`. Gradients flow through both.

    Raises:
        ValueError: a wrong shape, dtype or flag.
        BackendUnavailable: a backend was named that cannot run here.

    >>> one = torch.ones(1, 3, 1)
    >>> y, state = selective_scan(one, one, torch.zeros(1, 1), one, one)
    >>> y.flatten(), state.flatten()
    (tensor([1., 2., 3.]), tensor([3.]))
    """
    size = check_scan(x, delta, A, B, C, D, z, delta_bias, softplus, reverse, initial_state)
    mask = check_mask(mask, size)
    check_seq_ids(seq_ids, size)
    tensors = {"D": D, "z": z, "delta_bias": delta_bias, "initial_state": initial_state}
    chosen = choose_scan(backend, x, delta, A, B, C, **tensors, mask=mask, seq_ids=seq_ids)
    options: dict[str, Any] = {
        **tensors,
        "softplus": softplus,
        "reverse": reverse,
        "mask": mask,
    }
    if chosen == "torch":
        return selective_scan_reference(x, delta, A, B, C, seq_ids=seq_ids, **options)
    # what every faster backend takes: groups spelt out, sequence ids as the places where one starts
    B, C = (t.unsqueeze(2) if t.dim() == 3 else t for t in (B, C))
    options["starts"] = sequence_starts(seq_ids, mask, reverse=reverse)
    if chosen == "cpu":
        from brickwork.kernels.selective_scan_cpu import selective_scan_cpu

        return SelectiveScanOutput(*selective_scan_cpu(x, delta, A, B, C, **options))
    if chosen == "mamba_ssm":
        from brickwork.kernels.selective_scan_mamba_ssm import selective_scan_mamba_ssm

        return SelectiveScanOutput(*selective_scan_mamba_ssm(x, delta, A, B, C, **options))
    if chosen == "triton":
        from brickwork.kernels.selective_scan_triton import selective_scan_triton

        return SelectiveScanOutput(*selective_scan_triton(x, delta, A, B, C, **options))
    from brickwork.kernels.selective_scan_chunked import selective_scan_chunked

    return SelectiveScanOutput(*selective_scan_chunked(x, delta, A, B, C, **options))


def choose_scan(
    backend: str,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    **sequences: Tensor | None,
) -> str:
    """The backend that runs the scan of these checked arguments."""
    tensors = {"D": D, "z": z, "delta_bias": delta_bias, "initial_state": initial_state}
    return choose(
        "selective_scan",
        backend,
        torch=lambda: why_not_plain(x),
        cpu=lambda: _why_not_cpu(x),
        mamba_ssm=lambda: _why_not_mamba_ssm(x, delta, A, B, C, **tensors, **sequences),
        triton=lambda: _why_not_triton(x, delta, A, B, C, *tensors.values()),
        chunked=why_not_opaque,
    )


def _why_not_cpu(x: Tensor) -> str | None:
    from brickwork.kernels.selective_scan_cpu import why_not

    return why_not(x)


def _why_not_triton(*tensors: Tensor | None) -> str | None:
    from brickwork.kernels.triton_support import why_not

    return why_not(*tensors)


def _why_not_mamba_ssm(*tensors: Tensor, **options: Any) -> str | None:
    from brickwork.kernels.selective_scan_mamba_ssm import why_not

    return why_not(*tensors, **options)


def selective_scan_reference(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    softplus: bool = False,
    reverse: bool = False,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> SelectiveScanOutput:
    """The specification of `selective_scan`: one step after the other."""
    dtype = compute_dtype(x, delta, A, B, C, D, z, delta_bias, initial_state)
    N = A.shape[1]
    starts = sequence_starts(seq_ids, mask, reverse=reverse)
    with autocast_off(x):
        wide, delta, B, C = (t.to(dtype) for t in (x, delta, B, C))
        if mask is not None:
            wide, delta, B, C = (keep_real(t, mask) for t in (wide, delta, B, C))
        step = step_sizes(delta, delta_bias, softplus)
        if mask is not None:
            step = keep_real(step, mask)
        B, C = (t.unsqueeze(2) if t.dim() == 3 else t for t in (B, C))
        G = B.shape[2]
        decay_rate = rearrange(A.to(dtype), "(g k) n -> g k n", g=G)
        inputs = [
            rearrange(step, "b t (g k) -> b t g k 1", g=G),
            rearrange(step * wide, "b t (g k) -> b t g k 1", g=G),
            rearrange(B, "b t g n -> b t g 1 n"),
            rearrange(C, "b t g n -> b t g 1 n"),
        ]
        if starts is not None:
            inputs.append(rearrange(starts, "b t -> b t 1 1 1"))
        if initial_state is None:
            state = wide.new_zeros(x.shape[0], *decay_rate.shape)
        else:
            state = rearrange(initial_state.to(dtype), "b (g k) n -> b g k n", g=G)

        def token(
            state: Tensor, inputs: Sequence[Tensor], decay_rate: Tensor
        ) -> tuple[Tensor, Tensor]:
            step, push, B, C, *start = (t[:, 0] for t in inputs)
            state = state.masked_fill(start[0], 0) if start else state
            state = torch.exp(step * decay_rate) * state + push * B
            return state, (state * C).sum(-1)[:, None]

        if x.shape[1]:
            state, y = recur(token, state, inputs, [decay_rate], axis=1, size=1, reverse=reverse)
            y = y.flatten(2)
        else:
            y = torch.zeros_like(wide)
        if D is not None:
            y = y + D.to(dtype) * wide
        if z is not None:
            gate = z.to(dtype) if mask is None else keep_real(z.to(dtype), mask)
            y = y * torch.nn.functional.silu(gate)
        y = y if mask is None else keep_real(y, mask)  # 0 there, even of a state that is NaN
        return SelectiveScanOutput(y.to(x.dtype), state.reshape(x.shape[0], x.shape[2], N))


def step_sizes(delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Δ from its raw values: bias added, then softplus if asked, in delta's dtype."""
    if bias is not None:
        delta = delta + bias.to(delta.dtype)
    # log1p(exp(40)) = 40 in float64 too, so the switch to the identity changes no bit
    return torch.nn.functional.softplus(delta, threshold=40.0) if softplus else delta


def check_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    softplus: bool,
    reverse: bool,
    initial_state: Tensor | None,
) -> tuple[int, int]:
    """Raise unless the arguments of `selective_scan` fit; the sizes (B, T)."""
    check_floating(
        x=x,
        delta=delta,
        A=A,
        B=B,
        C=C,
        D=D,
        z=z,
        delta_bias=delta_bias,
        initial_state=initial_state,
    )
    check_flag("softplus", softplus)
    check_flag("reverse", reverse)
    sizes = check_shapes(
        x=(x, "B T E"),
        delta=(delta, "B T E"),
        A=(A, "E N"),
        B=(B, "B T N" if B.dim() == 3 else "B T G N"),
        C=(C, "B T N" if B.dim() == 3 else "B T G N"),
        D=(D, "E"),
        z=(z, "B T E"),
        delta_bias=(delta_bias, "E"),
        initial_state=(initial_state, "B E N"),
    )
    groups = sizes.get("G", 1)
    if groups < 1 or sizes["E"] % groups:
        raise ValueError(
            f"the groups of B must divide the channels of x, got G = {groups}, E = {sizes['E']}"
        )
    return sizes["B"], sizes["T"]


def keep_real(tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor` (B, T, ...) with zeros at masked tokens, whatever was there."""
    return tensor.masked_fill(~mask.reshape(mask.shape + (1,) * (tensor.dim() - 2)), 0)
