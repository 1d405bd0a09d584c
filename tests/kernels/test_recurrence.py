from __future__ import annotations

import pytest
import torch
from support import assert_close
from torch import nn

from brickwork.kernels.recurrence import recur
from brickwork.kernels.selective_scan import selective_scan
from brickwork.kernels.ssd_scan import ssd_scan


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
    def sizes():
        models = [torch.export.export(Sums(1, False), (torch.randn(2, n, 2),)) for n in (3, 30)]
        return {len(model.graph.nodes) for model in models}

    with torch.no_grad():
        assert len(sizes()) == 1
    assert len(sizes()) == 2  # a loop, with gradients and a fixed length


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", [selective_scan, ssd_scan])
def test_scans_export_with_every_option(op, reverse):
    """A state of any layout, and a length whose neighbours are 1 too."""

    class Scan(nn.Module):
        def forward(self, x, delta, B, C, z, mask, seq_ids, state, A, D, bias):
            options = {"D": D, "z": z, "delta_bias": bias, "softplus": True, "reverse": reverse}
            options |= {"mask": mask, "seq_ids": seq_ids, "initial_state": state}
            return tuple(op(x, delta, A, B, C, **options))

    def arguments(batch, tokens):
        sizes = (4, 5) if op is ssd_scan else (4,)
        x, z = torch.randn(2, batch, tokens, *sizes)
        B, C = torch.randn(2, batch, tokens, 2, 3)
        state = torch.randn(batch, *sizes[:-1], 3, sizes[-1]).mT
        A = -torch.rand(4) if op is ssd_scan else -torch.rand(4, 3)
        ids = (torch.arange(tokens) // 30).expand(batch, -1)
        mask = torch.rand(batch, tokens) > 0.2
        by_token = (x, torch.randn(batch, tokens, 4), B, C, z, mask, ids)
        return (*by_token, state, A, torch.randn(4), torch.randn(4))

    batch, tokens = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=1)
    shapes = (*[{0: batch, 1: tokens}] * 7, {0: batch}, None, None, None)
    with torch.no_grad():
        exported = torch.export.export(Scan(), arguments(3, 6), dynamic_shapes=shapes).module()
    for shape in ((1, 1), (2, 2), (2, 64), (3, 150)):
        given = arguments(*shape)
        for found, expected in zip(exported(*given), Scan()(*given)):
            assert_close(found, expected, terms=256)
