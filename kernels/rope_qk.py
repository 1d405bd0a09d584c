"""Rotary position embedding of queries and keys together, after their norms if they have any.

B batch, T tokens, H query heads, G key heads, D head width, R rotated channels, F = R/2 angles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brickwork.kernels.backend import choose
from brickwork.kernels.checks import check_floating, check_one_of, check_shapes
from brickwork.kernels.rms_norm import Cast, check_eps, rms_norm, rms_norm_reference
from brickwork.kernels.rope import (
    Layout,
    check_rope,
    cos_sin,
    rope,
    rope_reference,
    why_not_triton,
)


class RotatedQK(NamedTuple):
    """`q` (B, T, H, D) and `k` (B, T, G, D), each in its dtype."""

    q: Tensor
    k: Tensor


def rope_qk(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    positions_BT: Tensor,
    *,
    inv_freq: Tensor,
    layout: Layout,
    rotary_dim: int | None = None,
    scale: float = 1.0,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    cast: Cast = "once",
    backend: str = "auto",
) -> RotatedQK:
    """`rope` of queries and keys, after `rms_norm` of every head where weights are given.

    Papers: Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021; Henry
    et al., *Query-Key Normalization for Transformers*, 2020.

    Arguments:
        q_BTHD, k_BTGD: (B, T, H, D) and (B, T, G, D), floating point.
        positions_BT, inv_freq, layout, rotary_dim, scale: as for `brickwork.kernels.rope`.
        q_weight, k_weight: (D,) each, or None for neither: the weights of the norms.
        eps, cast: of the norms, as for `brickwork.kernels.rms_norm`.
        backend: see `brickwork.kernels.backend`; the backends of `rope`.

    Returns:
        RotatedQK(q, k).

    Raises:
        ValueError: a wrong shape or dtype, `layout`, `rotary_dim`, `eps` or `cast`; one weight
            without the other.
        BackendUnavailable: a backend was named that cannot run here.

    >>> x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    >>> quarter_turn, one = torch.tensor([torch.pi / 2]), torch.ones(2)
    >>> options = {"inv_freq": quarter_turn, "layout": "half", "q_weight": one, "k_weight": one}
    >>> q, k = rope_qk(x, 2 * x, torch.tensor([1]), **options)
    >>> q.flatten(), k.flatten()
    (tensor([-1.1314,  0.8485]), tensor([-1.1314,  0.8485]))
    """
    check_rope(q_BTHD, positions_BT, inv_freq, layout, rotary_dim, name="q")
    check_floating(k=k_BTGD, q_weight=q_weight, k_weight=k_weight)
    check_shapes(
        q=(q_BTHD, "B T H D"),
        k=(k_BTGD, "B T G D"),
        q_weight=(q_weight, "D"),
        k_weight=(k_weight, "D"),
    )
    if (q_weight is None) != (k_weight is None):
        given, missing = ("k", "q") if q_weight is None else ("q", "k")
        raise ValueError(f"{missing}_weight must be given with {given}_weight, got None")
    check_eps(eps)
    check_one_of("cast", cast, ("once", "before_weight"))
    tensors = (q_BTHD, k_BTGD, q_weight, k_weight)
    chosen = choose("rope", backend, triton=lambda: why_not_triton(*tensors, inv_freq=inv_freq))
    if chosen == "triton":
        from brickwork.kernels.rope_triton import rope_triton

        cos, sin = cos_sin(positions_BT, inv_freq, scale, torch.float32)
        return RotatedQK(
            *rope_triton(
                q_BTHD,
                k_BTGD,
                cos,
                sin,
                layout=layout,
                q_weight=q_weight,
                k_weight=k_weight,
                eps=eps,
                cast=cast,
            )
        )
    turned = []
    for x, weight in ((q_BTHD, q_weight), (k_BTGD, k_weight)):
        if weight is not None:
            x = rms_norm(x, weight, eps=eps, cast=cast, backend=backend)
        turned.append(
            rope(
                x,
                positions_BT,
                inv_freq=inv_freq,
                layout=layout,
                rotary_dim=rotary_dim,
                scale=scale,
                backend=backend,
            )
        )
    return RotatedQK(*turned)


def rope_qk_reference(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    positions_BT: Tensor,
    *,
    inv_freq: Tensor,
    layout: Layout,
    rotary_dim: int | None = None,
    scale: float = 1.0,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    cast: Cast = "once",
) -> RotatedQK:
    """The specification of `rope_qk`: the two ops one after the other."""
    turned = []
    for x, weight in ((q_BTHD, q_weight), (k_BTGD, k_weight)):
        if weight is not None:
            x = rms_norm_reference(x, weight, eps=eps, cast=cast)
        turned.append(
            rope_reference(
                x,
                positions_BT,
                inv_freq=inv_freq,
                layout=layout,
                rotary_dim=rotary_dim,
                scale=scale,
            )
        )
    return RotatedQK(*turned)
