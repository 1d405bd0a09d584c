"""The Triton kernels of `rope` and `rope_qk`.

A program takes one token: all heads of the queries, then of the keys, HEADS at a time, with one row
of cosines and sines. A head has F pairs of channels (u, v) and TAIL channels that are not rotated;
with weights it is normalised first. H and G heads, F and TAIL are constants of compiled kernels.
The tail is taken in pieces as wide as loads of the pairs, so that threads keep their heads.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(X, heads, real, F: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The pairs (u, v) of some heads, X pointing at each."""
    if INTERLEAVED:  # loaded side by side, so that loads are wide
        c = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(X + c, real & (c < 2 * F), other=0.0).to(tl.float32)
        u, v = tl.split(tl.reshape(x, (heads, BLOCK, 2)))
    else:
        c = tl.arange(0, BLOCK)[None, :]
        u = tl.load(X + c, real & (c < F), other=0.0).to(tl.float32)
        v = tl.load(X + F + c, real & (c < F), other=0.0).to(tl.float32)
    return u, v


@triton.jit
def _store(Y, u, v, heads, real, F: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    u = u.to(Y.dtype.element_ty)
    v = v.to(Y.dtype.element_ty)
    if INTERLEAVED:
        c = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(Y + c, tl.reshape(tl.join(u, v), (heads, 2 * BLOCK)), real & (c < 2 * F))
    else:
        c = tl.arange(0, BLOCK)[None, :]
        tl.store(Y + c, u, real & (c < F))
        tl.store(Y + F + c, v, real & (c < F))


@triton.jit
def _load_tail(
    X, real, F: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The channels that are not rotated, in pieces."""
    WIDE: tl.constexpr = 2 * BLOCK if INTERLEAVED else BLOCK
    c = tl.arange(0, WIDE)[None, :]
    pieces = ()
    for i in tl.static_range((TAIL + WIDE - 1) // WIDE):
        at = X + 2 * F + i * WIDE + c
        pieces = pieces + (tl.load(at, real & (c < TAIL - i * WIDE), other=0.0),)
    return pieces


@triton.jit
def _store_tail(
    Y, pieces, real, F: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 2 * BLOCK if INTERLEAVED else BLOCK
    c = tl.arange(0, WIDE)[None, :]
    for i in tl.static_range(len(pieces)):
        at = Y + 2 * F + i * WIDE + c
        tl.store(at, pieces[i].to(Y.dtype.element_ty), real & (c < TAIL - i * WIDE))


@triton.jit
def _scaled(x, rstd, w, dtype: tl.constexpr, CAST_FIRST: tl.constexpr):
    """x · rstd · w, rounded as `rms_norm` rounds it."""
    x = x * rstd
    if CAST_FIRST:
        x = x.to(dtype).to(tl.float32)
    return (x * w).to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    X, Y, W, RSTD, x_h, cos, sin, eps,
    N: tl.constexpr, F: tl.constexpr, TAIL: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """All N heads of one token."""
    dtype: tl.constexpr = Y.dtype.element_ty
    for start in range(0, N, HEADS):
        head = start + tl.arange(0, HEADS)
        real = (head < N)[:, None]
        at = X + (head.to(tl.int64) * x_h * UNIT)[:, None]
        to = Y + (head * (2 * F + TAIL))[:, None]
        u, v = _load(at, HEADS, real, F, BLOCK, INTERLEAVED)
        tail = _load_tail(at, real, F, TAIL, BLOCK, INTERLEAVED)
        if W is not None:
            squares = tl.sum(u * u + v * v, 1)
            for i in tl.static_range(len(tail)):
                squares += tl.sum(tail[i].to(tl.float32) * tail[i].to(tl.float32), 1)
            rstd = tl.rsqrt(squares / (2 * F + TAIL) + eps)
            tl.store(RSTD + head, rstd, head < N)
            rstd = rstd[:, None]
            weights = W + tl.zeros((HEADS, 1), tl.int32)  # each thread loads what it needs
            wu, wv = _load(weights, HEADS, True, F, BLOCK, INTERLEAVED)
            u = _scaled(u, rstd, wu, dtype, CAST_FIRST)
            v = _scaled(v, rstd, wv, dtype, CAST_FIRST)
            wt = _load_tail(weights, True, F, TAIL, BLOCK, INTERLEAVED)
            scaled = ()
            for i in tl.static_range(len(tail)):
                x, w = tail[i].to(tl.float32), wt[i].to(tl.float32)
                scaled = scaled + (_scaled(x, rstd, w, dtype, CAST_FIRST),)
            tail = scaled
        _store(to, u * cos - v * sin, v * cos + u * sin, HEADS, real, F, BLOCK, INTERLEAVED)
        _store_tail(to, tail, real, F, TAIL, BLOCK, INTERLEAVED)


@triton.jit
def _angles(COS, SIN, token, T, table, F: tl.constexpr, BLOCK: tl.constexpr):
    """A token's cosines and sines, of a table with `table` rows per batch row, 0 if shared."""
    f = tl.arange(0, BLOCK)
    at = (token // T * table + token % T) * F + f
    return tl.load(COS + at, f < F, other=0.0)[None, :], tl.load(SIN + at, f < F, other=0.0)[
        None, :
    ]


@triton.jit(do_not_specialize=("q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "table", "T"))
def rotate(
    Q, K, QO, KO, COS, SIN, QW, KW, QR, KR,
    q_b, q_t, q_h, k_b, k_t, k_h, table, T, eps,
    H: tl.constexpr, G: tl.constexpr, F: tl.constexpr, TAIL: tl.constexpr, UNIT: tl.constexpr,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, CAST_FIRST: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate forth, or `BACK`; strides are in units of UNIT elements, so that it divides them."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = _angles(COS, SIN, token, T, table, F, BLOCK)
    if BACK:
        sin = -sin
    b = token // T
    t = token % T
    _rotate_heads(
        Q + (b * q_b + t * q_t) * UNIT, QO + token * (H * (2 * F + TAIL)), QW, QR + token * H,
        q_h, cos, sin, eps, H, F, TAIL, UNIT, HEADS_Q, BLOCK, INTERLEAVED, CAST_FIRST,
    )  # fmt: skip
    if K is not None:
        _rotate_heads(
            K + (b * k_b + t * k_t) * UNIT, KO + token * (G * (2 * F + TAIL)), KW, KR + token * G,
            k_h, cos, sin, eps, G, F, TAIL, UNIT, HEADS_K, BLOCK, INTERLEAVED,
            CAST_FIRST,
        )  # fmt: skip


@triton.jit
def _weighed(g, normal, dtype: tl.constexpr, CAST_FIRST: tl.constexpr):
    """The gradient of a weight from those of its products."""
    if CAST_FIRST:
        normal = normal.to(dtype).to(tl.float32)
    return g * normal


@triton.jit
def _heads_backward(
    DY, X, DX, W, RSTD, dy_h, x_h, cos, sin, wu_grad, wv_grad, wt_grad,
    N: tl.constexpr, F: tl.constexpr, TAIL: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """All N heads of one token: rotate back, then the gradient of the norm."""
    dtype: tl.constexpr = DX.dtype.element_ty
    weights = W + tl.zeros((HEADS, 1), tl.int32)  # each thread loads what it needs
    for start in range(0, N, HEADS):
        head = start + tl.arange(0, HEADS)
        real = (head < N)[:, None]
        dy_at = DY + (head.to(tl.int64) * dy_h * UNIT)[:, None]
        x_at = X + (head.to(tl.int64) * x_h * UNIT)[:, None]
        rstd = tl.load(RSTD + head, head < N, other=0.0)[:, None]
        gu, gv = _load(dy_at, HEADS, real, F, BLOCK, INTERLEAVED)
        u, v = _load(x_at, HEADS, real, F, BLOCK, INTERLEAVED)
        gu, gv = gu * cos + gv * sin, gv * cos - gu * sin
        u *= rstd
        v *= rstd
        wu_grad += _weighed(gu, u, dtype, CAST_FIRST)
        wv_grad += _weighed(gv, v, dtype, CAST_FIRST)
        wu, wv = _load(weights, HEADS, True, F, BLOCK, INTERLEAVED)
        gu *= wu
        gv *= wv
        along = tl.sum(gu * u + gv * v, 1)
        g_tail = _load_tail(dy_at, real, F, TAIL, BLOCK, INTERLEAVED)
        tail = _load_tail(x_at, real, F, TAIL, BLOCK, INTERLEAVED)
        wt = _load_tail(weights, True, F, TAIL, BLOCK, INTERLEAVED)
        slopes, normal, sums = (), (), ()
        for i in tl.static_range(len(tail)):
            g, x = g_tail[i].to(tl.float32), tail[i].to(tl.float32) * rstd
            sums = sums + (wt_grad[i] + _weighed(g, x, dtype, CAST_FIRST),)
            g *= wt[i].to(tl.float32)
            along += tl.sum(g * x, 1)
            slopes, normal = slopes + (g,), normal + (x,)
        wt_grad = sums
        along = (along / (2 * F + TAIL))[:, None]
        to = DX + (head * (2 * F + TAIL))[:, None]
        gu = (gu - u * along) * rstd
        gv = (gv - v * along) * rstd
        _store(to, gu, gv, HEADS, real, F, BLOCK, INTERLEAVED)
        grads = ()
        for i in tl.static_range(len(tail)):
            grads = grads + ((slopes[i] - normal[i] * along) * rstd,)
        _store_tail(to, grads, real, F, TAIL, BLOCK, INTERLEAVED)
    return wu_grad, wv_grad, wt_grad


@triton.jit
def _tokens_backward(
    DY, X, DX, COS, SIN, W, RSTD, DW, dy_b, dy_t, dy_h, x_b, x_t, x_h, table, T, M, first, step,
    N: tl.constexpr, F: tl.constexpr, TAIL: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """The tokens first, first + step, ...; the gradient of the weight stays in registers, and is
    stored as that of all u, all v, and the tail."""
    u_grad = tl.zeros((HEADS, BLOCK), tl.float32)
    v_grad = tl.zeros((HEADS, BLOCK), tl.float32)
    WIDE: tl.constexpr = 2 * BLOCK if INTERLEAVED else BLOCK
    t_grad = ()
    for _ in tl.static_range((TAIL + WIDE - 1) // WIDE):
        t_grad = t_grad + (tl.zeros((HEADS, WIDE), tl.float32),)
    for index in range(first, M, step):
        token = index * tl.full((), 1, tl.int64)
        cos, sin = _angles(COS, SIN, token, T, table, F, BLOCK)
        b = token // T
        t = token % T
        u_grad, v_grad, t_grad = _heads_backward(
            DY + (b * dy_b + t * dy_t) * UNIT, X + (b * x_b + t * x_t) * UNIT,
            DX + token * (N * (2 * F + TAIL)), W, RSTD + token * N, dy_h, x_h, cos, sin,
            u_grad, v_grad, t_grad,
            N, F, TAIL, UNIT, HEADS, BLOCK, INTERLEAVED, CAST_FIRST,
        )  # fmt: skip
    share = DW + tl.program_id(0).to(tl.int64) * (2 * F + TAIL)
    f = tl.arange(0, BLOCK)
    tl.store(share + f, tl.sum(u_grad, 0), f < F)
    tl.store(share + F + f, tl.sum(v_grad, 0), f < F)
    for i in tl.static_range(len(t_grad)):
        c = i * WIDE + tl.arange(0, WIDE)
        tl.store(share + 2 * F + c, tl.sum(t_grad[i], 0), c < TAIL)


@triton.jit(
    do_not_specialize=(
        *("dq_b", "dq_t", "dq_h", "dk_b", "dk_t", "dk_h"),
        *("q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "table", "T", "M", "programs"),
    )
)
def rotate_norm_backward(
    DQ, DK, Q, K, GQ, GK, COS, SIN, QW, KW, QR, KR, DW,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, q_b, q_t, q_h, k_b, k_t, k_h, table, T, M, programs,
    H: tl.constexpr, G: tl.constexpr, F: tl.constexpr, TAIL: tl.constexpr, UNIT: tl.constexpr,
    HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """M tokens, each program some at regular distances; the first `programs` take the queries."""
    first = tl.program_id(0)
    if first < programs:
        _tokens_backward(
            DQ, Q, GQ, COS, SIN, QW, QR, DW, dq_b, dq_t, dq_h, q_b, q_t, q_h, table, T, M,
            first, programs,
            H, F, TAIL, UNIT, HEADS_Q, BLOCK, INTERLEAVED, CAST_FIRST,
        )  # fmt: skip
    else:
        _tokens_backward(
            DK, K, GK, COS, SIN, KW, KR, DW, dk_b, dk_t, dk_h, k_b, k_t, k_h, table, T, M,
            first - programs, tl.num_programs(0) - programs,
            G, F, TAIL, UNIT, HEADS_K, BLOCK, INTERLEAVED, CAST_FIRST,
        )  # fmt: skip
