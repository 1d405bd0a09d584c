"""Rotary position embedding as a block: frequencies from numbers, no state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from brickwork.blocks.hooks import has_hooks
from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope_scaling import check_scaling, is_positive, scaled_inv_freq
from brickwork.kernels.checks import check_integer, check_one_of, check_shapes, values_readable
from brickwork.kernels.rope import (
    LAYOUTS,
    Layout,
    check_lengths,
    check_positions,
    check_rotary_dim,
    rope,
)
from brickwork.kernels.rope_qk import RotatedQK, rope_qk


class _Last:
    """The frequencies last computed; copies and pickles of a module start without."""

    def __init__(self) -> None:
        self.inv_freq: Tensor | None = None

    def __reduce__(self) -> tuple[type[_Last], tuple[()]]:
        return _Last, ()


class RoPE(nn.Module):
    """Rotary position embedding of queries and keys.

    Pair i of the first R channels of a head turns by `position · inv_freq_i`,
    `inv_freq_i = base^(-2i/R)`, changed by `scaling`; see `brickwork.kernels.rope` for the pairs.
    The frequencies are computed in float32 from the numbers below at every call: there are no
    parameters and no buffers, so casts, meta devices and loading cannot damage them, and a call
    depends on its arguments alone. One module serves all layers.

    Papers: Su et al., *RoFormer*, 2021; Peng et al., *YaRN*, 2023; Ding et al., *LongRoPE*,
    2024.

    Arguments:
        head_dim: width D of a head.
        base: the longest wavelength over 2π, in tokens.
        layout: `"half"` or `"interleaved"`.
        rotary_dim: R, even, at most D: later channels are left alone. None means D.
        scaling: None, or the dict that transformers' configs call `rope_scaling` or
            `rope_parameters`; `brickwork.blocks.rope_scaling` lists the types and their parameters.
        max_positions: positions from here on are an error. Read from the tensor, so on a GPU each
            call waits for it; not checked in compiled or exported code.

    Called with x (B, T, H, D), positions (B, T), (1, T) or (T,) of integers and, for the types
    whose frequencies depend on the length of a sequence (`length_dependent`: dynamic, longrope),
    optionally `lengths`, (B,) or, where a row packs sequences, (B, T), of integers: pass the same
    for queries and keys. By default a row's length is its own largest position + 1.
    Returns (B, T, H, D) in x's dtype. Raises ValueError for wrong arguments, an unknown scaling
    type, an unknown or missing parameter, and a position of `max_positions` or more.

    >>> turn = RoPE(4, base=100.0)
    >>> turn(torch.ones(1, 2, 1, 4), torch.arange(2)).squeeze()
    tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
            [-0.3012,  0.8952,  1.3818,  1.0948]])
    >>> RoPE(4, scaling={"rope_type": "linear"})
    Traceback (most recent call last):
    ValueError: scaling of type 'linear' must have the key 'factor', got {'rope_type': 'linear'}
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        layout: Layout = "half",
        rotary_dim: int | None = None,
        scaling: Mapping[str, object] | None = None,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        check_integer("head_dim", head_dim, least=1)
        if not is_positive(base) or base <= 1:
            raise ValueError(f"base must be a finite number greater than 1, got {base!r}")
        check_one_of("layout", layout, LAYOUTS)
        if max_positions is not None:
            check_integer("max_positions", max_positions, least=1)
        self.head_dim = head_dim
        self.base = float(base)
        self.layout: Layout = layout
        self.rotary_dim = check_rotary_dim(rotary_dim, head_dim)
        self.max_positions = max_positions
        self._kind, self._numbers = check_scaling(
            {"rope_type": "default"} if scaling is None else scaling,
            base=self.base,
            head_dim=head_dim,
            rotary_dim=self.rotary_dim,
        )
        self.scaling = None if scaling is None else dict(scaling)
        self._last = _Last()

    def reset_parameters(self) -> None:
        """Nothing to do: there are no parameters."""

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self._kind in ("dynamic", "longrope")

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by: 1 but for yarn and longrope."""
        return float(self._numbers.get("attention_factor", 1.0))

    def inv_freq(
        self, device: torch.device | str | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Radians per token: (F,) or, for each entry of `lengths` of a length-dependent type,
        (*lengths.shape, F). Without `lengths`: as for short sequences. F = rotary_dim / 2."""
        exponents = torch.arange(0, self.rotary_dim, 2, device=device, dtype=torch.float32)
        return scaled_inv_freq(
            self._kind, self._numbers, exponents / self.rotary_dim, self.base, lengths
        )

    def forward(self, x_BTHD: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        size = self._check(x_BTHD, positions)
        if lengths is not None:
            check_lengths(lengths, size["B"], size["T"])
        elif self.length_dependent and size["T"]:
            lengths = positions.amax(-1, keepdim=positions.ndim == 1).long() + 1
        return rope(
            x_BTHD,
            positions,
            inv_freq=self._inv_freq(x_BTHD, lengths),
            layout=self.layout,
            rotary_dim=self.rotary_dim,
            scale=self.scale,
        )

    def qk(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        positions: Tensor,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> RotatedQK:
        """Queries and keys, after their norms: `self(q_norm(q), positions)`, and the same of k.

        In one op, where that is what the modules would compute: `RMSNorm`s of a head and this very
        class, without hooks, frequencies that do not depend on the length.
        """
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        known = [norm for norm in norms if type(norm) is RMSNorm and norm.dim == self.head_dim]
        alike = len(known) == len(norms) and len({(norm.eps, norm.cast) for norm in known}) <= 1
        plain = type(self) is RoPE and not any(map(has_hooks, (self, *norms)))
        if not (plain and alike and len(norms) != 1) or self.length_dependent:
            q = q_BTHD if q_norm is None else q_norm(q_BTHD)
            k = k_BTGD if k_norm is None else k_norm(k_BTGD)
            return RotatedQK(self(q, positions), self(k, positions))
        self._check(q_BTHD, positions)
        return rope_qk(
            q_BTHD,
            k_BTGD,
            positions,
            inv_freq=self._inv_freq(q_BTHD, None),
            layout=self.layout,
            rotary_dim=self.rotary_dim,
            scale=self.scale,
            q_weight=known[0].weight if known else None,
            k_weight=known[1].weight if known else None,
            eps=known[0].eps if known else 0.0,
            cast=known[0].cast if known else "once",
        )

    def _check(self, x_BTHD: Tensor, positions: Tensor) -> dict[str, int]:
        size = check_shapes(x=(x_BTHD, "B T H D"))
        if size["D"] != self.head_dim:
            raise ValueError(
                f"x must have heads of width head_dim = {self.head_dim}, got {tuple(x_BTHD.shape)}"
            )
        check_positions(positions, size["B"], size["T"])
        self._check_limit(positions)
        return size

    def _inv_freq(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """`inv_freq`, kept for the next call on the same device where that changes nothing."""
        if lengths is not None or not values_readable(x):
            return self.inv_freq(x.device, lengths)
        if self._last.inv_freq is None or self._last.inv_freq.device != x.device:
            with torch.inference_mode(False):
                made = self.inv_freq(x.device)
            if type(made) is not Tensor:  # a mode makes other ones
                return made
            self._last.inv_freq = made
        return self._last.inv_freq

    def _check_limit(self, positions: Tensor) -> None:
        if self.max_positions is None or not positions.numel() or not values_readable(positions):
            return
        largest = int(positions.max())
        if largest >= self.max_positions:
            raise ValueError(
                f"positions must be below max_positions = {self.max_positions}, got {largest}"
            )

    def extra_repr(self) -> str:
        shown = [f"{self.head_dim}, base={self.base}, layout={self.layout!r}"]
        if self.rotary_dim != self.head_dim:
            shown.append(f"rotary_dim={self.rotary_dim}")
        if self.scaling is not None:
            shown.append(f"scaling={self.scaling}")
        if self.max_positions is not None:
            shown.append(f"max_positions={self.max_positions}")
        return ", ".join(shown)
