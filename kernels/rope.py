"""Rotary position embedding: each pair of channels of a head turns by an angle that grows with the
position, so that scores depend on differences of positions only.

B batch, T tokens, H heads, D head width, R rotated channels (the first R of D), F = R/2 angles.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype
from brickwork.kernels.checks import (
    check_floating,
    check_integer,
    check_one_of,
    check_shapes,
    values_readable,
)

Layout = Literal["half", "interleaved"]
LAYOUTS = ("half", "interleaved")


def rope(
    x_BTHD: Tensor,
    positions_BT: Tensor,
    *,
    inv_freq: Tensor,
    layout: Layout,
    rotary_dim: int | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Rotate the first R channels of every head by angles proportional to the position.

    With `a_i = position · inv_freq_i`, channels (u, v) of pair i become
    `(u cos a_i - v sin a_i, v cos a_i + u sin a_i) · scale`. `layout` names the pairs: `"half"`
    pairs channel i with i + R/2 (rotate-half), `"interleaved"` channel 2i with 2i + 1 (the complex
    form). Angles are float32 (float64 for float64 x) whatever the dtype of x, with autocast off;
    float32 angles need positions below 2^24.

    Paper: Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021.

    Arguments:
        x_BTHD: (B, T, H, D), floating point.
        positions_BT: (B, T), (1, T) or (T,), integers, in tokens.
        inv_freq: radians per token: (F,), one set per row (B, F), or one per token (B, T, F).
        layout: `"half"` or `"interleaved"`.
        rotary_dim: R, even, at most D; None means D. Channels from R on are returned bit for bit.
        scale: multiplies cos and sin (the attention factor of yarn and longrope).
        backend: see `brickwork.kernels.backend`.

    Returns:
        (B, T, H, D) in x's dtype.

    Raises:
        ValueError: a wrong shape or dtype, `layout` or `rotary_dim`.
        BackendUnavailable: a backend was named that cannot run here.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    >>> quarter_turn = torch.tensor([torch.pi / 2, 0.0])
    >>> rope(x, torch.tensor([1]), inv_freq=quarter_turn, layout="half").flatten()
    tensor([-3.0000,  2.0000,  1.0000,  4.0000])
    >>> rope(x, torch.tensor([1]), inv_freq=quarter_turn, layout="interleaved").flatten()
    tensor([-2.0000,  1.0000,  3.0000,  4.0000])
    """
    check_rope(x_BTHD, positions_BT, inv_freq, layout, rotary_dim)
    chosen = choose("rope", backend, triton=lambda: why_not_triton(x_BTHD, inv_freq=inv_freq))
    if chosen == "triton":
        from brickwork.kernels.rope_triton import rope_triton

        tables = cos_sin(positions_BT, inv_freq, scale, torch.float32)
        return rope_triton(x_BTHD, None, *tables, layout=layout)[0]
    options: dict[str, Any] = {"inv_freq": inv_freq, "rotary_dim": rotary_dim, "scale": scale}
    eager = x_BTHD.device.type == "cpu" and values_readable(x_BTHD)
    if layout == "interleaved" and eager and backend == "auto":  # half the time of real arithmetic
        return rope_complex_reference(x_BTHD, positions_BT, **options)
    return rope_reference(x_BTHD, positions_BT, layout=layout, **options)


def rope_reference(
    x_BTHD: Tensor,
    positions_BT: Tensor,
    *,
    inv_freq: Tensor,
    layout: Layout,
    rotary_dim: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The specification of `rope`, in real arithmetic for both layouts."""
    form = rope_rotate_half_reference if layout == "half" else rope_interleaved_reference
    return form(x_BTHD, positions_BT, inv_freq=inv_freq, rotary_dim=rotary_dim, scale=scale)


def rope_rotate_half_reference(
    x_BTHD: Tensor,
    positions_BT: Tensor,
    *,
    inv_freq: Tensor,
    rotary_dim: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`rope` with `layout="half"`: (u, v) are the first and second half of the rotated channels."""
    x, tail = _split(x_BTHD, rotary_dim)
    with autocast_off(x):
        cos, sin = cos_sin(positions_BT, inv_freq, scale, compute_dtype(x))
        u, v = x.to(cos.dtype).chunk(2, -1)
        turned = torch.cat((u * cos - v * sin, v * cos + u * sin), -1)
        return _join(turned.to(x.dtype), tail)


def rope_interleaved_reference(
    x_BTHD: Tensor,
    positions_BT: Tensor,
    *,
    inv_freq: Tensor,
    rotary_dim: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`rope` with `layout="interleaved"`, the real twin of the complex form: (u, v) are the even
    and odd channels. It compiles and exports where complex numbers do not."""
    x, tail = _split(x_BTHD, rotary_dim)
    with autocast_off(x):
        cos, sin = cos_sin(positions_BT, inv_freq, scale, compute_dtype(x))
        u, v = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((u * cos - v * sin, v * cos + u * sin), -1)
        return _join(turned.flatten(-2).to(x.dtype), tail)


def rope_complex_reference(
    x_BTHD: Tensor,
    positions_BT: Tensor,
    *,
    inv_freq: Tensor,
    rotary_dim: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`rope` with `layout="interleaved"` as the papers write it: `(u + jv) · scale · exp(j a)`."""
    x, tail = _split(x_BTHD, rotary_dim)
    with autocast_off(x):
        cos, sin = cos_sin(positions_BT, inv_freq, scale, compute_dtype(x))
        pairs = x.to(cos.dtype).unflatten(-1, (-1, 2)).contiguous()
        if pairs.storage_offset() % 2:  # such are no complex numbers in memory
            pairs = pairs.clone()
        turned = torch.view_as_complex(pairs) * torch.complex(cos, sin)
        return _join(torch.view_as_real(turned).flatten(-2).to(x.dtype), tail)


def convert_rope_layout(
    weight_or_bias: Tensor, *, num_heads: int, to: Layout, rotary_dim: int | None = None
) -> Tensor:
    """Reorder the output rows of a query or key projection from the other layout into `to`.

    After converting everything that acts on queries and keys - weights, biases, QK-norm weights -
    the attention scores of the one layout are those of the other. Values and the output projection
    stay as they are.

    Arguments:
        weight_or_bias: (num_heads · D, ...): a weight, a bias, the weight of a norm over the whole
            projection or, with `num_heads=1`, the weight (D,) of a norm per head.
        num_heads: of this tensor: key projections have their own.
        to: the layout wanted, `"half"` or `"interleaved"`; the tensor is in the other one.
        rotary_dim: R, where only the first R channels of a head are rotated; None means D.

    Raises:
        ValueError: rows that do not divide into heads, an odd number of rotated channels.

    >>> convert_rope_layout(torch.tensor([0, 1, 2, 3]), num_heads=1, to="half")
    tensor([0, 2, 1, 3])
    >>> convert_rope_layout(torch.tensor([0, 2, 1, 3]), num_heads=1, to="interleaved")
    tensor([0, 1, 2, 3])
    """
    check_integer("num_heads", num_heads, least=1)
    check_one_of("to", to, LAYOUTS)
    if weight_or_bias.ndim == 0 or weight_or_bias.shape[0] % num_heads:
        raise ValueError(
            f"weight_or_bias must have rows that divide into num_heads = {num_heads} heads, "
            f"got shape {tuple(weight_or_bias.shape)}"
        )
    heads = rearrange(weight_or_bias, "(h d) ... -> h d ...", h=num_heads)
    width = check_rotary_dim(rotary_dim, heads.shape[1])
    pairs = "h (f two) ..." if to == "half" else "h (two f) ..."
    swapped = "h (two f) ..." if to == "half" else "h (f two) ..."
    turned = rearrange(heads[:, :width], f"{pairs} -> {swapped}", two=2)
    return rearrange(torch.cat((turned, heads[:, width:]), 1), "h d ... -> (h d) ...")


def check_rotary_dim(rotary_dim: int | None, head_dim: int) -> int:
    """R, or a ValueError unless it is even and within the head."""
    if rotary_dim is None:
        if head_dim % 2 or head_dim < 2:
            raise ValueError(f"head_dim must be even to be rotated, got {head_dim}")
        return head_dim
    check_integer("rotary_dim", rotary_dim, least=2)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"rotary_dim must be even and at most head_dim = {head_dim}, got {rotary_dim}"
        )
    return rotary_dim


def check_positions(positions_BT: Tensor, batch: int, tokens: int) -> None:
    """Raise unless positions are integers of shape (B, T), (1, T) or (T,)."""
    _check_integers("positions", positions_BT)
    shape = tuple(positions_BT.shape)
    if shape not in ((batch, tokens), (1, tokens), (tokens,)):
        raise ValueError(
            f"positions must have shape (B, T), (1, T) or (T,) with B = {batch}, T = {tokens}, "
            f"got {shape}"
        )


def check_lengths(lengths: Tensor, batch: int, tokens: int) -> None:
    """Raise unless lengths are integers of shape (B,), (1,) or (B, T)."""
    _check_integers("lengths", lengths)
    shape = tuple(lengths.shape)
    if shape not in ((batch,), (1,), (batch, tokens)):
        raise ValueError(
            f"lengths must have shape (B,), (1,) or (B, T) with B = {batch}, T = {tokens}, "
            f"got {shape}"
        )


def _check_integers(argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{argument} must be integers, got {tensor.dtype}")


def check_rope(
    x_BTHD: Tensor,
    positions_BT: Tensor,
    inv_freq: Tensor,
    layout: Layout,
    rotary_dim: int | None,
    *,
    name: str = "x",
) -> None:
    """Raise unless these are arguments of `rope`, whose first one is called `name`."""
    check_floating(**{name: x_BTHD}, inv_freq=inv_freq)
    sizes = check_shapes(**{name: (x_BTHD, "B T H D")})
    check_one_of("layout", layout, LAYOUTS)
    width = check_rotary_dim(rotary_dim, sizes["D"])
    check_positions(positions_BT, sizes["B"], sizes["T"])
    rows, tokens = (1, sizes["B"]), (1, sizes["T"])
    shape = tuple(inv_freq.shape)
    fits = (
        1 <= len(shape) <= 3
        and shape[-1] == width // 2
        and (len(shape) < 2 or shape[0] in rows)
        and (len(shape) < 3 or shape[1] in tokens)
    )
    if not fits:
        raise ValueError(
            f"inv_freq must have shape (F,), (B, F) or (B, T, F) with F = {width // 2} (half of "
            f"rotary_dim), B = {sizes['B']}, T = {sizes['T']}, got {shape}"
        )


def _split(x: Tensor, rotary_dim: int | None) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    return x[..., :width], x[..., width:]


def _join(turned: Tensor, tail: Tensor) -> Tensor:
    return torch.cat((turned, tail), -1) if tail.shape[-1] else turned


def _angles(positions_BT: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Tensor:
    """(B or 1, T, 1, F): the axis of heads is broadcast."""
    frequencies = inv_freq.to(dtype)
    if inv_freq.ndim == 2:
        frequencies = frequencies.unsqueeze(1)
    positions = (positions_BT if positions_BT.ndim == 2 else positions_BT.unsqueeze(0)).to(dtype)
    return (positions.unsqueeze(-1) * frequencies).unsqueeze(2)


def cos_sin(
    positions_BT: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The factors of a rotation, each (B or 1, T, 1, F). On the CPU those last computed are kept,
    since all layers of a model ask for the same."""
    readable = values_readable(positions_BT) and values_readable(inv_freq)
    plain = positions_BT.device.type == inv_freq.device.type == "cpu" and readable
    if not plain or inv_freq.requires_grad:
        return _cos_sin(positions_BT, inv_freq, scale, dtype)
    if not _last.is_of(positions_BT, inv_freq, scale, dtype):
        with torch.inference_mode(False):
            tables = _cos_sin(positions_BT, inv_freq, scale, dtype)
            if type(tables[0]) is not Tensor:  # a mode makes other ones
                return tables
            _last.key, _last.tables = (scale, dtype), tables
            _last.positions, _last.freq = positions_BT.clone(), inv_freq.clone()
    return _last.tables


def _cos_sin(
    positions_BT: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    with autocast_off(positions_BT):
        angles = _angles(positions_BT, inv_freq, dtype)
        return angles.cos() * scale, angles.sin() * scale


class _Last(threading.local):
    """The last factors of this thread, and copies of what they were computed from."""

    key: tuple[object, ...] | None = None
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    freq: Tensor

    def is_of(self, positions: Tensor, freq: Tensor, scale: float, dtype: torch.dtype) -> bool:
        return self.key == (scale, dtype) and all(
            mine.dtype == given.dtype and torch.equal(mine, given)
            for mine, given in ((self.positions, positions), (self.freq, freq))
        )


_last = _Last()


def why_not_triton(*tensors: Tensor | None, inv_freq: Tensor) -> str | None:
    """Why the Triton kernels cannot rotate these tensors, or None."""
    from brickwork.kernels.triton_support import why_not

    if inv_freq.requires_grad and torch.is_grad_enabled():
        return "it has no gradient of inv_freq"
    return why_not(*tensors)
