"""Multi-head attention.

B batch, T tokens, C width, H query heads, G key/value heads, D head width, S keys (T without a
cache).
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from brickwork.blocks.attention_mask import (
    Masks,
    Visible,
    default_positions,
    sequence_lengths,
    split_masks,
    visible_keys,
)
from brickwork.blocks.block_kv_cache import BlockKVCache
from brickwork.blocks.kv_cache import CacheEntries, KVCache, StaticKVCache
from brickwork.blocks.linear import Linear
from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope import RoPE
from brickwork.kernels.checks import (
    check_flag,
    check_floating,
    check_integer,
    check_one_of,
    check_shapes,
    claim,
)
from brickwork.kernels.rope import check_positions
from brickwork.kernels.sequences import check_seq_ids, sequence_starts


class Attention(nn.Module):
    """Scaled dot-product attention with grouped key/value heads.

    `y = o_proj(concat_h softmax(q_h k_gᵀ / √D + mask) v_g)`, g = h // (H / G), where q, k, v are
    projections of x; q and k are normalised (`qk_norm`), then rotated (`rope`), in this order. A
    query that sees no key gets 0 before `o_proj`.

    Papers: Vaswani et al., *Attention Is All You Need*, 2017; Ainslie et al., *GQA*, 2023; Henry et
    al., *Query-Key Normalization for Transformers*, 2020.

    Arguments:
        dim: width C of x and y.
        num_heads: H.
        num_kv_heads: G, a divisor of H; None means H.
        head_dim: D; None means C / H.
        qk_norm: RMSNorm of queries and keys over the whole projection, `"full"` (weights of H·D and
            G·D: OLMo 2), or in each head, `"head"` (weights of D: Qwen 3); None for neither.
        norm_eps: eps of these norms.
        rope: a `RoPE` of width D, or None for no position embedding. Layers may share one.
        causal: token t sees the tokens up to t only.
        bias: biases in `q_proj`, `k_proj`, `v_proj`.
        out_bias: a bias in `o_proj`; None means as `bias`.
        dropout: probability to drop an attention weight, in training only.

    Called with x (B, T, C) and, all optional:
        mask: which keys may be seen. Padding is (B, T), bool or integer, True or 1 at real tokens;
            with a cache it covers the new tokens, or all tokens: (B, S). Any other rule is
            (B, T, S), for all heads, or broadcastable to (B, H, T, S): bool, True where a query may
            see a key, or floating, added to the scores (the lowest finite value and below hide a
            key). A tuple of masks: all of them apply, together with `causal` and `seq_ids`.
        positions: (B, T), (1, T) or (T,), integers, for `rope`. By default they count the real
            tokens of each row (so padding changes nothing), of each packed sequence, or go on after
            the largest position in the cache.
        seq_ids: (B, T), integers that mark packed sequences, runs of equal ids; tokens see their
            own sequence only (see `brickwork.kernels.sequences`). Not with a cache.
        cache: a `KVCache` or `StaticKVCache` of this layer's own: the new tokens are appended, and
            see the earlier ones too; `causal` aligns the last query with the last key. Or, without
            `causal` and with `positions`, a `BlockKVCache`: the columns it selects are rewritten.

    With a `rope` whose frequencies depend on the length (dynamic, longrope), a sequence's length is
    its largest position of a real token + 1 at the time of the call; a cache then holds unrotated
    keys, so one layer's outputs are those of a call on all tokens so far. (In a deep model the
    hidden states of earlier tokens were computed at the lengths of earlier calls.)

    Returns (B, T, C). Raises ValueError for wrong shapes, dtypes, options, masks that are not 0/1
    (integers, on the CPU), `seq_ids` with a cache, and what the cache and `rope` refuse.

    >>> attention = Attention(16, num_heads=4, num_kv_heads=2, rope=RoPE(4), causal=True)
    >>> x = torch.randn(2, 5, 16)
    >>> y = attention(x, mask=torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]))
    >>> torch.allclose(y[1, 2:], attention(x[1:, 2:])[0], atol=1e-6)
    True
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: str | None = None,
        norm_eps: float = 1e-6,
        rope: RoPE | None = None,
        causal: bool = False,
        bias: bool = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        out_bias = bias if out_bias is None else out_bias
        check_integer("dim", dim, least=1)
        check_integer("num_heads", num_heads, least=1)
        check_integer("num_kv_heads", num_kv_heads, least=1)
        check_one_of("qk_norm", qk_norm, (None, "full", "head"))
        for name, flag in (("causal", causal), ("bias", bias), ("out_bias", out_bias)):
            check_flag(name, flag)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads = {num_heads} must be a multiple of num_kv_heads = {num_kv_heads}"
            )
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(
                    f"dim = {dim} must be a multiple of num_heads = {num_heads}, or head_dim given"
                )
            head_dim = dim // num_heads
        check_integer("head_dim", head_dim, least=1)
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be a probability below 1, got {dropout!r}")
        if rope is not None and not isinstance(rope, RoPE):
            raise ValueError(f"rope must be a RoPE module or None, got {type(rope).__name__}")
        if rope is not None and rope.head_dim != head_dim:
            raise ValueError(f"rope must have head_dim = {head_dim}, got {rope.head_dim}")
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.causal = causal
        self.dropout = float(dropout)
        query_dim, key_dim = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = Linear(dim, query_dim, bias=bias)
        self.k_proj = Linear(dim, key_dim, bias=bias)
        self.v_proj = Linear(dim, key_dim, bias=bias)
        self.o_proj = Linear(query_dim, dim, bias=out_bias)
        self.qk_norm = qk_norm
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            full = qk_norm == "full"
            self.q_norm = RMSNorm(query_dim if full else head_dim, eps=norm_eps)
            self.k_norm = RMSNorm(key_dim if full else head_dim, eps=norm_eps)
        self.rope = rope

    def reset_parameters(self) -> None:
        """Draw the projections as `nn.Linear` does; set the norms' scales to one."""
        for part in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.q_norm, self.k_norm):
            if part is not None:
                part.reset_parameters()

    def forward(
        self,
        x_BTC: Tensor,
        *,
        mask: Masks = None,
        positions: Tensor | None = None,
        seq_ids: Tensor | None = None,
        cache: KVCache | StaticKVCache | BlockKVCache | None = None,
    ) -> Tensor:
        batch, tokens = self._check(x_BTC, positions, seq_ids, cache)
        masks = split_masks(mask, batch, tokens, cache)
        starts = sequence_starts(seq_ids, masks.padding)
        if positions is None:
            positions = default_positions(
                masks.padding, starts, cache, tokens=tokens, device=x_BTC.device
            )
        positions = (positions if positions.ndim == 2 else positions[None]).long()

        q_BTHD, k_BTGD, v_BTGD = self._project(x_BTC)
        rope = self.rope
        if rope is not None and not rope.length_dependent:
            norms = (self.q_norm, self.k_norm) if self.qk_norm == "head" else ()
            q_BTHD, k_BTGD = rope.qk(q_BTHD, k_BTGD, positions, *norms)
        if cache is None:
            entries = CacheEntries(k_BTGD, v_BTGD, masks.padding, positions, 0)
        else:
            entries = cache.append(k_BTGD, v_BTGD, positions=positions, mask=masks.padding)
        k_BSGD = entries.keys
        if rope is not None and rope.length_dependent:
            lengths = sequence_lengths(entries.positions, entries.mask, starts)
            q_BTHD = rope(q_BTHD, positions, lengths)
            k_BSGD = rope(k_BSGD, entries.positions, lengths)

        visible = visible_keys(
            entries, masks, starts, causal=self.causal, num_heads=self.num_heads, tokens=tokens
        )
        dropout = self.dropout  # without one, no program depends on the mode
        if dropout and not self.training:
            dropout = 0.0
        y_BTHD = grouped_attention(q_BTHD, k_BSGD, entries.values, visible, dropout=dropout)
        return self.o_proj(y_BTHD.flatten(2))

    def _project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.unflatten(-1, (-1, self.head_dim)) for a in (q, k, v))
        later = self.rope is not None and not self.rope.length_dependent  # with the rotation
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm == "head":
            q, k = (q, k) if later else (self.q_norm(q), self.k_norm(k))
        return q, k, v

    def _check(
        self,
        x_BTC: Tensor,
        positions: Tensor | None,
        seq_ids: Tensor | None,
        cache: KVCache | StaticKVCache | BlockKVCache | None,
    ) -> tuple[int, int]:
        check_floating(x=x_BTC)
        size = check_shapes(x=(x_BTC, "B T C"))
        if size["C"] != self.dim:
            raise ValueError(f"x must have width dim = {self.dim}, got {tuple(x_BTC.shape)}")
        batch, tokens = size["B"], size["T"]
        if positions is not None:
            check_positions(positions, batch, tokens)
        check_seq_ids(seq_ids, (batch, tokens))
        if cache is not None:
            if not isinstance(cache, (KVCache, StaticKVCache, BlockKVCache)):
                raise ValueError(
                    f"cache must be a KVCache or a StaticKVCache, got {type(cache).__name__}"
                )
            if self.causal and isinstance(cache, BlockKVCache):
                raise ValueError("cache must not be a BlockKVCache where causal is True")
            if seq_ids is not None:
                raise ValueError("seq_ids must be None with a cache: it holds one sequence per row")
            if cache.batch_size not in (None, batch):
                raise ValueError(
                    f"x must have the cache's batch size {cache.batch_size}, "
                    f"got {tuple(x_BTC.shape)}"
                )
            claim("cache", cache, self)
        return batch, tokens

    def extra_repr(self) -> str:
        shown = [f"{self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"]
        shown.append(f"head_dim={self.head_dim}, qk_norm={self.qk_norm!r}, causal={self.causal}")
        if self.dropout:
            shown.append(f"dropout={self.dropout}")
        return ", ".join(shown)


def grouped_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    visible: Visible,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / √D) v over the visible keys, (B, T, H, D); 0 where no key is visible."""
    allowed, bias, causal = visible
    seen = None
    mask = allowed
    if allowed is not None:
        # A row without keys gets all of them, and its result is dropped: no softmax over nothing,
        # whose value and gradient differ between kernels.
        seen = allowed.any(-1, keepdim=True)
        mask = allowed | ~seen
        if bias is not None:
            mask = bias.masked_fill(~allowed, -torch.inf).masked_fill(~seen, 0.0).to(q_BTHD.dtype)

    tokens, num_heads, num_groups = q_BTHD.shape[1], q_BTHD.shape[2], k_BSGD.shape[2]
    repeats = num_heads // num_groups
    fold = tokens == 1 and repeats > 1 and (mask is None or mask.shape[1] == 1)
    gqa = bool(repeats > 1 and not fold and _gqa_is_fused(q_BTHD, mask))  # no tensor when traced
    if fold:  # the heads of a group as so many queries: nothing is copied
        q = rearrange(q_BTHD, "b t (g r) d -> b g (t r) d", r=repeats)
    else:
        q = q_BTHD.transpose(1, 2)
    k, v = k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)
    if repeats > 1 and not fold and not gqa:
        k, v = (repeat(a, "b g s d -> b (g r) s d", r=repeats) for a in (k, v))
    y = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=gqa
    )
    if fold:
        y = rearrange(y, "b g (t r) d -> b (g r) t d", r=repeats)
    if seen is not None:
        y = y.masked_fill(~seen, 0.0)
    return y.transpose(1, 2)


def _gqa_is_fused(q: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch has a fused kernel for grouped heads here. Where it has not, `enable_gqa`
    falls to the one that holds all scores, while repeated heads still run fused."""
    if q.device.type == "cuda":
        half = q.dtype in (torch.float16, torch.bfloat16)
        return half and mask is None and q.shape[-1] <= 256
    return q.device.type == "cpu"
