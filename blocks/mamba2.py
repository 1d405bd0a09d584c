"""The Mamba-2 mixer and its gated norm.

B batch, T tokens, C model width, I = expand · C inner width, H heads of width P, G groups of B and
C, N state, W width of the convolution.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from brickwork.blocks.linear import Linear
from brickwork.blocks.mamba_mixer import (
    DepthwiseFilter,
    MambaMixer,
    MambaState,
    check_sizes,
    decay_rates,
    init_step_bias_,
)
from brickwork.kernels.rms_norm import check_eps, rms_norm
from brickwork.kernels.selective_scan import step_sizes
from brickwork.kernels.ssd_scan import ssd_scan

DECAY_RANGE = (1.0, 16.0)


class Mamba2(MambaMixer):
    """State-space mixer with one step size and one decay per head (Mamba-2).

    `z, x, B, C, dt = in_proj(u)`; `x, B, C = silu(conv(x, B, C))`; `Δ = softplus(dt + dt_bias)`
    clamped to `dt_limit`; per head `S_t = exp(Δ_t A) S_{t-1} + Δ_t x_t B_tᵀ` with
    `A = -exp(A_log)`; `y_t = S_t C_t + D x_t`; `out_proj(norm(y · silu(z)))`.

    Paper: Dao and Gu, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality*, 2024.

    Arguments:
        dim: width C.
        d_state: N, columns of a head's state.
        d_conv: W, tokens that the convolution spans, at least 1.
        expand: I / C.
        head_dim: P, must divide I.
        num_groups: G, must divide the heads; head h uses group h // (H / G).
        dt_limit: smallest and largest Δ.
        D_has_hdim: D per channel (I,) instead of per head (H,).
        norm_before_gate: `norm(y) · silu(z)` instead of `norm(y · silu(z))`.
        bias: of in_proj and out_proj.
        conv_bias: of the convolution.
        chunk_size: tokens per matrix product of the scan; only speed depends on it.

    Called as Mamba1 is, with x (B, T, C) and `mask`, `seq_ids`, `reverse`, `state`; returns
    (B, T, C), 0 at masked tokens. Parameter names and shapes are mamba-ssm's; A_log, D and dt_bias
    stay float32 under every cast. Raises ValueError for sizes that do not divide, other shapes, or
    a state of another batch.

    >>> mixer = Mamba2(16, d_state=8, head_dim=4, num_groups=2)
    >>> x = torch.randn(2, 5, 16)
    >>> state = MambaState()
    >>> halves = [mixer(part, state=state) for part in x.split([3, 2], dim=1)]
    >>> torch.allclose(torch.cat(halves, 1), mixer(x), atol=1e-5)
    True
    """

    float32_parameters = ("A_log", "D", "dt_bias")

    def __init__(
        self,
        dim: int,
        *,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        head_dim: int = 64,
        num_groups: int = 1,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        D_has_hdim: bool = False,
        norm_before_gate: bool = False,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(dim)
        check_sizes(dim=dim, d_state=d_state, d_conv=d_conv, expand=expand)
        check_sizes(head_dim=head_dim, num_groups=num_groups)
        if chunk_size is not None:
            check_sizes(chunk_size=chunk_size)
        inner = expand * dim
        if inner % head_dim:
            raise ValueError(
                f"head_dim must divide expand · dim, got head_dim={head_dim}, expand·dim={inner}"
            )
        heads = inner // head_dim
        if heads % num_groups:
            raise ValueError(
                f"num_groups must divide the heads, got num_groups={num_groups}, heads={heads}"
            )
        low, high = dt_limit
        if not 0 <= low <= high:
            raise ValueError(f"dt_limit must be (low, high), 0 <= low <= high, got {dt_limit}")
        self.d_state = d_state
        self.head_dim = head_dim
        self.num_heads = heads
        self.num_groups = num_groups
        self.dt_limit = (float(low), float(high))
        self.norm_before_gate = norm_before_gate
        self.chunk_size = chunk_size
        self.in_proj = Linear(dim, 2 * inner + 2 * num_groups * d_state + heads, bias=bias)
        self.conv1d = DepthwiseFilter(
            inner + 2 * num_groups * d_state, width=d_conv, bias=conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(inner if D_has_hdim else heads, dtype=torch.float32))
        self.norm = GroupRMSNorm(inner, num_groups=num_groups, eps=1e-5)
        self.out_proj = Linear(inner, dim, bias=bias)
        self._reset_own_parameters()

    def reset_parameters(self) -> None:
        """A from -U(1, 16), D = 1, step sizes log-uniform in [1e-3, 1e-1]; layers as they do."""
        for layer in (self.in_proj, self.conv1d, self.norm, self.out_proj):
            layer.reset_parameters()
        self._reset_own_parameters()

    def _reset_own_parameters(self) -> None:
        with torch.no_grad():
            self.A_log.uniform_(*DECAY_RANGE).log_()
        nn.init.ones_(self.D)
        init_step_bias_(self.dt_bias)

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        inner, heads = self.num_heads * self.head_dim, self.num_heads
        return projected.split([inner, inner + 2 * self.num_groups * self.d_state, heads], -1)

    def mix(
        self,
        parts: tuple[Tensor, ...],
        *,
        mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
        reverse: bool = False,
        state: MambaState | None = None,
    ) -> Tensor:
        z, xBC, dt = parts
        inner, group = self.num_heads * self.head_dim, self.num_groups * self.d_state
        conv = self.conv1d(
            xBC,
            activation="silu",
            reverse=reverse,
            mask=mask,
            seq_ids=seq_ids,
            initial_state=None if state is None else state.conv,
        )
        x, B, C = conv.y.split([inner, group, group], -1)
        x, heads_z = (rearrange(t, "b t (h p) -> b t h p", p=self.head_dim) for t in (x, z))
        B, C = (rearrange(t, "b t (g n) -> b t g n", n=self.d_state) for t in (B, C))
        limited = self.dt_limit != (0.0, math.inf)
        if limited:
            dt = step_sizes(dt.to(self.dt_bias.dtype), self.dt_bias, True).clamp(*self.dt_limit)
        per_channel = self.D.shape[0] != self.num_heads
        scan = ssd_scan(
            x,
            dt,
            decay_rates(self.A_log),
            B,
            C,
            D=rearrange(self.D, "(h p) -> h p", p=self.head_dim) if per_channel else self.D,
            z=None if self.norm_before_gate else heads_z,
            delta_bias=None if limited else self.dt_bias,
            softplus=not limited,
            reverse=reverse,
            mask=mask,
            seq_ids=seq_ids,
            initial_state=None if state is None else state.scan,
            chunk_size=self.chunk_size,
        )
        if state is not None:
            state.update(conv.final_state, scan.final_state, reverse)
        y = self.norm(rearrange(scan.y, "b t h p -> b t (h p)"))
        return y * nn.functional.silu(z) if self.norm_before_gate else y

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, d_state={self.d_state}, head_dim={self.head_dim}, "
            f"num_heads={self.num_heads}, num_groups={self.num_groups}, dt_limit={self.dt_limit}, "
            f"norm_before_gate={self.norm_before_gate}"
        )


class GroupRMSNorm(nn.Module):
    """RMSNorm over each of `num_groups` equal parts of the last axis, one weight for all channels.

    `y_g = x_g / sqrt(mean(x_g²) + eps) · weight_g`, computed in float32, returned in x's dtype.

    Called with x (..., C); returns (..., C). Raises ValueError for another width.

    >>> GroupRMSNorm(4, num_groups=2, eps=0.0)(torch.tensor([3.0, 4.0, 5.0, 5.0])).detach()
    tensor([0.8485, 1.1314, 1.0000, 1.0000])
    """

    def __init__(self, dim: int, *, num_groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        check_sizes(dim=dim, num_groups=num_groups)
        check_eps(eps)
        if dim % num_groups:
            raise ValueError(f"num_groups must divide dim, got num_groups={num_groups}, dim={dim}")
        self.num_groups = num_groups
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError(f"x must have width {self.weight.shape[0]}, got {tuple(x.shape)}")
        if self.num_groups == 1:
            return rms_norm(x, self.weight, eps=self.eps)
        parts = zip(x.chunk(self.num_groups, -1), self.weight.chunk(self.num_groups))
        return torch.cat([rms_norm(part, weight, eps=self.eps) for part, weight in parts], -1)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, num_groups={self.num_groups}, eps={self.eps}"
