"""The Mamba-1 mixer.

B batch, T tokens, C model width, I = expand · C inner width, R rank of the step sizes, N state,
W width of the convolution.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from brickwork.blocks.hooks import has_hooks
from brickwork.blocks.linear import Linear
from brickwork.blocks.mamba_mixer import (
    DepthwiseFilter,
    MambaMixer,
    MambaState,
    StepProjection,
    check_sizes,
    decay_rates,
)
from brickwork.kernels.bidirectional_conv1d import bidirectional_conv1d
from brickwork.kernels.bidirectional_scan import ScanInputs, bidirectional_scan
from brickwork.kernels.selective_scan import selective_scan


class Mamba1(MambaMixer):
    """Selective state-space mixer with a step size per channel (Mamba).

    `x, z = in_proj(u)`; `x = silu(conv(x))`; `dt, B, C = x_proj(x)`;
    `Δ = softplus(dt_proj(dt))`; per channel `h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_t` with
    `A = -exp(A_log)`; `out_proj((C_t · h_t + D x_t) · silu(z_t))`.

    Paper: Gu and Dao, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces*, 2023.

    Arguments:
        dim: width C.
        d_state: N, numbers of state per channel.
        d_conv: W, tokens that the convolution spans, at least 1.
        expand: I / C.
        dt_rank: R, by default C / 16 rounded up.
        bias: of in_proj and out_proj.
        conv_bias: of the convolution.

    Called with x (B, T, C) and
        mask: (B, T), True at real tokens. The others are passed over: they change nothing for any
            real token, on whichever side they stand, and their result is 0.
        seq_ids: (B, T), integers that mark packed sequences; each gets what it would get alone.
        reverse: read from right to left, without flipped copies.
        state: a MambaState to go on from, and to update: chunks and single tokens then give what
            the whole sequence gives.

    Returns (B, T, C). Parameter names and shapes are mamba-ssm's; A_log, D and dt_proj.bias stay
    float32 under every cast. Raises ValueError for other shapes or a state of another batch.

    >>> mixer = Mamba1(16)
    >>> x = torch.randn(2, 5, 16)
    >>> state = MambaState()
    >>> halves = [mixer(part, state=state) for part in x.split([3, 2], dim=1)]
    >>> torch.allclose(torch.cat(halves, 1), mixer(x), atol=1e-5)
    True
    """

    float32_parameters = ("A_log", "D", "dt_proj.bias")

    def __init__(
        self,
        dim: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
    ) -> None:
        super().__init__(dim)
        check_sizes(dim=dim, d_state=d_state, d_conv=d_conv, expand=expand)
        dt_rank = math.ceil(dim / 16) if dt_rank is None else dt_rank
        check_sizes(dt_rank=dt_rank)
        self.d_state = d_state
        self.dt_rank = dt_rank
        inner = expand * dim
        self.in_proj = Linear(dim, 2 * inner, bias=bias)
        self.conv1d = DepthwiseFilter(inner, width=d_conv, bias=conv_bias)
        self.x_proj = Linear(inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = StepProjection(dt_rank, dim=inner)
        self.A_log = nn.Parameter(torch.empty(inner, d_state, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        self.out_proj = Linear(inner, dim, bias=bias)
        self._reset_own_parameters()

    def reset_parameters(self) -> None:
        """A = -1 … -N, D = 1, step sizes log-uniform in [1e-3, 1e-1], layers as they do."""
        for layer in (self.in_proj, self.conv1d, self.x_proj, self.dt_proj, self.out_proj):
            layer.reset_parameters()
        self._reset_own_parameters()

    def _reset_own_parameters(self) -> None:
        rates = torch.arange(1, self.d_state + 1, dtype=torch.float32, device=self.A_log.device)
        with torch.no_grad():
            self.A_log.copy_(rates.log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        return projected.chunk(2, -1)

    def mix(
        self,
        parts: tuple[Tensor, ...],
        *,
        mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
        reverse: bool = False,
        state: MambaState | None = None,
    ) -> Tensor:
        conv = self.conv1d(
            parts[0],
            activation="silu",
            reverse=reverse,
            mask=mask,
            seq_ids=seq_ids,
            initial_state=None if state is None else state.conv,
        )
        inputs = self._scan_inputs(conv.y)
        scan = selective_scan(
            *inputs[:5],
            D=inputs.D,
            z=parts[1],
            delta_bias=inputs.delta_bias,
            softplus=True,
            reverse=reverse,
            mask=mask,
            seq_ids=seq_ids,
            initial_state=None if state is None else state.scan,
        )
        if state is not None:
            state.update(conv.final_state, scan.final_state, reverse)
        return scan.y

    def mix_both(
        self,
        backward: MambaMixer,
        parts: tuple[Tensor, ...],
        *,
        mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
    ) -> Tensor:
        if not (
            isinstance(backward, Mamba1) and self._mixes_plainly() and backward._mixes_plainly()
        ):
            return super().mix_both(backward, parts, mask=mask, seq_ids=seq_ids)
        x, z = parts
        options: Any = {"mask": mask, "seq_ids": seq_ids}
        filters = self.conv1d.filters(), backward.conv1d.filters()
        x, x_back = bidirectional_conv1d(x, *filters, activation="silu", **options)
        sides = self._scan_inputs(x), backward._scan_inputs(x_back)
        return bidirectional_scan(*sides, z=z, softplus=True, **options)

    def _mixes_plainly(self) -> bool:
        """Whether `mix` and the convolution are what they are here, and nobody watches."""
        plain = type(self).mix is Mamba1.mix and type(self.conv1d) is DepthwiseFilter
        return plain and not has_hooks(self.conv1d)

    def _scan_inputs(self, x: Tensor) -> ScanInputs:
        """What the scan takes, from the convolution's result."""
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        rates = decay_rates(self.A_log)
        return ScanInputs(x, self.dt_proj(dt), rates, B, C, self.D, self.dt_proj.bias)

    def extra_repr(self) -> str:
        return f"{self.dim}, d_state={self.d_state}, dt_rank={self.dt_rank}"
