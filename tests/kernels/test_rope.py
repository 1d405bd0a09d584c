from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, assert_same_function, gradcheck
from torch._subclasses.fake_tensor import FakeTensorMode

from brickwork.blocks import RoPE
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.rope import (
    convert_rope_layout,
    rope,
    rope_complex_reference,
    rope_interleaved_reference,
    rope_reference,
    rope_rotate_half_reference,
)

LAYOUTS = ["half", "interleaved"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Odd lengths, one head, head widths of 2 and of no power of two.
SHAPES = st.tuples(
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([1, 3]),
    st.sampled_from([2, 6, 16, 80]),
)


def frequencies(rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    return base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)


def by_hand(x, positions, inv_freq, layout, scale=1.0):
    """Channel by channel, in Python numbers."""
    x, y = x.double(), x.double().clone()
    num_angles = inv_freq.shape[-1]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for i in range(num_angles):
                u, v = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + num_angles)
                angle = positions[b, t].double() * inv_freq[i].double()
                cos, sin = angle.cos() * scale, angle.sin() * scale
                y[b, t, :, u] = x[b, t, :, u] * cos - x[b, t, :, v] * sin
                y[b, t, :, v] = x[b, t, :, v] * cos + x[b, t, :, u] * sin
    return y


@pytest.mark.parametrize("layout", LAYOUTS)
@given(shape=SHAPES, part=st.sampled_from([0.5, 1.0]), scale=st.sampled_from([1.0, 1.3]))
def test_equals_the_equation(layout, shape, part, scale):
    x = torch.randn(shape, dtype=torch.float64)
    positions = torch.randint(0, 50, shape[:2])
    rotary_dim = max(2, int(shape[3] * part) // 2 * 2)
    inv_freq = frequencies(rotary_dim)
    y = rope(x, positions, inv_freq=inv_freq, layout=layout, rotary_dim=rotary_dim, scale=scale)
    assert_close(y, by_hand(x, positions, inv_freq, layout, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@given(shape=SHAPES)
def test_complex_form_equals_its_real_twin(dtype, shape):
    """R1, D2 #44: values and gradients."""
    x, positions = torch.randn(shape, dtype=dtype), torch.randint(0, 50, shape[:2])
    options = {"inv_freq": frequencies(shape[3]), "scale": 1.1}
    assert_same_function(
        lambda x: rope_interleaved_reference(x, positions, **options),
        lambda x: rope_complex_reference(x, positions, **options),
        [x],
    )


def test_the_op_exports_without_complex_numbers():
    """R1."""

    class Both(torch.nn.Module):
        def forward(self, x, positions):
            inv_freq = frequencies(8)
            return [rope(x, positions, inv_freq=inv_freq, layout=layout) for layout in LAYOUTS]

    x, positions = torch.randn(2, 5, 3, 8), torch.arange(5)
    program = torch.export.export(Both(), (x, positions))
    for node in program.graph.nodes:
        value = node.meta.get("val")
        assert not (isinstance(value, torch.Tensor) and value.is_complex())
    for actual, layout in zip(program.module()(x, positions), LAYOUTS):
        options = {"inv_freq": frequencies(8), "layout": layout}
        assert torch.equal(actual, rope(x, positions, **options, backend="torch"))
        assert_close(actual, rope(x, positions, **options))


@given(shape=SHAPES, part=st.sampled_from([0.5, 1.0]))
def test_layouts_are_equal_after_a_permutation_of_channels(shape, part):
    """R6, D2 #42."""
    x, positions = torch.randn(shape), torch.randint(0, 50, shape[:2])
    rotary_dim = max(2, int(shape[3] * part) // 2 * 2)
    options = {"inv_freq": frequencies(rotary_dim), "rotary_dim": rotary_dim, "backend": "torch"}

    def to(layout, x):  # channels of one head as rows
        rows = x.movedim(-1, 0)
        return convert_rope_layout(rows, num_heads=1, to=layout, rotary_dim=rotary_dim).movedim(
            0, -1
        )

    through_half = to("interleaved", rope(to("half", x), positions, layout="half", **options))
    assert torch.equal(through_half, rope(x, positions, layout="interleaved", **options))


@given(
    num_heads=st.sampled_from([1, 2, 5]),
    head_dim=st.sampled_from([2, 4, 6, 16]),
    tail=st.sampled_from([0, 2, 3]),
    more=st.sampled_from([(), (1,), (3,), (2, 3)]),
)
def test_conversion_and_back_is_the_identity(num_heads, head_dim, tail, more):
    """R6: weights, biases and norm weights, whole and per head, with partial rotary."""
    rows = num_heads * (head_dim + tail)
    weight = torch.randn(rows, *more)
    options = {"num_heads": num_heads, "rotary_dim": head_dim}
    half = convert_rope_layout(weight, to="half", **options)
    assert torch.equal(convert_rope_layout(half, to="interleaved", **options), weight)
    first = weight.reshape(num_heads, -1, *more)[0]
    half = half.reshape(num_heads, -1, *more)[0]
    assert torch.equal(half[: head_dim // 2], first[:head_dim:2])
    assert torch.equal(half[head_dim // 2 : head_dim], first[1:head_dim:2])
    assert torch.equal(half[head_dim:], first[head_dim:])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(shape=SHAPES, offset=st.sampled_from([1, 17, 1000]))
def test_scores_depend_on_the_difference_of_positions(layout, shape, offset):
    """D2 #43."""
    q, k = torch.randn(2, *shape, dtype=torch.float64)
    positions = torch.randint(0, 50, shape[:2])
    options = {"inv_freq": frequencies(shape[3]).double(), "layout": layout}

    def scores(positions):
        turned = [rope(a, positions, **options) for a in (q, k)]
        return torch.einsum("bthd,bshd->bhts", *turned)

    assert_close(scores(positions + offset), scores(positions), terms=1000 * shape[3])
    last = positions * 0 + offset  # all at one place: as without any rotation
    assert_close(scores(last), torch.einsum("bthd,bshd->bhts", q, k), terms=shape[3])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(shape=SHAPES)
def test_norms_are_preserved_and_position_0_is_the_identity(layout, shape):
    x, positions = torch.randn(shape), torch.randint(0, 100000, shape[:2])
    options = {"inv_freq": frequencies(shape[3]), "layout": layout}
    y = rope(x, positions, **options)
    assert_close(y.norm(dim=-1), x.norm(dim=-1), terms=shape[3])
    assert_close(rope(x, positions, scale=2.0, **options), y * 2)
    assert torch.equal(rope(x, positions * 0, **options), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtype_is_kept_and_the_tail_bit_for_bit(layout, dtype):
    """R10, D2 #39: also where the tail holds what arithmetic would change."""
    x = torch.randn(2, 3, 2, 10).to(dtype)
    x[..., 6] = float("nan")
    x[..., 7] = -0.0
    y = rope(x, torch.arange(3), inv_freq=frequencies(6), layout=layout, rotary_dim=6, scale=1.5)
    assert y.dtype == dtype
    wide = {torch.float64: torch.int64, torch.float32: torch.int32}
    bits = wide.get(dtype, torch.int16)
    assert torch.equal(y[..., 6:].contiguous().view(bits), x[..., 6:].contiguous().view(bits))
    assert not y[..., :6].isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_angles_are_those_of_float32(layout, dtype):
    """R3, D2 #36: at positions that the narrow type cannot count; under autocast too."""
    x = torch.randn(1, 64, 2, 16).to(dtype)
    positions = 8192 - torch.arange(64)
    options = {"inv_freq": frequencies(16), "layout": layout}
    wide = rope(x.float(), positions, **options)
    assert torch.equal(rope(x, positions, **options), wide.to(dtype))
    with torch.autocast("cpu", dtype):
        assert torch.equal(rope(x, positions, **options), wide.to(dtype))
        assert torch.equal(rope(x.float(), positions, **options), wide)


@pytest.mark.parametrize("form", [rope_interleaved_reference, rope_rotate_half_reference])
def test_float64_angles_for_float64_input(form):
    x, positions = torch.randn(1, 2, 1, 4, dtype=torch.float64), torch.tensor([[10**6 + 1, 3]])
    y = form(x, positions, inv_freq=frequencies(4))
    layout = "half" if form is rope_rotate_half_reference else "interleaved"
    assert_close(y, by_hand(x, positions, frequencies(4), layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [6, 4])
@pytest.mark.parametrize("rows", [(), (2,), (2, 3)])
def test_gradcheck(layout, rotary_dim, rows):
    """In x and in the frequencies, which may be shared, of a row or of a token."""
    positions = torch.tensor([[0, 1, 5], [2, 0, 3]])
    gradcheck(
        lambda x, f: rope(
            x, positions, inv_freq=f, layout=layout, rotary_dim=rotary_dim, scale=1.2
        ),
        [torch.randn(2, 3, 2, 6), torch.rand(*rows, rotary_dim // 2)],
    )


def test_gradcheck_of_the_complex_form():
    positions = torch.tensor([[0, 1, 5]])
    gradcheck(
        lambda x, f: rope_complex_reference(x, positions, inv_freq=f, rotary_dim=4, scale=1.2),
        [torch.randn(1, 3, 2, 6), torch.rand(2)],
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_and_frequencies_broadcast(layout):
    x, inv_freq = torch.randn(2, 5, 3, 8), frequencies(8)
    rows = torch.arange(5).expand(2, 5)
    expected = rope(x, rows, inv_freq=inv_freq, layout=layout)
    for positions in (rows[0], rows[:1], rows.int(), rows.to(torch.uint8)):
        for given_freq in (inv_freq, inv_freq.expand(1, 4), inv_freq.expand(2, 5, 4)):
            y = rope(x, positions, inv_freq=given_freq, layout=layout)
            assert torch.equal(y, expected)
    per_row = torch.stack((inv_freq, inv_freq / 2))
    y = rope(x, rows, inv_freq=per_row, layout=layout)
    for b in range(2):
        alone = rope(x[b : b + 1], rows[:1], inv_freq=per_row[b], layout=layout)
        assert torch.equal(y[b : b + 1], alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_expanded_empty_and_meta(layout):
    options = {"inv_freq": frequencies(4), "layout": layout}
    positions = torch.arange(3)
    wide = torch.randn(2, 3, 2, 8)
    for x in (wide[..., ::2], torch.randn(2, 2, 3, 8).transpose(1, 2)[..., 4:]):
        assert torch.equal(
            rope(x, positions, **options), rope(x.contiguous(), positions, **options)
        )
    x = torch.randn(1, 3, 1, 4).expand(2, 3, 5, 4)
    before = x.clone()
    rope(x, positions, **options)
    assert torch.equal(x, before)
    for shape in ((0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4)):
        x = torch.empty(shape, requires_grad=True)
        y = rope(x, torch.zeros(shape[1], dtype=torch.int64), **options)
        assert y.shape == shape
        y.sum().backward()
    x = torch.empty(2, 3, 2, 4, device="meta")
    y = rope(x, positions.to("meta"), inv_freq=frequencies(4).to("meta"), layout=layout)
    assert y.shape == x.shape
    assert y.is_meta


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiles_to_one_graph_with_gradients_and_vmap(layout):
    x, positions = torch.randn(2, 5, 3, 8), torch.randint(0, 9, (2, 5))

    def turn(x):
        return rope(x, positions, inv_freq=frequencies(6), layout=layout, rotary_dim=6)

    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled, turn, [x])
    stacked = torch.stack((x, x * 2))
    assert_close(torch.func.vmap(turn)(stacked), torch.stack((turn(x), turn(x * 2))))
    checkpointed = torch.utils.checkpoint.checkpoint
    assert_same_function(lambda x: checkpointed(turn, x, use_reentrant=False), turn, [x])


def test_errors():
    x, positions, inv_freq = torch.randn(2, 3, 2, 6), torch.arange(3), frequencies(6)

    def call(x=x, positions=positions, inv_freq=inv_freq, layout="half", **options):
        return rope(x, positions, inv_freq=inv_freq, layout=layout, **options)

    with pytest.raises(ValueError, match=r"x must have shape \(B, T, H, D\), got \(3, 2, 6\)"):
        call(x[0])
    with pytest.raises(ValueError, match=r"x must be floating point, got torch\.int64"):
        call(x.long())
    with pytest.raises(ValueError, match=r"positions must be integers, got torch\.float32"):
        call(positions=positions.float())
    for wrong in (torch.arange(4), torch.zeros(3, 3, dtype=torch.long), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"positions must have shape .*B = 2, T = 3, got"):
            call(positions=wrong)
    with pytest.raises(ValueError, match=r"inv_freq must have shape .*F = 3 .*got \(2,\)"):
        call(inv_freq=inv_freq[:2])
    with pytest.raises(ValueError, match=r"inv_freq must have shape .*F = 2 .*got \(3,\)"):
        call(rotary_dim=4)
    with pytest.raises(ValueError, match=r"inv_freq must have shape .*got \(3, 3\)"):
        call(inv_freq=inv_freq.expand(3, 3))
    with pytest.raises(ValueError, match=r"inv_freq must have shape .*got \(2, 2, 3\)"):
        call(inv_freq=inv_freq.expand(2, 2, 3))
    with pytest.raises(ValueError, match=r"layout must be one of .* got 'complex'"):
        call(layout="complex")
    with pytest.raises(ValueError, match="rotary_dim must be even and at most head_dim = 6, got 3"):
        call(rotary_dim=3)
    with pytest.raises(ValueError, match="rotary_dim must be even and at most head_dim = 6, got 8"):
        call(rotary_dim=8)
    with pytest.raises(ValueError, match="rotary_dim must be an integer of at least 2, got 0"):
        call(rotary_dim=0)
    with pytest.raises(ValueError, match="head_dim must be even to be rotated, got 5"):
        call(x[..., :5])
    with pytest.raises(BackendUnavailable, match="rope has no backend 'cpu'"):
        call(backend="cpu")


def test_conversion_errors():
    """R6: an odd head width is an error."""
    with pytest.raises(ValueError, match=r"rows that divide into num_heads = 4 heads, .*\(6, 2\)"):
        convert_rope_layout(torch.zeros(6, 2), num_heads=4, to="half")
    with pytest.raises(ValueError, match="head_dim must be even to be rotated, got 3"):
        convert_rope_layout(torch.zeros(6), num_heads=2, to="half")
    with pytest.raises(ValueError, match=r"to must be one of .* got 'complex'"):
        convert_rope_layout(torch.zeros(6), num_heads=1, to="complex")
    with pytest.raises(ValueError, match="num_heads must be an integer of at least 1, got 0"):
        convert_rope_layout(torch.zeros(6), num_heads=0, to="half")
    with pytest.raises(ValueError, match=r"rows that divide .* got shape \(\)"):
        convert_rope_layout(torch.zeros(()), num_heads=1, to="half")


def test_the_specification_is_the_two_forms():
    x, positions, inv_freq = torch.randn(1, 3, 2, 4), torch.arange(3), frequencies(4)
    forms = {"half": rope_rotate_half_reference, "interleaved": rope_interleaved_reference}
    for layout, form in forms.items():
        y = rope_reference(x, positions, inv_freq=inv_freq, layout=layout)
        assert torch.equal(y, form(x, positions, inv_freq=inv_freq))
        options = {"inv_freq": inv_freq, "layout": layout}
        assert torch.equal(y, rope(x, positions, **options, backend="torch"))
        assert_close(rope(x, positions, **options), y)


def test_tables_follow_whatever_rewrites_positions_and_frequencies():
    """Through numpy and `.data` too, where nobody counts the writes."""
    array, freq = np.arange(4), frequencies(8)
    positions, x = torch.from_numpy(array), torch.randn(1, 4, 2, 8)
    for change in (
        lambda: array.__iadd__(100),
        lambda: positions.data.add_(7),
        lambda: freq.data.mul_(3),
    ):
        rope(x, positions, inv_freq=freq, layout="half")
        change()
        fresh = rope(x, positions.clone(), inv_freq=freq.clone(), layout="half", backend="torch")
        assert torch.equal(rope(x, positions, inv_freq=freq, layout="half"), fresh)


def test_fake_tensors_leave_nothing_behind():
    turn, x, positions = RoPE(8), torch.randn(1, 4, 2, 8), torch.arange(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        turn(x, positions)
    assert type(turn(x, positions)) is torch.Tensor


def test_interleaved_channels_at_an_odd_place_in_memory():
    x = torch.randn(49)[1:].view(1, 3, 4, 4)
    options = {"inv_freq": frequencies(4), "layout": "interleaved"}
    found = rope(x, torch.arange(3), **options)
    assert_close(found, rope(x, torch.arange(3), **options, backend="torch"))
