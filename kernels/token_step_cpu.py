"""Attention, experts and matrix products for one new token, compiled for the CPU.

What `blocks/single_token.py` computes with PyTorch's operators, for one row in float32 or float64.
A step is bound to its weights and buffers once; a call then hands over one pointer. There are no
checks and no gradients.

C columns, H query and G key/value heads of width D, S slots, E experts of width F, K chosen.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import cpu_extension
from brickwork.kernels.cpu_extension import Array, array

_LIBRARY = "token_step_cpu"


def unavailable_here() -> str | None:
    """Why the compiled steps cannot run on this machine, or None; builds them if need be."""
    return cpu_extension.unavailable(_LIBRARY)


class _Step:
    """A C function bound to its argument, a struct whose fields are set by name."""

    def __init__(self, struct: type[ctypes.Structure], function: str, like: Tensor) -> None:
        suffix = {torch.float32: "float32", torch.float64: "float64"}[like.dtype]
        self.function = getattr(cpu_extension.load(_LIBRARY), f"brickwork_{function}_{suffix}")
        self.struct: Any = struct(threads=torch.get_num_threads())
        self.argument = ctypes.byref(self.struct)
        self.held: dict[str, Tensor | None] = {}  # what the pointers point to

    def set(self, **fields: Any) -> None:
        """Numbers; tensors with contiguous columns, or None for absent ones."""
        for name, value in fields.items():
            if isinstance(value, Tensor) or value is None:
                self.held[name] = value
                value = array(value)
            setattr(self.struct, name, value)

    def bind(self, **weights: Tensor | None) -> None:
        """Weights of any strides."""
        self.set(
            **{
                name: weight if weight is None or weight.stride(-1) == 1 else weight.contiguous()
                for name, weight in weights.items()
            }
        )

    def run(self, x_1C: Tensor, columns: int) -> Tensor:
        """Call it on one row; the result (1, columns)."""
        x = x_1C.contiguous()
        y = x.new_empty(1, columns)
        self.struct.x.data, self.struct.y.data = x.data_ptr(), y.data_ptr()
        self.function(self.argument)
        return y


def _fields(integers: str, numbers: str, arrays: str) -> tuple[tuple[str, Any], ...]:
    kinds = ((integers, ctypes.c_int64), (numbers, ctypes.c_double), (arrays, Array))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


class _Product(ctypes.Structure):
    _fields_ = _fields("rows columns threads", "", "weight bias x y")


class _Attention(ctypes.Structure):
    _fields_ = _fields(
        "columns heads groups width slot threads",
        "eps norm_eps",
        "x y query key value output query_bias key_bias value_bias output_bias query_norm key_norm "
        "norm cos sin keys values seen scratch",
    )


class _Experts(ctypes.Structure):
    _fields_ = _fields(
        "columns hidden experts chosen normalize threads",
        "norm_eps",
        "x y router bias gate_up down norm indices scratch",
    )


class CompiledProduct(_Step):
    """`x Wᵀ + b` of one row, (1, C) to (1, rows of W)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(_Product, "product", weight)
        self.rows = weight.shape[0]
        self.set(rows=self.rows, columns=weight.shape[1])
        self.bind(weight=weight, bias=bias)

    def __call__(self, x_1C: Tensor) -> Tensor:
        return self.run(x_1C, self.rows)


class CompiledAttention(_Step):
    """`x + norm(attention(x))` with queries and keys normalised over the whole projection.

    Arguments:
        weights: of the projections `query`, `key`, `value`, `output` and their `..._bias` or None,
            and of the norms `query_norm`, `key_norm` and `norm`.
        heads, groups: H and G.
        eps, norm_eps: of the first two norms, and of the last.
    """

    def __init__(
        self, *, heads: int, groups: int, eps: float, norm_eps: float, **weights: Tensor | None
    ) -> None:
        query = weights["query"]
        assert query is not None
        super().__init__(_Attention, "attention_step", query)
        self.columns, self.heads, self.groups = query.shape[1], heads, groups
        self.width = len(query) // heads
        self.set(columns=self.columns, heads=heads, groups=groups, width=self.width)
        self.set(eps=eps, norm_eps=norm_eps)
        self.bind(**weights)

    def use(self, keys_GSD: Tensor, values_GSD: Tensor) -> None:
        """Take these buffers, which it writes to."""
        size = self.heads * (2 * self.width + keys_GSD.shape[1]) + 2 * self.groups * self.width
        self.set(keys=keys_GSD, values=values_GSD, scratch=keys_GSD.new_empty(size))

    def __call__(
        self, x_1C: Tensor, slot: int, turn: tuple[Tensor, Tensor], seen_S: Tensor | None
    ) -> Tensor:
        """Write the token's key and value to `slot` and attend to all slots up to it; `turn` are
        its cos and sin (D), `seen_S` which slots count."""
        self.struct.slot = slot
        self.set(cos=turn[0], sin=turn[1], seen=seen_S)
        return self.run(x_1C, self.columns)


class CompiledExperts(_Step):
    """`x + norm(experts(x))` behind a softmax router.

    Arguments:
        weights: `router` (E, C), `bias` (E) or None, `gate_up` (E, 2F, C), `down` (E, C, F) and
            `norm` (C).
        chosen: K.
        normalize: whether the chosen ones' weights are made to sum to 1.
        norm_eps: of the norm.
    """

    def __init__(
        self, *, chosen: int, normalize: bool, norm_eps: float, **weights: Tensor | None
    ) -> None:
        down = weights["down"]
        assert down is not None
        super().__init__(_Experts, "experts_step", down)
        experts, self.columns, hidden = down.shape
        self.set(columns=self.columns, hidden=hidden, experts=experts, chosen=chosen)
        self.set(normalize=normalize, norm_eps=norm_eps)
        self.set(scratch=down.new_empty(experts + chosen * hidden))
        self.set(indices=down.new_empty(experts, dtype=torch.int64))
        self.bind(**weights)

    def __call__(self, x_1C: Tensor) -> Tensor:
        return self.run(x_1C, self.columns)
