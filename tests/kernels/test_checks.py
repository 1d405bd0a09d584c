from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from brickwork.kernels.checks import (
    check_flag,
    check_floating,
    check_integer,
    check_one_of,
    check_shapes,
    values_readable,
)

SIZES = st.integers(0, 5)


@given(b=SIZES, c=SIZES, other=SIZES)
def test_a_name_stands_for_one_size(b, c, other):
    x, weight = torch.empty(b, c), torch.empty(other)
    if other == c:
        assert check_shapes(x=(x, "B C"), weight=(weight, "C")) == {"B": b, "C": c}
    else:
        with pytest.raises(
            ValueError, match=rf"^weight must .* C = {c} as in x, got \({other},\)$"
        ):
            check_shapes(x=(x, "B C"), weight=(weight, "C"))


@given(leading=st.lists(SIZES, max_size=3), c=SIZES)
def test_leading_axes_are_free(leading, c):
    assert check_shapes(x=(torch.empty(*leading, c), "... C"), y=(torch.empty(c), "... C")) == {
        "C": c
    }


def test_a_name_may_stand_twice_in_one_shape():
    assert check_shapes(x=(torch.empty(3, 3), "N N")) == {"N": 3}
    with pytest.raises(ValueError, match=r"x must have shape \(N, N\) with N = 3 as in x"):
        check_shapes(x=(torch.empty(3, 4), "N N"))


def test_shapes_with_other_numbers_of_axes():
    with pytest.raises(ValueError, match=r"^x must have shape \(B, C\), got \(3,\)$"):
        check_shapes(x=(torch.empty(3), "B C"))
    with pytest.raises(ValueError, match=r"^x must have shape \(\.\.\., B, C\), got \(3,\)$"):
        check_shapes(x=(torch.empty(3), "... B C"))
    with pytest.raises(ValueError, match=r"^weight must have shape \(C,\), got \(\)$"):
        check_shapes(weight=(torch.empty(()), "C"))


def test_none_is_passed_over():
    assert check_shapes(x=(torch.empty(3), "C"), bias=(None, "C")) == {"C": 3}
    check_floating(x=torch.empty(1), bias=None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_floating(dtype):
    with pytest.raises(ValueError, match=rf"^x must be floating point, got {dtype}$"):
        check_floating(x=torch.zeros(1, dtype=dtype))


def test_one_of():
    check_one_of("kind", "rms", ("rms", "layer"))
    with pytest.raises(ValueError, match=r"^kind must be one of \('rms', 'layer'\), got 'batch'$"):
        check_one_of("kind", "batch", ("rms", "layer"))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None, math.nan])
def test_integer(value):
    check_integer("dim", 1, least=1)
    with pytest.raises(ValueError, match=r"^dim must be an integer of at least 1, got "):
        check_integer("dim", value, least=1)


@pytest.mark.parametrize("value", [0, 1, None, "True"])
def test_flag(value):
    check_flag("tie", True)
    check_flag("tie", False)
    with pytest.raises(ValueError, match=r"^tie must be True or False, got "):
        check_flag("tie", value)


def test_values_are_read_only_where_they_can_be():
    ids = torch.arange(3)
    assert values_readable(ids)
    assert not values_readable(ids.to("meta"))
    with FakeTensorMode() as mode:
        assert not values_readable(mode.from_tensor(ids))
    seen = []
    torch.func.vmap(lambda x: seen.append(values_readable(x)) or x)(ids)
    assert seen == [False]
    compiled = torch.compile(
        lambda x: x + 1 if values_readable(x) else x, fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(ids), ids)


def test_what_is_no_tensor_is_named():
    with pytest.raises(ValueError, match="x must be a Tensor, got list"):
        check_shapes(x=([[1.0]], "B C"))
    with pytest.raises(ValueError, match="x must be a Tensor, got str"):
        check_floating(x="MKV")
