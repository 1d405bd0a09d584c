"""Attention, experts and norms for one new token a row, over weights and buffers at hand.

At one token a step each weight is read once and little is computed, so that checks and modules
would cost as much as the arithmetic: there are none here, for inference on the CPU. What is
computed is what the blocks define. A single row goes through compiled code where there is a
compiler (`brickwork.kernels.token_step_cpu`), as even PyTorch's operators cost more than what they
compute then. B rows, C width, H query and G key/value heads of width D, S slots, E experts, K
chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from brickwork.blocks.attention import Attention
from brickwork.blocks.hooks import has_hooks
from brickwork.blocks.kv_cache import CacheEntries
from brickwork.blocks.linear import Linear
from brickwork.blocks.moe import MoE
from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope import RoPE
from brickwork.blocks.router import Router, SoftmaxRule
from brickwork.kernels.backend import preferred
from brickwork.kernels.rope import cos_sin
from brickwork.kernels.token_step_cpu import (
    CompiledAttention,
    CompiledExperts,
    CompiledProduct,
    unavailable_here,
)

FUSED_BYTES = 2**24  # q, k and v as one matrix up to here: a copy that saves two products
PARTS = (nn.Linear, Linear, nn.Embedding, nn.ModuleList, Attention, RMSNorm, MoE, Router, RoPE)


def why_not_plain(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str | None:
    """Why steps that see parameters only may not stand for `model`, or None.

    Nothing may be replaced, hooked, parametrised, cast or trained: modules of these very `kinds`,
    parameters of one dtype, float32 or float64, on the CPU.
    """
    if preferred() == "torch":
        return "the specification is asked for"
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return "PyTorch's operators are watched"
    for name, module in model.named_modules():
        if type(module) not in kinds:
            return f"{name} is a {type(module).__name__}"
        if has_hooks(module):
            return f"{name} has hooks"
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            return f"{name} has a max_norm"
        if isinstance(module, Attention) and module.training and module.dropout:
            return f"{name} drops weights"
        if isinstance(module, RMSNorm) and module.cast != "once":
            return f"{name} casts in another order"
        if isinstance(module, RoPE) and module.length_dependent:
            return f"{name} depends on the length"
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes not in ({torch.float32}, {torch.float64}):
        return "parameters must be float32 or float64 throughout"
    if any(p.device.type != "cpu" or type(p) is not nn.Parameter for p in model.parameters()):
        return "parameters must be plain ones on the CPU"
    return "autocast is on" if torch.is_autocast_enabled("cpu") else None


def why_not_single(model: nn.Module, *others: type[nn.Module]) -> str | None:
    """Why `model`, of the modules above and of `others`, cannot be run by these steps, or None."""
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            rope = module.rope
            half = rope is not None and rope.layout == "half" and rope.rotary_dim == rope.head_dim
            if not half or module.qk_norm != "full" or rope is not model.rope:
                return f"{name} has another RoPE or QK-norm"
            norms: tuple[Any, ...] = (module.q_norm, module.k_norm)
            if norms[0].eps != norms[1].eps:
                return f"{name} has norms of two eps"
        if isinstance(module, MoE):
            plain = module.rule == SoftmaxRule() and type(module.router) is Router
            plain = plain and module.gate_up is not None
            if not plain or module.selection_bias is not None or module.shared is not None:
                return f"{name} has other parts"
    return why_not_plain(model, (*PARTS, *others))


class Turn:
    """The rotations (B, 1, D) of the next token of each row, at its own position."""

    def __init__(self, rope: RoPE, positions_B1: Tensor, dtype: torch.dtype) -> None:
        self.rope, self.positions, self.dtype = rope, positions_B1, dtype
        self.inv_freq = rope.inv_freq(positions_B1.device)

    def __call__(self) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin(self.positions, self.inv_freq, self.rope.scale, self.dtype)
        self.positions = self.positions + 1
        return torch.cat((cos, cos), -1)[:, 0], torch.cat((-sin, sin), -1)[:, 0]


class Product:
    """`x Wᵀ + b`. A row by a matrix is bound by reading the matrix; as a batch of two products, one
    for each half of it, MKL reads it twice as fast, and with all its threads."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        even = len(weight) % 2 == 0 and weight.is_contiguous()
        self.halves = weight.view(2, -1, weight.shape[1]) if even else None

    def __call__(self, x_BC: Tensor) -> Tensor:
        if self.halves is None or len(x_BC) != 1:
            return F.linear(x_BC, self.weight, self.bias)
        twice = torch.cat((x_BC, x_BC)).unsqueeze(1).mT  # of these strides: others take a slow path
        y = torch.bmm(self.halves, twice).view(1, -1)
        return y if self.bias is None else y + self.bias


class AttentionStep:
    """`x + norm(attention(x))`, with keys and values in buffers (B, G, slots, D), filled with the
    first `length` of `held`."""

    def __init__(
        self, part: Attention, norm: RMSNorm, held: CacheEntries, length: int, slots: int
    ) -> None:
        assert part.q_norm is not None
        assert part.k_norm is not None
        self.part, self.norm, self.slots = part, norm, slots
        self.compiled: CompiledAttention | None = None
        if len(held.keys) == 1 and compiles():
            self.compiled = CompiledAttention(
                heads=part.num_heads,
                groups=part.num_kv_heads,
                eps=part.q_norm.eps,
                norm_eps=norm.eps,
                query=part.q_proj.weight,
                key=part.k_proj.weight,
                value=part.v_proj.weight,
                output=part.o_proj.weight,
                query_bias=part.q_proj.bias,
                key_bias=part.k_proj.bias,
                value_bias=part.v_proj.bias,
                output_bias=part.o_proj.bias,
                query_norm=part.q_norm.weight,
                key_norm=part.k_norm.weight,
                norm=norm.weight,
            )
        else:
            self._bind_products()
        self.qk_weight = torch.cat((part.q_norm.weight, part.k_norm.weight))
        self.eps = part.q_norm.eps
        self.sizes = part.num_heads * part.head_dim, part.num_kv_heads * part.head_dim
        self.keys, self.values = (
            self._buffer(each[:, :length]) for each in (held.keys, held.values)
        )
        self._use_buffers()

    def _bind_products(self) -> None:
        part = self.part
        products = (part.q_proj, part.k_proj, part.v_proj)
        self.products = [Product(p.weight, p.bias) for p in products]
        size = sum(p.weight.numel() * p.weight.element_size() for p in products)
        if size <= FUSED_BYTES and len({p.bias is None for p in products}) == 1:
            bias = None if part.q_proj.bias is None else torch.cat([p.bias for p in products])
            self.products = [Product(torch.cat([p.weight for p in products]), bias)]
        self.output = Product(part.o_proj.weight, part.o_proj.bias)

    def __call__(
        self, x_BC: Tensor, slot: int, turn: tuple[Tensor, Tensor], seen: Tensor | None
    ) -> Tensor:
        """`turn` are cos and sin (B, 1, D) of the tokens, which go to `slot`; `seen` (B, S) says
        which slots count."""
        if self.compiled is not None:
            row = None if seen is None else seen[0]
            return self.compiled(x_BC, slot, (turn[0].flatten(), turn[1].flatten()), row)
        part, rows = self.part, len(x_BC)
        heads, groups, width = part.num_heads, part.num_kv_heads, part.head_dim
        found = [product(x_BC) for product in self.products]
        qkv = found[0] if len(found) == 1 else torch.cat(found, 1)
        wide, narrow = self.sizes
        both = qkv[:, : wide + narrow] * self.qk_weight
        by_q = _root(qkv[:, :wide], self.eps)
        by_k = _root(qkv[:, wide : wide + narrow], self.eps)
        both = both.view(rows, heads + groups, width)
        both = torch.addcmul(both * turn[0], both.roll(width // 2, -1), turn[1])
        self.keys[:, :, slot] = both[:, heads:] * by_k
        self.values[:, :, slot] = qkv[:, wide + narrow :].view(rows, groups, width)
        q = (both[:, :heads] * by_q).view(rows, groups, heads // groups, width)
        keys, values = self.keys[:, :, : slot + 1], self.values[:, :, : slot + 1]
        mask = None if seen is None else seen[:, None, None, : slot + 1]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return _add_norm(x_BC, self.output(y.reshape(rows, wide)), self.norm)

    def grow(self, slots: int) -> None:
        """Make the buffers `slots` long, with what is in them."""
        more = slots - self.slots
        self.slots = slots
        self.keys, self.values = (
            torch.cat((each, each.new_empty(*each.shape[:2], more, each.shape[3])), 2)
            for each in (self.keys, self.values)
        )
        self._use_buffers()

    def _use_buffers(self) -> None:
        if self.compiled is not None:
            self.compiled.use(self.keys[0], self.values[0])

    def _buffer(self, held_BTGD: Tensor) -> Tensor:
        rows, length, groups, width = held_BTGD.shape
        buffer = held_BTGD.new_empty(rows, groups, self.slots, width)
        buffer[:, :, :length] = held_BTGD.transpose(1, 2)
        return buffer


class MoEStep:
    """`x + norm(moe(x))`; a single row goes through its experts one by one."""

    def __init__(self, part: MoE, norm: RMSNorm, rows: int) -> None:
        assert part.gate_up is not None
        assert part.down is not None
        assert isinstance(part.router, Router)
        self.part, self.norm = part, norm
        self.compiled: CompiledExperts | None = None
        if rows == 1 and compiles():
            self.compiled = CompiledExperts(
                chosen=part.top_k,
                normalize=part.normalize,
                norm_eps=norm.eps,
                router=part.router.weight,
                bias=part.router.bias,
                gate_up=part.gate_up,
                down=part.down,
                norm=norm.weight,
            )
        elif rows == 1:
            self.router = Product(part.router.weight, part.router.bias)
            self.gate_up = [Product(weight) for weight in part.gate_up.unbind()]
            self.down = [Product(weight) for weight in part.down.unbind()]

    def __call__(self, x_BC: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled(x_BC)
        y = self.part(x_BC).y if len(x_BC) != 1 else self._one_by_one(x_BC)
        return _add_norm(x_BC, y, self.norm)

    def _one_by_one(self, x_1C: Tensor) -> Tensor:
        part = self.part
        scores, order = self.router(x_1C).softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights = scores[0, : part.top_k].tolist()
        if part.normalize:
            weights = [weight / sum(weights) for weight in weights]
        y = torch.zeros_like(x_1C)
        for e, weight in zip(order[0, : part.top_k].tolist(), weights):
            gate, up = self.gate_up[e](x_1C).chunk(2, -1)
            y.add_(self.down[e](F.silu(gate).mul_(up)), alpha=weight)
        return y


def product_of(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """`x Wᵀ + b` for so many rows."""
    compiled = rows == 1 and compiles()
    return CompiledProduct(weight, bias) if compiled else Product(weight, bias)


def compiles() -> bool:
    """Whether the steps of one row are compiled code here."""
    return preferred() != "torch" and unavailable_here() is None


def _add_norm(x_BC: Tensor, y_BC: Tensor, norm: RMSNorm) -> Tensor:
    """`x + norm(y)`."""
    root = _root(y_BC, norm.eps)
    if isinstance(root, float):
        return torch.addcmul(x_BC, y_BC, norm.weight, value=root)
    return torch.addcmul(x_BC, y_BC * root[:, 0], norm.weight)


def _root(x_BC: Tensor, eps: float) -> float | Tensor:
    """`1 / sqrt(mean(x²) + eps)`: a number for one row, (B, 1, 1) for several."""
    if len(x_BC) == 1:
        row = x_BC[0]
        return 1 / math.sqrt(torch.dot(row, row).item() / len(row) + eps)
    return torch.rsqrt(x_BC.square().mean(-1, keepdim=True) + eps)[:, None]
