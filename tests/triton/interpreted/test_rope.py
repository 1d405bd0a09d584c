"""`rope` and `rope_qk`, whose kernels are the same."""

from __future__ import annotations

import pytest
import torch
from interpreter import assert_well_behaved, count_bytes, sparse_tensor
from support import assert_close, assert_same_function, gradients

from brickwork.kernels import rope_triton as launches
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.rope import rope, rope_reference
from brickwork.kernels.rope_qk import rope_qk, rope_qk_reference

LAYOUTS = ["half", "interleaved"]
HALVES = [torch.bfloat16, torch.float16]
# Heads of queries and keys, width, rotated channels: one head, odd numbers of heads, widths that
# are no powers of two, a rotated part, more heads than a tile has.
SIZES = [
    *(
        (1, 1, 2, 2),
        (3, 1, 12, 8),
        (4, 2, 16, 16),
        (2, 5, 96, 96),
        (9, 3, 64, 32),
        (12, 12, 64, 64),
    ),
    *((32, 8, 128, 128), (5, 1, 80, 20), (2, 1, 256, 256)),
]


class Problem:
    """Random arguments; `turn(backend)` is `rope_qk` as a function of the floating ones."""

    def __init__(
        self, H, G, D, R, layout, *, B=2, T=3, dtype=torch.float32, normed=True, **options
    ):
        self.floats = [torch.randn(B, T, H, D).to(dtype), torch.randn(B, T, G, D).to(dtype)]
        if normed:
            self.floats += [torch.randn(D).to(dtype), torch.randn(D).to(dtype)]
            options.setdefault("eps", 1e-6 if D >= 16 else 0.1)
        self.positions = torch.randint(0, 5000, (B, T))
        inv_freq = torch.rand(R // 2)
        self.options = {"inv_freq": inv_freq, "layout": layout, "rotary_dim": R, **options}
        self.terms = max(D, B * T * H)

    def turn(self, backend):
        def function(q, k, *weights):
            named = dict(zip(("q_weight", "k_weight"), weights))
            return rope_qk(q, k, self.positions, **named, **self.options, backend=backend)

        return function


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size, layout):
    """D1 32, D1 33, D2 39, D2 41, D2 42: heads, widths and rotated parts of every kind; the norm of
    each head comes before its rotation."""
    p = Problem(*size, layout, scale=1.3)
    small = {"terms": p.terms, "one_scale": size[2] < 16}
    assert_same_function(p.turn("triton"), p.turn("torch"), p.floats, **small)
    assert_same_function(p.turn("triton"), p.turn("torch"), p.floats[:2])
    alone = {**p.options, "positions_BT": p.positions}
    alone.pop("eps")
    assert_same_function(
        lambda x: rope(x, **alone, backend="triton"),
        lambda x: rope(x, **alone, backend="torch"),
        p.floats[:1],
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_tokens_than_programs(layout):
    """In the backward pass of the norms, each program takes several."""
    p = Problem(3, 2, 16, 16, layout, B=1, T=37)
    assert_same_function(p.turn("triton"), p.turn("torch"), p.floats, terms=p.terms)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cast", ["once", "before_weight"])
def test_narrow_dtypes(dtype, layout, cast):
    """D2 36: angles are float32; values are the reference's, few bits differ at all, and gradients
    are those of exact arithmetic on what the forward pass rounded."""
    p = Problem(4, 2, 64, 48, layout, dtype=dtype, cast=cast)
    values, grads = gradients(p.turn("triton"), p.floats)
    expected = rope_qk_reference(
        *p.floats[:2],
        p.positions,
        **dict(zip(("q_weight", "k_weight"), p.floats[2:])),
        **p.options,
    )
    for found, wanted in zip(values, expected):
        assert found.dtype == dtype
        # A normalised channel that is rounded the other way turns into both of its pair.
        assert_close(found, wanted, terms=64, scale=1e4)
        assert (found != wanted).double().mean() < 0.01
    _, exact = gradients(exact_turn(p, dtype, cast), [t.double() for t in p.floats])
    for found, wanted in zip(grads, exact):
        assert found.dtype == dtype
        assert_close(found, wanted, terms=p.terms)


def exact_turn(problem, dtype, cast):
    """The op in float64, with the roundings of the reference, which gradients pass unchanged."""

    def rounded(t):
        return t + (t.to(dtype).double() - t).detach()

    def function(q, k, q_weight, k_weight):
        out = []
        for x, w in ((q, q_weight), (k, k_weight)):
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + problem.options["eps"])
            y = rounded((rounded(y) if cast == "before_weight" else y) * w)
            kept = {n: v for n, v in problem.options.items() if n not in ("eps", "cast")}
            narrow = {**kept, "inv_freq": kept["inv_freq"]}
            out.append(turned_by_float32_angles(y, problem.positions, **narrow).to(dtype))
        return out

    return function


def turned_by_float32_angles(x, positions, *, inv_freq, layout, rotary_dim):
    """`rope` in float64 with the angles of float32."""
    angles = (positions[..., None] * inv_freq).double()[:, :, None]
    y = x.clone()
    half = rotary_dim // 2
    pairs = (slice(0, half), slice(half, rotary_dim))
    if layout == "interleaved":
        pairs = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    u, v = x[..., pairs[0]], x[..., pairs[1]]
    y[..., pairs[0]] = u * angles.cos() - v * angles.sin()
    y[..., pairs[1]] = v * angles.cos() + u * angles.sin()
    return y


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_beyond_are_returned_bit_for_bit(dtype, layout):
    """D2 39."""
    x = torch.randn(1, 2, 3, 24).to(dtype)
    x[0, 0, 0, 20] = torch.nan
    options = {"inv_freq": torch.rand(4), "layout": layout, "rotary_dim": 8}
    y = rope(x, torch.tensor([7, 900]), **options, backend="triton")
    kind = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert torch.equal(y[..., 8:].view(kind), x[..., 8:].view(kind))
    expected = rope_reference(x, torch.tensor([7, 900]), **options)
    assert_close(y[..., :8], expected[..., :8])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_and_frequencies_of_every_shape(layout):
    """D2 43: per row, shared, and per token."""
    B, T, D = 3, 4, 8
    x = torch.randn(B, T, 2, D)
    for positions in (torch.arange(T), torch.arange(T)[None] + 5, torch.randint(0, 99, (B, T))):
        for shape in ((D // 2,), (1, D // 2), (B, D // 2), (1, T, D // 2), (B, T, D // 2)):
            options = {"inv_freq": torch.rand(shape), "layout": layout}
            for given in (positions, positions.int()):
                y = rope(x, given, **options, backend="triton")
                assert_close(y, rope_reference(x, given, **options))


def test_scores_depend_on_differences_of_positions():
    """D2 43."""
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)
    scores = []
    for shift in (0, 1000):
        options = {"inv_freq": torch.tensor(2.0) ** -torch.arange(16), "layout": "half"}
        a = rope(q, torch.tensor([shift + 5]), **options, backend="triton")
        b = rope(k, torch.tensor([shift + 2]), **options, backend="triton")
        scores.append((a * b).sum())
    assert_close(scores[1], scores[0], terms=32, scale=1000.0)


def lattice(B, T, H, D):
    """Tensors of shape (B, T, H, D) of every kind of strides."""
    yield torch.randn(B, T, H, D)
    yield torch.randn(B, H, T, D).transpose(1, 2)
    yield torch.randn(T, B, H, D).transpose(0, 1)
    yield torch.randn(B, T, 3, H, D)[:, :, 1]
    yield torch.randn(B, T, H * D + 5)[:, :, 5:].unflatten(2, (H, D))
    yield torch.randn(B, T, H, 2 * D)[..., ::2]
    yield torch.randn(B, T, D, H).transpose(2, 3)
    yield torch.randn(B, T, 1, D).expand(B, T, H, D)
    yield torch.randn(1, 1, H, D).expand(B, T, H, D)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(normed, layout):
    """D1 7, D1 8, D1 9: of q, k and the incoming gradients, each of another kind of strides."""
    p = Problem(4, 4, 24, 16, layout, normed=normed)
    weights = p.floats[2:]
    p.positions = p.positions[:, :2]
    kinds = list(lattice(2, 2, 4, 24))
    for i in range(len(kinds)):
        q, k, dq, dk = (kinds[(i + shift) % len(kinds)] for shift in range(4))
        results = []
        for backend in ("triton", "torch"):
            leaves = [t.detach().requires_grad_() for t in (q, k, *weights)]
            outputs = p.turn(backend)(*leaves)
            results.append([*outputs, *torch.autograd.grad(outputs, leaves, [dq, dk])])
        for found, expected in zip(*results):
            assert_close(found, expected, terms=p.terms)


@pytest.mark.parametrize("shape", [(0, 3, 4, 16), (2, 0, 4, 16), (2, 3, 0, 16)])
@pytest.mark.parametrize("normed", [False, True])
def test_empty(shape, normed):
    """D1 23, D1 24."""
    B, T, _, D = shape
    q = torch.empty(shape, requires_grad=True)
    k = torch.randn(B, T, 2, D, requires_grad=True)
    weights = [torch.ones(D, requires_grad=True) for _ in range(2)] if normed else [None, None]
    options = {"inv_freq": torch.rand(D // 2), "layout": "half"}
    named = dict(zip(("q_weight", "k_weight"), weights))
    outputs = rope_qk(q, k, torch.zeros(B, T).long(), **named, **options, backend="triton")
    assert outputs.q.shape == shape
    wanted = [q, k, *weights] if normed else [q, k]
    grads = torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs])
    assert [g.shape for g in grads] == [t.shape for t in wanted]
    if normed:
        assert not grads[2].any()


@pytest.mark.parametrize("used", ["q", "k"])
@pytest.mark.parametrize("normed", [False, True])
def test_one_result_alone_has_its_gradients(used, normed):
    p = Problem(4, 2, 16, 16, "half", normed=normed)

    def only(backend):
        def function(*floats):
            loss = getattr(p.turn(backend)(*floats), used).sin().sum()
            return sum((t * 0).sum() for t in floats) + loss

        return function

    assert_same_function(only("triton"), only("torch"), p.floats, terms=p.terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_behaves(dtype, normed):
    """D1 1, D1 3, D1 4, D1 5, D1 28, D2 44."""
    p = Problem(3, 1, 16, 8, "interleaved", dtype=dtype, normed=normed)
    assert_well_behaved(p.turn("triton"), p.floats)


def test_the_ops_are_well_registered():
    """D1 28."""
    p = Problem(2, 1, 8, 4, "half", dtype=torch.bfloat16, eps=1e-3)
    q, k, qw, kw = (t.requires_grad_() for t in p.floats)
    angles = torch.rand(2, 3, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    op = torch.ops.brickwork.rope_triton.default
    torch.library.opcheck(op, (q, k, cos, sin, qw, kw, 1e-3, True, True))
    torch.library.opcheck(op, (q, None, cos, sin, None, None, 0.0, False, False))
    q, k, qw, kw = (t.detach() for t in (q, k, qw, kw))
    _, _, *rstd = op(q, k, cos, sin, qw, kw, 1e-3, True, True)
    back = torch.ops.brickwork.rope_triton_backward.default
    torch.library.opcheck(back, (q, None, cos, sin, False))
    back = torch.ops.brickwork.rope_norm_triton_backward.default
    torch.library.opcheck(back, (q, k, q, k, cos, sin, qw, kw, *rstd, True, True))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes(normed, layout):
    """What the launcher's docstring states, and nothing but tables and weights is read twice."""
    B, T, H, G, D, R = 2, 9, 6, 2, 32, 24
    p = Problem(H, G, D, R, layout, B=B, T=T, dtype=torch.bfloat16, normed=normed)
    leaves = [t.requires_grad_() for t in p.floats]
    pair = sum(t.numel() for t in leaves[:2]) * 2
    table = B * T * 2 * (R // 2) * 4
    weights, rstd = (2 * D * 2, B * T * (H + G) * 4) if normed else (0, 0)
    with count_bytes() as moved:
        outputs = p.turn("triton")(*leaves)
    assert moved.read == pair + table + weights
    assert moved.stored == moved.written == pair + rstd
    assert normed or moved.loaded == moved.read
    upstream = [torch.randn_like(o) for o in outputs]
    with count_bytes() as moved:
        torch.autograd.grad(outputs, leaves, upstream)
    assert moved.read == pair * (1 + normed) + table + weights + rstd
    shares = moved.written - pair
    sizes = (H, G, R // 2, D - R)
    shape = launches.tile_shape(*sizes, torch.bfloat16, layout == "interleaved", 32)
    programs = 2048 // shape.registers // shape.warps
    assert shares == (programs * D * 4 if normed else 0)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_past_two_to_the_31_elements(axis, normed):
    """D1 12: batch rows, tokens and heads apart."""
    strides = [24, 24, 24, 1]
    strides[axis] = 2**30
    strides[(axis + 1) % 3] = 8
    q = sparse_tensor((2**31 + 128,), torch.bfloat16).as_strided((3, 3, 3, 8), strides)
    q.copy_(torch.randn(3, 3, 3, 8))
    p = Problem(3, 3, 8, 8, "half", B=3, normed=normed, eps=0.1) if normed else Problem(
        3, 3, 8, 8, "half", B=3, normed=False
    )  # fmt: skip
    others = [t.bfloat16() for t in p.floats[1:]]
    results = []
    for x in (q, q.contiguous()):
        leaves = [t.detach().requires_grad_() for t in (x, *others)]
        outputs = p.turn("triton")(*leaves)
        upstream = [x.detach(), others[0]]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_interpreter_runs_on_request_only():
    p = Problem(2, 1, 8, 8, "half", normed=False)
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(launches, "_rope", lambda *a: calls.append(a) or p.floats)
        p.turn("auto")(*p.floats)
        assert not calls
        with prefer("triton"):
            p.turn("auto")(*p.floats)
        assert len(calls) == 1


def test_what_it_refuses():
    p = Problem(2, 1, 8, 8, "half", normed=False)
    with pytest.raises(BackendUnavailable, match="got float64"):
        p.turn("triton")(p.floats[0].double(), p.floats[1])
    p.options["inv_freq"].requires_grad_()
    with pytest.raises(BackendUnavailable, match="it has no gradient of inv_freq"):
        p.turn("triton")(*p.floats)
    with torch.no_grad():
        p.turn("triton")(*p.floats)
