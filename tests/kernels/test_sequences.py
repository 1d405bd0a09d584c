from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import LENGTHS, PADDINGS, packing_ids, padding_mask, sequences
from torch.utils._python_dispatch import TorchDispatchMode

from brickwork.kernels.causal_conv1d import causal_conv1d
from brickwork.kernels.selective_scan import selective_scan
from brickwork.kernels.sequences import (
    check_mask,
    check_seq_ids,
    scan_order,
    scan_ranks,
    sequence_starts,
    take_tokens,
)
from brickwork.kernels.ssd_scan import ssd_scan


@given(T=LENGTHS, padding=PADDINGS, reverse=st.booleans())
def test_starts_are_where_the_real_neighbours_differ(T, padding, reverse):
    mask, ids = padding_mask(padding, 3, T), packing_ids(True, 3, T)
    starts = sequence_starts(ids, mask, reverse=reverse)
    for row in range(3):
        expected = {tokens[0] for tokens in sequences(mask, ids, row, T, reverse)[1:]}
        assert set(starts[row].nonzero().flatten().tolist()) == expected


@given(T=LENGTHS, padding=PADDINGS.filter(bool), reverse=st.booleans())
def test_scan_order_lists_the_real_tokens_first(T, padding, reverse):
    mask = padding_mask(padding, 3, T)
    order = scan_order(mask, reverse=reverse)
    for row in range(3):
        real = [t for tokens in sequences(mask, None, row, T, reverse) for t in tokens]
        assert order[row, : len(real)].tolist() == real
        assert sorted(order[row].tolist()) == list(range(T))
    assert order.gather(1, scan_ranks(mask, reverse=reverse)).equal(torch.arange(T).expand(3, T))


def test_take_tokens():
    x = torch.arange(12).reshape(2, 3, 2)
    assert take_tokens(x, torch.tensor([[2, 2], [0, 1]])).tolist() == [
        [[4, 5], [4, 5]],
        [[6, 7], [8, 9]],
    ]


def test_errors():
    with pytest.raises(
        ValueError, match=r"mask must be bool or integer \(1 = real\), got torch\.float"
    ):
        check_mask(torch.zeros(1, 2), (1, 2))
    with pytest.raises(ValueError, match=r"mask must have shape \(B, T\) = \(1, 2\), got \(2, 1\)"):
        check_mask(torch.zeros(2, 1, dtype=torch.bool), (1, 2))
    with pytest.raises(ValueError, match=r"seq_ids must be integers, got torch\.float"):
        check_seq_ids(torch.zeros(1, 2), (1, 2))
    with pytest.raises(
        ValueError, match=r"seq_ids must have shape \(B, T\) = \(1, 2\), got \(1, 3\)"
    ):
        check_seq_ids(torch.zeros(1, 3, dtype=torch.int32), (1, 2))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_references_use_no_float64_on_float32(reverse):
    """Devices without float64 run them too."""
    x, A = torch.randn(2, 5, 4), -torch.rand(4, 3)
    B = torch.randn(2, 5, 2, 3)
    where = {
        "mask": torch.rand(2, 5) < 0.7,
        "seq_ids": torch.arange(10).view(2, 5) // 3,
        "reverse": reverse,
        "backend": "torch",
    }
    scan = {"D": torch.ones(4), "delta_bias": torch.ones(4), "softplus": True, **where}
    with _Float64Forbidden():
        causal_conv1d(x, torch.randn(4, 3), activation="silu", **where)
        selective_scan(x, x, A, B, B, z=x, **scan)
        ssd_scan(x[..., None], x, A[:, 0], B, B, z=x[..., None], **scan)


class _Float64Forbidden(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            assert not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64, func
        return out
