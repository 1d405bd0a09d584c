"""The scan of Mamba-2: one decay per head, so that chunks of tokens become matrix products.

B batch, T tokens, H heads, P width of a head, G groups of B and C, N state, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype, why_not_opaque
from brickwork.kernels.checks import check_flag, check_floating, check_integer, check_shapes
from brickwork.kernels.recurrence import recur
from brickwork.kernels.selective_scan import keep_real, step_sizes
from brickwork.kernels.sequences import (
    check_mask,
    check_seq_ids,
    sequence_starts,
    why_not_plain,
)

CHUNK = 64


class SSDScanOutput(NamedTuple):
    """`y` (B, T, H, P) in x's dtype, `final_state` (B, H, P, N) in float32 (or float64)."""

    y: Tensor
    final_state: Tensor


def ssd_scan(
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
    chunk_size: int | None = None,
    backend: str = "auto",
) -> SSDScanOutput:
    """Run every head's matrix state through the tokens.

    With Δ_t = delta_t + delta_bias (softplus of it if `softplus`), for every head
    `S_t = exp(Δ_t A) S_{t-1} + Δ_t x_t B_tᵀ` (P × N numbers) and
    `y_t = (S_t C_t + D x_t) · silu(z_t)`, the last factor only if z is given.

    Paper: Dao and Gu, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality*, 2024.

    Arguments:
        x, z: (B, T, H, P), floating point.
        delta: (B, T, H).
        A: (H,), the continuous-time decay, negative in a stable model.
        B, C: (B, T, G, N); head h belongs to group h // (H / G).
        D: (H,) or (H, P).
        delta_bias: (H,).
        softplus: apply softplus to the step sizes, after the bias.
        reverse: run from the last token to the first.
        mask: (B, T), True or 1 at real tokens. The others are passed over: state kept, y = 0.
        seq_ids: (B, T), integers that mark packed sequences; the state is 0 where one starts
            (see `brickwork.kernels.sequences`). NaN and infinities stay in their sequence with
            backend "cpu" only: the others multiply them by zeros within a chunk.
        initial_state: (B, H, P, N) before the first token in scan direction; it belongs to that
            token's sequence.
        chunk_size: tokens per matrix product; changes the speed, not the result. T need not be a
            multiple of it.
        backend: see `brickwork.kernels.backend`.

    Returns:
        SSDScanOutput(y, final_state): the state after the last real token in scan direction, the
        leftmost if `reverse`. Gradients flow through both.

    Raises:
        ValueError: a wrong shape, dtype, flag or chunk size.
        BackendUnavailable: a backend was named that cannot run here.

    >>> one = torch.ones(1, 3, 1, 1)
    >>> y, state = ssd_scan(one, one[..., 0], torch.zeros(1), one, one)
    >>> y.flatten(), state.flatten()
    (tensor([1., 2., 3.]), tensor([3.]))
    """
    size = check_ssd(
        x, delta, A, B, C, D, z, delta_bias, softplus, reverse, initial_state, chunk_size
    )
    mask = check_mask(mask, size)
    check_seq_ids(seq_ids, size)
    floats = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    chosen = choose(
        "ssd_scan",
        backend,
        torch=lambda: why_not_plain(x),
        cpu=lambda: _why_not_cpu(x, B),
        triton=lambda: _why_not_triton(*floats),
        chunked=why_not_opaque,
    )
    options: dict[str, Any] = {
        "D": D,
        "z": z,
        "delta_bias": delta_bias,
        "softplus": softplus,
        "reverse": reverse,
        "mask": mask,
        "initial_state": initial_state,
        "chunk_size": chunk_size,
    }
    if chosen == "torch":
        return ssd_scan_reference(x, delta, A, B, C, seq_ids=seq_ids, **options)
    options["starts"] = sequence_starts(seq_ids, mask, reverse=reverse)
    if chosen == "triton":
        from brickwork.kernels.ssd_scan_triton import ssd_scan_triton

        return SSDScanOutput(*ssd_scan_triton(x, delta, A, B, C, **options))
    options["chunk_size"] = chunk_size or CHUNK
    if chosen == "cpu":
        from brickwork.kernels.ssd_scan_cpu import ssd_scan_cpu

        return SSDScanOutput(*ssd_scan_cpu(x, delta, A, B, C, **options))
    from brickwork.kernels.ssd_scan_chunked import ssd_scan_chunked

    return SSDScanOutput(*ssd_scan_chunked(x, delta, A, B, C, **options))


def _why_not_cpu(x: Tensor, B: Tensor) -> str | None:
    from brickwork.kernels.ssd_scan_cpu import why_not

    return why_not(x, B)


def _why_not_triton(*tensors: Tensor | None) -> str | None:
    from brickwork.kernels.triton_support import why_not

    return why_not(*tensors)


def ssd_scan_reference(
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
    chunk_size: int | None = None,
) -> SSDScanOutput:
    """The specification of `ssd_scan`, in the chunked form.

    Within a chunk, with L_ij = exp(Σ a_k over the tokens k after j up to i), a = Δ A:
    `y_i = exp(Σ a_k up to i) S C_i + Σ_{j ≤ i} L_ij (C_i · B_j) Δ_j x_j`, S the state before it.
    """
    dtype = compute_dtype(x, delta, A, B, C, D, z, delta_bias, initial_state)
    H, G = x.shape[2], B.shape[2]
    Q = chunk_size or CHUNK
    starts = sequence_starts(seq_ids, mask, reverse=reverse)
    with autocast_off(x):
        wide, delta, B, C = (t.to(dtype) for t in (x, delta, B, C))
        if mask is not None:
            wide, delta, B, C = (keep_real(t, mask) for t in (wide, delta, B, C))
        step = step_sizes(delta, delta_bias, softplus)
        if mask is not None:
            step = keep_real(step, mask)
        push = rearrange(wide * step[..., None], "b t (g k) p -> b g k t p", g=G)
        decay = rearrange(step * A.to(dtype), "b t (g k) -> b g k t", g=G)
        B, C = (rearrange(t, "b t g n -> b g 1 t n") for t in (B, C))
        if initial_state is None:
            state = push.new_zeros(x.shape[0], G, H // G, x.shape[3], B.shape[-1])
        else:
            state = rearrange(initial_state.to(dtype), "b (g k) p n -> b g k p n", g=G)
        inputs = [decay, push, B, C]
        if starts is not None:
            inputs.append(rearrange(starts, "b t -> b 1 1 t"))

        def chunk(state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            decay, push, B, C, *start = inputs
            sums, so_far = segment_sums(decay, start[0][:, 0, 0] if start else None, reverse)
            last = 0 if reverse else -1
            pairs = C @ B.mT * sums.exp()
            y = pairs @ push + so_far.exp()[..., None] * (C @ state.mT)
            kept = push * sums[..., last, :, None].exp()
            return so_far[..., last, None, None].exp() * state + kept.mT @ B, y

        if x.shape[1]:
            state, y = recur(chunk, state, inputs, axis=3, size=Q, reverse=reverse)
        else:
            y = push
        y = rearrange(y, "b g k t p -> b t (g k) p")
        if D is not None:
            y = y + (D if D.dim() == 2 else D[:, None]).to(dtype) * wide
        if z is not None:
            gate = z.to(dtype) if mask is None else keep_real(z.to(dtype), mask)
            y = y * torch.nn.functional.silu(gate)
        if mask is not None:
            y = keep_real(y, mask)
        return SSDScanOutput(y.to(x.dtype), rearrange(state, "b g k p n -> b (g k) p n"))


def segment_sums(decay: Tensor, starts: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """Exponents of a chunk (..., Q): from each token j to each token i (..., Q, Q), and up to i.

    -inf where j comes after i in scan direction or a sequence starts in between. Every sum is
    taken on its own: a difference of running sums loses the small steps after a large one.
    """
    Q = decay.shape[-1]
    ones = torch.ones(Q, Q, dtype=torch.bool, device=decay.device)
    after, not_before = (ones.triu(1), ones.triu()) if reverse else (ones.tril(-1), ones.tril())
    terms = decay[..., :, None].masked_fill(~after, 0)
    if reverse:
        sums, so_far = terms.flip(-2).cumsum(-2).flip(-2), decay.flip(-1).cumsum(-1).flip(-1)
    else:
        sums, so_far = terms.cumsum(-2), decay.cumsum(-1)
    allowed = not_before
    if starts is not None:
        runs = starts.flip(1).cumsum(1).flip(1) if reverse else starts.cumsum(1)
        runs = runs.reshape(runs.shape[0], *(1,) * (decay.dim() - 2), Q)
        allowed = not_before & (runs[..., :, None] == runs[..., None, :])
        so_far = so_far.masked_fill(runs != 0, -torch.inf)
    # masked before exp: exp of a forbidden sum may be inf, and inf · 0 is NaN in backward
    return sums.masked_fill(~allowed, -torch.inf), so_far


def check_ssd(
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
    chunk_size: int | None,
) -> tuple[int, int]:
    """Raise unless the arguments of `ssd_scan` fit; the sizes (B, T)."""
    check_floating(x=x, delta=delta, A=A, B=B, C=C, D=D, z=z)
    check_floating(delta_bias=delta_bias, initial_state=initial_state)
    check_flag("softplus", softplus)
    check_flag("reverse", reverse)
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, least=1)
    sizes = check_shapes(
        x=(x, "B T H P"),
        delta=(delta, "B T H"),
        A=(A, "H"),
        B=(B, "B T G N"),
        C=(C, "B T G N"),
        D=(D, "H P" if D is not None and D.dim() == 2 else "H"),
        z=(z, "B T H P"),
        delta_bias=(delta_bias, "H"),
        initial_state=(initial_state, "B H P N"),
    )
    if sizes["G"] < 1 or sizes["H"] % sizes["G"]:
        raise ValueError(
            f"the groups of B must divide the heads of x, got G = {sizes['G']}, H = {sizes['H']}"
        )
    return sizes["B"], sizes["T"]
