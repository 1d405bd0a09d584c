from __future__ import annotations

import itertools

import pytest
import torch
from support import assert_close
from torch import Tensor

from brickwork.blocks import MaskedDiffusion

VOCAB, MASK, LENGTH = 3, 3, 4
DIFFUSION = MaskedDiffusion(mask_token_id=MASK)
RANDOM, EXACT = ["any_order", "coupled"], ["pseudo", "mean_field"]


class Table(torch.nn.Module):
    """Logits of any context of LENGTH tokens, drawn once; further columns are padding."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        size = (VOCAB + 1) ** LENGTH, LENGTH, VOCAB
        self.logits = torch.nn.Parameter(torch.randn(size, generator=generator, dtype=dtype))

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            ids = ids.masked_fill(~attention_mask, 0)
        ids = torch.nn.functional.pad(ids, (0, max(0, LENGTH - ids.shape[1])))[:, :LENGTH]
        place = (VOCAB + 1) ** torch.arange(LENGTH)
        return self.logits[(ids * place).sum(1)]


def enumerated(model: Table, ids: Tensor, maskable: list[int]) -> dict[int, Tensor]:
    """A_i(k) of every i and k, (T,) for each k, 0 where a token is not maskable."""
    means = {}
    for k in range(1, len(maskable) + 1):
        total, count = torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(LENGTH)
        for subset in itertools.combinations(maskable, k):
            noisy = ids.clone()
            noisy[list(subset)] = MASK
            log_p = model(noisy[None])[0].log_softmax(-1)
            for i in subset:
                total[i] += log_p[i, ids[i]]
                count[i] += 1
        means[k] = (total / count.clamp(min=1)).detach()
    return means


IDS = torch.tensor([2, 0, 1, 2])


@pytest.mark.parametrize("maskable", [[0, 1, 2, 3], [0, 2, 3], [1]])
def test_equals_enumeration_within_its_standard_error(maskable):
    """Values and totals of the random estimators, exact ones to the last digits."""
    model = Table()
    means = enumerated(model, IDS, maskable)
    wanted = torch.zeros(1, LENGTH).bool()
    wanted[0, maskable] = True
    any_order = torch.stack(list(means.values())).mean(0)
    for estimator in RANDOM:
        found = DIFFUSION.token_log_probs(
            model, IDS[None], wanted, estimator=estimator, num_samples=4000, batch_size=500,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        error = (found.values[0].detach() - any_order).abs()
        assert (error <= 5 * found.std_errors[0] + 1e-12).all()
        assert (found.std_errors[0] < 0.1).all()
        total_error = (found.totals[0].detach() - any_order.sum()).abs()
        assert total_error <= 5 * found.total_std_errors[0] + 1e-12
        assert_close(found.totals, found.values.sum(1))
    for estimator, k in (("pseudo", 1), ("mean_field", len(maskable))):
        found = DIFFUSION.token_log_probs(model, IDS[None], wanted, estimator=estimator)
        assert_close(found.values[0].detach(), means[k])
        assert not found.std_errors.any()
        assert not found.total_std_errors.any()


@pytest.mark.parametrize("estimator", RANDOM)
def test_squared_standard_errors_are_the_variance(estimator):
    """Rows of one kind are as many independent estimates."""
    rows = 3000
    found = DIFFUSION.token_log_probs(
        Table(), IDS.expand(rows, -1), estimator=estimator, num_samples=4, batch_size=4096,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for values, errors in (
        (found.values, found.std_errors),
        (found.totals[:, None], found.total_std_errors[:, None]),
    ):
        ratio = errors.square().mean(0) / values.detach().var(0)
        assert ((ratio - 1).abs() < 0.15).all()


def test_coupled_masks_vary_less():
    variances = [
        DIFFUSION.token_log_probs(
            Table(), IDS.expand(500, -1), estimator=estimator, num_samples=4, batch_size=4096,
            generator=torch.Generator().manual_seed(0),
        ).values.detach().var(0).sum()
        for estimator in RANDOM
    ]  # fmt: skip
    assert variances[1] < 0.7 * variances[0]


def test_totals_estimate_the_likelihood_of_the_row():
    model = Table()
    found = DIFFUSION.token_log_probs(model, IDS[None], num_samples=2000, batch_size=2000)
    likelihood = DIFFUSION.log_likelihood(model, IDS[None], num_samples=2000, batch_size=2000)
    assert (found.totals - likelihood).abs() < 8 * found.total_std_errors


@pytest.mark.parametrize("estimator", RANDOM + EXACT)
def test_gradients_are_those_of_the_values(estimator):
    """For reinforcement learning: the values' graph, the same masks under one seed."""
    model = Table()

    def totals():
        generator = torch.Generator().manual_seed(3)
        return DIFFUSION.token_log_probs(
            model, IDS[None], estimator=estimator, num_samples=4, generator=generator
        ).totals

    (grad,) = torch.autograd.grad(totals().sum(), model.parameters())
    direction = torch.randn_like(grad)
    with torch.no_grad():
        before = totals()
        model.logits += 1e-6 * direction
        slope = (totals() - before) / 1e-6
    torch.testing.assert_close((grad * direction).sum(), slope[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", RANDOM + EXACT)
def test_a_batch_equals_its_rows_and_padding_changes_nothing(estimator):
    """L1, L4: padding anywhere; values stand where their tokens do."""

    class Context(torch.nn.Module):
        def forward(self, ids, attention_mask=None):
            real = torch.ones_like(ids) if attention_mask is None else attention_mask.long()
            around = (real * (ids + 1)).sum(1, keepdim=True) - ids
            return torch.sin(around[..., None] * torch.arange(1.0, 4.0, dtype=torch.float64))

    model = Context()
    ids = torch.tensor([[9, 0, 1, 9, 2], [0, 1, 2, 0, 1], [9, 9, 9, 9, 9]])
    real = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    wanted = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    options = {"estimator": estimator, "num_samples": 6, "batch_size": 4}
    generator = torch.Generator().manual_seed(5)
    found = DIFFUSION.token_log_probs(
        model, ids, wanted, attention_mask=real, generator=generator, **options
    )
    assert not found.values[real * wanted == 0].any()
    generator.manual_seed(5)
    for row in range(3):
        here = real[row].bool()
        alone = DIFFUSION.token_log_probs(
            model, ids[row : row + 1, here], wanted[row : row + 1, here], generator=generator,
            **options,
        )  # fmt: skip
        assert_close(alone.values[0], found.values[row, here].to(alone.values.dtype))
        assert_close(alone.std_errors[0], found.std_errors[row, here].to(alone.values.dtype))
        assert_close(alone.totals[0], found.totals[row].to(alone.values.dtype))


def test_nothing_to_score_and_empty_batches():
    for ids in (torch.zeros(0, 3).long(), torch.zeros(2, 0).long(), torch.zeros(2, 3).long()):
        nothing = torch.zeros(ids.shape).bool()
        found = DIFFUSION.token_log_probs(Table(), ids, nothing)
        assert found.values.shape == ids.shape
        assert found.totals.tolist() == [0.0] * len(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "exact"}, r"estimator must be one of \('any_order', .* got 'exact'"),
        ({"num_samples": 3}, "num_samples must be even, two to a stratum, got 3"),
        ({"num_samples": 1}, "num_samples must be an integer of at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must have shape \(B, T\)"),
        ({"maskable": torch.ones(1, 4)}, "maskable must be bool or integer"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        DIFFUSION.token_log_probs(Table(), IDS[None], **options)
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 3\) where masked, got 2 to 7"):
        DIFFUSION.token_log_probs(Table(), torch.tensor([[7, 2, 2, 2]]), estimator="mean_field")
