"""MiniLLaDA over some columns of a canvas, for block caches: its parameters, without its modules.

A pass over a block's few columns computes little, so that the checks and calls of the modules would
cost more than the arithmetic. There are none here, for inference on the CPU; what is computed is
what the modules define. B rows, A columns of a pass, S of the canvas, H heads of width D, C = H D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brickwork.blocks import single_token
from brickwork.blocks.attention import Attention
from brickwork.blocks.block_kv_cache import BlockKVCache
from brickwork.blocks.linear import Linear
from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope import RoPE
from brickwork.blocks.single_token import why_not_plain
from brickwork.blocks.swiglu import SwiGLU
from brickwork.kernels.rope import cos_sin

if TYPE_CHECKING:
    from brickwork.assemblies.mini_llada import MiniLLaDA

PARTS = (nn.Linear, Linear, nn.Embedding, nn.ModuleList, Attention, RMSNorm, SwiGLU, RoPE)


class ColumnsPass:
    """Called as the model is with a cache: ids and position_ids of the columns (B, A), whose slice
    is `columns`, and logits_at; returns logits (B, K, V).

    Arguments:
        model: one for which `why_not` gives None.
        caches: one per layer, filled by a pass over all columns; they are written to.
    """

    def __init__(self, model: MiniLLaDA, caches: Sequence[BlockKVCache]) -> None:
        self.model = model
        layers: list[Any] = list(model.layers)
        self.rope = layers[0].attention.rope
        self.inv_freq = self.rope.inv_freq("cpu")
        self.layers = [_Layer(*pair) for pair in zip(layers, caches)]

    @staticmethod
    def why_not(model: MiniLLaDA) -> str | None:
        """Why the pass would not compute what the model's modules do, or None."""
        from brickwork.assemblies.mini_llada import Block, MiniLLaDA

        own = type(model).forward, type(model).run_layer
        if own != (MiniLLaDA.forward, MiniLLaDA.run_layer):
            return f"{type(model).__name__} has a forward of its own"
        reason = why_not_plain(model, (*PARTS, type(model), Block))
        if reason is not None:
            return reason
        if any(isinstance(m, nn.Linear) and m.bias is not None for m in model.modules()):
            return "a linear layer has a bias"
        layers: list[Any] = list(model.layers)
        for part in (layer.attention for layer in layers):
            heads = part.num_heads, part.num_heads * part.head_dim
            if part.qk_norm or part.causal or heads != (part.num_kv_heads, part.dim):
                return "an attention layer is of another kind"
            rope = part.rope
            if rope is None or rope.layout != "interleaved" or rope.rotary_dim != rope.head_dim:
                return "a RoPE is of another kind"
            if rope is not layers[0].attention.rope:
                return "layers have RoPEs of their own"
        return None

    def __call__(
        self, ids_BA: Tensor, positions_BA: Tensor, columns: slice, logits_at: Tensor | None
    ) -> Tensor:
        model = self.model
        cos, sin = cos_sin(positions_BA, self.inv_freq, self.rope.scale, model.embed.weight.dtype)
        x = F.embedding(ids_BA, model.embed.weight)
        turn = torch.complex(cos, sin)
        rows, count, width = x.shape
        turn = turn.expand(rows, -1, -1, -1).reshape(rows * count, 1, -1)
        x = x.view(-1, width)
        for layer in self.layers:
            x = layer(x, turn, columns, rows)
        x = x.view(rows, count, width)
        if logits_at is not None:
            x = x.gather(1, logits_at[..., None].expand(-1, -1, width))
        return F.linear(_norm(x, model.norm), model.head.weight)


def columns_pass(model: MiniLLaDA, caches: Sequence[BlockKVCache]) -> ColumnsPass | None:
    """For sampling with block caches: the model over some columns; None if it has been altered."""
    return ColumnsPass(model, caches) if ColumnsPass.why_not(model) is None else None


class _Layer:
    def __init__(self, block: Any, cache: BlockKVCache) -> None:
        self.block = block
        part = block.attention
        self.heads, self.width = part.num_heads, part.head_dim
        self.weights = [each.weight for each in (part.q_proj, part.k_proj, part.v_proj)]
        if sum(weight.nbytes for weight in self.weights) <= single_token.FUSED_BYTES:
            self.weights = [torch.cat(self.weights)]
        self.keys, self.values = cache.buffers()  # (B, S, H, D)
        mask = cache.past_mask()
        self.seen = None if mask is None else mask[:, None, None]

    def __call__(self, x_NC: Tensor, turn: Tensor, columns: slice, rows: int) -> Tensor:
        block, heads, width = self.block, self.heads, self.width
        normed = _norm(x_NC, block.norm1)
        found = [F.linear(normed, weight) for weight in self.weights]
        qkv = (found[0] if len(found) == 1 else torch.cat(found, -1)).view(-1, 3 * heads, width)
        pairs = qkv[:, : 2 * heads].unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
        q, k = turned.view(rows, -1, 2, heads, width).unbind(2)
        self.keys[:, columns] = k
        self.values[:, columns] = qkv[:, 2 * heads :].view(rows, -1, heads, width)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), self.keys.transpose(1, 2), self.values.transpose(1, 2), self.seen
        )
        y = y.transpose(1, 2).reshape(x_NC.shape)
        x = torch.addmm(x_NC, y, block.attention.o_proj.weight.t())
        gate, up = F.linear(_norm(x, block.norm2), block.mlp.gate_up.weight).chunk(2, -1)
        return torch.addmm(x, F.silu(gate).mul_(up), block.mlp.down.weight.t())


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
