from __future__ import annotations

import pytest
import torch
from torch import nn

from brickwork.kernels.recurrence import recur


class Sums(nn.Module):
    """Running sums along axis 1, with the state added to each piece's."""

    def __init__(self, size, reverse):
        super().__init__()
        self.size, self.reverse = size, reverse

    def forward(self, x):
        def step(state, pieces):
            (piece,) = pieces
            sums = piece.flip(1).cumsum(1).flip(1) if self.reverse else piece.cumsum(1)
            return state + piece.sum(1), sums + state[:, None]

        start = torch.zeros_like(x[:, 0])
        return recur(step, start, [x], axis=1, size=self.size, reverse=self.reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_loop_and_exported_operator_agree_at_any_length(size, reverse):
    """One traced at a length of a single piece serves lengths below, at and above it."""
    model = Sums(size, reverse)
    tokens = {1: torch.export.Dim("tokens", min=1)}
    exported = torch.export.export(model, (torch.randn(2, 3, 2),), dynamic_shapes=(tokens,))
    for length in (1, 3, 4, 5, 8, 21):
        x = torch.randint(-9, 9, (2, length, 2)).float()
        state, y = model(x)
        assert torch.equal(state, x.sum(1))
        assert torch.equal(y, x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1))
        found = exported.module()(x)
        assert torch.equal(found[0], state)
        assert torch.equal(found[1], y)


def test_exported_program_is_one_operator_not_a_loop():
    graphs = [
        torch.export.export(Sums(1, False), (torch.randn(2, length, 2),)).graph
        for length in (3, 30)
    ]
    assert len({len(graph.nodes) for graph in graphs}) == 1
