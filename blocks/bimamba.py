"""A Mamba mixer that reads its sequence in both directions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from brickwork.blocks.mamba1 import Mamba1
from brickwork.blocks.mamba_mixer import PROJECTIONS, MambaMixer, check_tokens, zero_padding
from brickwork.kernels.checks import check_flag, check_one_of
from brickwork.kernels.sequences import check_mask

Combine = Literal["add", "multiply"]


class BiMamba(nn.Module):
    """Two Mamba mixers, one reading forwards and one backwards.

    `y = combine(fwd(x), flip(rev(flip(x))))`, the sum or the element-wise product. Nothing is
    flipped: the reverse mixer's convolution and scan run from right to left, both mixers' scans in
    one call where a backend can (tied `Mamba1` with `"add"`, compiled). With `tie`, both
    share `in_proj` and `out_proj` and nothing else: modules of `mamba_fwd`, also reached through
    `mamba_rev`. A tied in_proj is applied once, and with `"add"` so is out_proj, to the sum (its
    bias counts twice). A module put in the place of either serves both directions; it must be
    affine, as an `nn.Linear` with an adapter is, and out_proj's must have a `bias`, maybe None.
    Mixers with hooks or a forward of their own are called as wholes instead. With `tie` they are
    one unit for what gathers and frees parameters around a call, such as `fully_shard`.

    Papers: Gu and Dao, *Mamba*, 2023; Wang et al., *Long-context Protein Language Modeling Using
    Bidirectional Mamba with Shared Projection Layers*, 2024.

    Arguments:
        dim: width C.
        mixer: `Mamba1`, `Mamba2` or another `MambaMixer`.
        combine: `"add"` or `"multiply"`.
        tie: share the projections.
        mixer_options: keyword arguments of both mixers.

    Called with x (B, T, C), `mask` (B, T) and `seq_ids` (B, T) as a mixer is; returns (B, T, C),
    0 at masked tokens. A real token's result does not depend on the padding, on its side, or on
    what else is packed beside its sequence.

    For backward it keeps a fixed number of values a token, never N for each channel and token: with
    tied Mamba1 (N = 16, expand = 2) and `"add"` about 18.5 · C, in float32 the size of 18.5 copies
    of x.

    `state_dict` holds a tied parameter once, under `mamba_fwd`; a checkpoint may hold either copy,
    or both if they are equal.
    Raises ValueError for other shapes, a `state` (a token depends on those to its right, so
    nothing can be continued), and a checkpoint whose two copies differ.

    >>> block = BiMamba(8, d_state=4)
    >>> block.mamba_rev.in_proj is block.mamba_fwd.in_proj
    True
    >>> block(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        *,
        mixer: type[MambaMixer] = Mamba1,
        combine: Combine = "add",
        tie: bool = True,
        **mixer_options: Any,
    ) -> None:
        super().__init__()
        check_one_of("combine", combine, ("add", "multiply"))
        check_flag("tie", tie)
        if not (isinstance(mixer, type) and issubclass(mixer, MambaMixer)):
            raise ValueError(f"mixer must be a MambaMixer class such as Mamba1, got {mixer!r}")
        build: Any = mixer
        self.dim = dim
        self.combine: Combine = combine
        self.tie = tie
        self.mamba_fwd: MambaMixer = build(dim, **mixer_options)
        self.mamba_rev: MambaMixer = build(dim, **mixer_options)
        if tie:
            self.mamba_rev.borrow_projections(self.mamba_fwd)

    def reset_parameters(self) -> None:
        """Draw both mixers anew."""
        self.mamba_fwd.reset_parameters()
        self.mamba_rev.reset_parameters()

    def tied_parameters(self) -> dict[str, str]:
        """The further name of each tied parameter, with the name it is registered under.

        >>> BiMamba(8).tied_parameters()["mamba_rev.in_proj.weight"]
        'mamba_fwd.in_proj.weight'
        """
        if not self.tie:
            return {}
        return {
            f"mamba_rev.{module}.{name}": f"mamba_fwd.{module}.{name}"
            for module in PROJECTIONS
            for name, _ in getattr(self.mamba_fwd, module).named_parameters()
        }

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
        state: None = None,
    ) -> Tensor:
        if state is not None:
            raise ValueError(
                "state must be None: a bidirectional mixer reads tokens to the right, "
                "so it cannot go on from a state or cache"
            )
        check_tokens(x, self.dim)
        mask = check_mask(mask, (x.shape[0], x.shape[1]))
        fwd, rev = self.mamba_fwd, self.mamba_rev
        if fwd.must_be_called() or rev.must_be_called():
            y_fwd = fwd(x, mask=mask, seq_ids=seq_ids)
            y_rev = rev(x, mask=mask, seq_ids=seq_ids, reverse=True)
            return y_fwd + y_rev if self.combine == "add" else y_fwd * y_rev
        parts = fwd.split(fwd.in_proj(x))
        bias = fwd.out_proj.bias
        if self.tie and self.combine == "add":
            y = fwd.out_proj(fwd.mix_both(rev, parts, mask=mask, seq_ids=seq_ids))
            y = y if bias is None else y + bias
            return zero_padding(y, mask, bias)
        y_fwd = fwd.mix(parts, mask=mask, seq_ids=seq_ids)
        if not self.tie:
            parts = rev.split(rev.in_proj(x))
        y_rev = rev.mix(parts, mask=mask, seq_ids=seq_ids, reverse=True)
        if self.combine == "add":
            y = fwd.out_proj(y_fwd) + rev.out_proj(y_rev)
        else:
            y = fwd.out_proj(y_fwd) * rev.out_proj(y_rev)
        return zero_padding(y, mask, bias)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if self.tie:
            for module in PROJECTIONS:
                fwd, rev = (f"{prefix}{side}.{module}." for side in ("mamba_fwd", "mamba_rev"))
                for alias in [name for name in state_dict if name.startswith(rev)]:
                    _merge(state_dict, fwd + alias.removeprefix(rev), alias)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.dim}, combine={self.combine!r}, tie={self.tie}"


def _merge(state_dict: dict[str, Any], name: str, alias: str) -> None:
    """Leave one of two entries that are one tensor, under `name`; ValueError if they differ."""
    other = state_dict.pop(alias)
    if not _equal(state_dict.setdefault(name, other), other):
        raise ValueError(
            f"{name} and {alias} are one tied parameter, but the checkpoint has "
            "two different values; load it into BiMamba(tie=False) or drop one of them"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.is_meta or other.is_meta or torch.equal(one, other.to(one.device))
