from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import LENGTHS, PADDINGS, packing_ids, padding_mask, sequences

from brickwork.kernels.sequences import (
    check_mask,
    check_seq_ids,
    scan_order,
    sequence_starts,
    take_tokens,
)


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
