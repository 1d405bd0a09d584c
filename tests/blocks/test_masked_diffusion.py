from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    assert_close,
    assert_golden,
    assert_same_function,
    golden_names,
    gradcheck,
    gradients,
    load_golden,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from brickwork.blocks.diffusion_canvas import masked_subsets
from brickwork.blocks.masked_diffusion import MaskedDiffusion, Noise
from brickwork.kernels.cross_entropy import cross_entropy

DENOMINATORS = ["row", "batch", "tokens"]
WEIGHTINGS = ["elbo", "uniform"]


def drawn(diffusion, rows=3, tokens=5, vocab=7, seed=0, dtype=torch.float64):
    """Ids, noise over a random maskable set, and logits."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (rows, tokens), generator=generator)
    maskable = torch.rand(rows, tokens, generator=generator) < 0.7
    noise = diffusion.noise(ids, maskable, generator=generator)
    logits = torch.randn(rows, tokens, vocab, generator=generator, dtype=torch.float64).to(dtype)
    return ids, maskable, noise, logits


def loss_by_loops(diffusion, logits, ids, maskable, noise, denominator):
    """The definition, one token after another, in Python floats."""
    sums, counts, wanted = [], [], []
    for b in range(ids.shape[0]):
        total, count = 0.0, 0
        for i in range(ids.shape[1]):
            row = logits[b, i].double()
            ce = (row.exp().sum().log() - row[ids[b, i]]).item()
            if noise.mask[b, i]:
                weight = 1 / noise.p[b, i].double().item()
                total += ce * weight if diffusion.weighting == "elbo" else ce
            count += (maskable if diffusion.weighting == "elbo" else noise.mask)[b, i].item()
        sums.append(total)
        counts.append(count)
        wanted.append(maskable[b].any().item())
    if denominator == "row":
        rows = [s / c for s, c in zip(sums, counts) if c]
        return sum(rows) / max(1, len(rows))
    return sum(sums) / max(1, sum(wanted) if denominator == "batch" else sum(counts))


# The forward process


@pytest.mark.parametrize("name", golden_names("mini_llada"))
def test_golden_noise_and_loss(name):
    tensors, config = load_golden(name)
    diffusion = MaskedDiffusion(mask_token_id=config["mask_token_id"], weighting="uniform")
    ids = tensors["input_ids"]
    noise = diffusion.noise(
        ids, tensors["labels"] != -100, t=tensors["draw.t"], u=tensors["draw.u"]
    )
    assert torch.equal(noise.noisy_ids, tensors["noisy_ids"])
    assert torch.equal(noise.mask, tensors["mask"])
    for options in ({}, {"denominator": "tokens"}):
        assert_golden(diffusion.loss(tensors["train_logits"], ids, noise, **options),
                      tensors["loss"], "loss", name)  # fmt: skip


@given(
    rows=st.integers(0, 4),
    tokens=st.integers(0, 9),
    eps=st.sampled_from([0.0, 1e-3, 0.5]),
    seed=st.integers(0, 99),
)
def test_noise_is_what_t_and_u_say(rows, tokens, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, (rows, tokens), generator=generator)
    maskable = torch.rand(rows, tokens, generator=generator) < 0.6
    t = 1 - torch.rand(rows, generator=generator)
    u = torch.rand(rows, tokens, generator=generator)
    noise = MaskedDiffusion(mask_token_id=9, eps=eps).noise(ids, maskable, t=t, u=u)
    p = (1 - eps) * t[:, None] + eps
    assert torch.equal(noise.p, torch.where(maskable, p.expand_as(u), 0.0))
    assert torch.equal(noise.mask, (u < p) & maskable)
    assert torch.equal(noise.noisy_ids, torch.where(noise.mask, 9, ids))


def test_noise_rates_and_repeatability():
    diffusion = MaskedDiffusion(mask_token_id=9)
    ids = torch.zeros(400, 500, dtype=torch.int32)
    noise, again = (diffusion.noise(ids, generator=torch.Generator().manual_seed(3)) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(noise, again))
    assert noise.noisy_ids.dtype == torch.int32
    p = noise.p[:, 0]
    deviation = (noise.mask.float().mean(1) - p) / (p * (1 - p) / 500 + 1e-6).sqrt()
    assert deviation.abs().max() < 5
    # t is uniform: mean 1/2 and variance 1/12, each within 4 standard errors of 400 draws.
    assert abs(p.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 400)
    assert abs(p.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / 400)
    assert p.min() >= diffusion.eps


def test_everything_is_maskable_by_default_and_masks_may_be_integers():
    diffusion = MaskedDiffusion(mask_token_id=4)
    ids, t, u = torch.tensor([[0, 1, 2]]), torch.tensor([1.0]), torch.rand(1, 3)
    assert diffusion.noise(ids, t=t, u=u).mask.all()
    some = diffusion.noise(ids, torch.tensor([[0, 1, 0]]), t=t, u=u)
    assert some.mask.tolist() == [[False, True, False]]


def test_default_eps_belongs_to_the_weighting():
    assert MaskedDiffusion(mask_token_id=1).eps == 1e-3
    assert MaskedDiffusion(mask_token_id=1, weighting="uniform").eps == 0
    assert MaskedDiffusion(mask_token_id=1, weighting="uniform", eps=0.1).eps == 0.1
    assert repr(MaskedDiffusion(mask_token_id=1)) == (
        "MaskedDiffusion(mask_token_id=1, eps=0.001, weighting='elbo', vocab_size=None)"
    )


# The loss


@given(
    weighting=st.sampled_from(WEIGHTINGS),
    denominator=st.sampled_from(DENOMINATORS),
    rows=st.integers(1, 4),
    tokens=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_loss_equals_its_definition(weighting, denominator, rows, tokens, seed):
    diffusion = MaskedDiffusion(mask_token_id=6, weighting=weighting)
    ids, maskable, noise, logits = drawn(diffusion, rows, tokens, seed=seed)
    expected = loss_by_loops(diffusion, logits, ids, maskable, noise, denominator)
    actual = diffusion.loss(logits, ids, noise, denominator=denominator)
    assert_close(actual, torch.tensor(expected, dtype=torch.float64), terms=7 * rows * tokens,
                 scale=abs(expected) + 1)  # fmt: skip
    noise = noise._replace(p=noise.p.double())
    weights = diffusion.token_weights(noise, denominator=denominator)
    ce = torch.nn.functional.cross_entropy(logits.mT, ids, reduction="none")
    assert_close(
        (weights.double() * ce).sum(), actual, terms=rows * tokens, scale=abs(expected) + 1
    )


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_token_weights_give_the_loss_from_hidden_states(weighting, denominator):
    """Values and gradients of `cross_entropy` over a head whose last rows only pad it."""
    diffusion = MaskedDiffusion(mask_token_id=6, weighting=weighting, vocab_size=7)
    ids, _, noise, _ = drawn(diffusion)
    noise = noise._replace(p=noise.p.double())
    hidden = torch.randn(3, 5, 4, dtype=torch.float64)
    head = torch.randn(8, 4, dtype=torch.float64)

    def lean(hidden, head):
        weights = diffusion.token_weights(noise, denominator=denominator)
        labels = ids.masked_fill(~noise.mask, -100)
        return cross_entropy(
            hidden.flatten(0, 1),
            head,
            labels.flatten(),
            weights=weights.flatten(),
            reduction="sum",
            vocab_size=7,
        )

    def plain(hidden, head):
        return diffusion.loss(hidden @ head.T, ids, noise, denominator=denominator)

    assert_same_function(lean, plain, [hidden, head], terms=15 * 7)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_gradcheck(weighting, denominator):
    diffusion = MaskedDiffusion(mask_token_id=6, weighting=weighting)
    ids, _, noise, logits = drawn(diffusion, 2, 3)
    assert noise.mask.any()
    gradcheck(lambda x: diffusion.loss(x, ids, noise, denominator=denominator), [logits])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_loss_is_computed_wide_for_every_dtype(dtype):
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids, _, noise, logits = drawn(diffusion, dtype=dtype)
    expected = diffusion.loss(logits.double(), ids, noise)
    actual = diffusion.loss(logits, ids, noise)
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(actual, expected, terms=15 * 7)
    for device_dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", device_dtype):
            assert torch.equal(diffusion.loss(logits, ids, noise), actual)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_nothing_masked_gives_zero_with_a_zero_gradient(weighting, denominator):
    """L2."""
    diffusion = MaskedDiffusion(mask_token_id=6, weighting=weighting)
    ids = torch.zeros(2, 3, dtype=torch.long)
    for maskable in (torch.zeros(2, 3), torch.ones(2, 3)):  # all labels -100; t too small
        noise = diffusion.noise(ids, maskable.bool(), t=torch.full((2,), 1e-6), u=torch.ones(2, 3))
        logits = torch.randn(2, 3, 7, requires_grad=True)
        loss = diffusion.loss(logits, ids, noise, denominator=denominator)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.item() == 0
        assert torch.equal(gradient, torch.zeros_like(logits))


def test_what_unmasked_logits_hold_has_no_effect():
    """L2: not even NaN reaches the loss or the gradient of a masked token."""
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids, _, noise, logits = drawn(diffusion)
    for junk in (float("nan"), float("inf"), -1e30):
        dirty = logits.masked_fill(~noise.mask[..., None], junk)
        (clean_loss,), (clean_grad,) = gradients(lambda x: diffusion.loss(x, ids, noise), [logits])
        (loss,), (grad,) = gradients(lambda x: diffusion.loss(x, ids, noise), [dirty])
        assert torch.equal(loss, clean_loss)
        assert torch.equal(grad, clean_grad)
        assert (grad[~noise.mask] == 0).all()


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_padding_columns_and_padding_rows_change_nothing(denominator, weighting):
    """L1, at the block: more padding, of whatever ids, leaves loss and gradient as they were."""
    diffusion = MaskedDiffusion(mask_token_id=6, weighting=weighting)
    ids, _, noise, logits = drawn(diffusion)
    junk = torch.randint(7, (4, 7))
    wide_ids = junk.clone()
    wide_ids[:3, :5] = ids
    mask, p = torch.zeros(4, 7, dtype=torch.bool), torch.zeros(4, 7)
    mask[:3, :5], p[:3, :5] = noise.mask, noise.p
    wide = Noise(wide_ids.masked_fill(mask, 6), mask, p)

    def padded(x):
        x = torch.nn.functional.pad(x, (0, 0, 0, 2, 0, 1), value=3.0)
        return diffusion.loss(x, wide_ids, wide, denominator=denominator)

    values, grads = gradients(
        lambda x: diffusion.loss(x, ids, noise, denominator=denominator), [logits]
    )
    wide_values, wide_grads = gradients(padded, [logits])
    assert_close(wide_values[0], values[0], terms=28)
    assert_close(wide_grads[0], grads[0], terms=28)


def test_monte_carlo_mean_of_the_elbo_loss_is_the_mean_cross_entropy():
    """L3: the cross-entropy of every position known, 20,000 masks, rows of 2 and of 50 tokens."""
    diffusion = MaskedDiffusion(mask_token_id=1)
    ce = torch.rand(2, 50, dtype=torch.float64) * 3
    maskable = torch.ones(2, 50, dtype=torch.bool)
    maskable[0, 2:] = False
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(20_000, 50, dtype=torch.long)
    row_means = []
    for row in range(2):
        noise = diffusion.noise(ids, maskable[row].expand(20_000, 50), generator=generator)
        # each of the 20,000 is a row of its own: undo the mean over rows
        per_row = (diffusion.token_weights(noise).double() * ce[row]).sum(1) * 20_000
        expected = ce[row][maskable[row]].mean()
        assert (per_row.mean() - expected).abs() < 4 * per_row.std() / math.sqrt(20_000)
        assert per_row.std() / math.sqrt(20_000) < 0.04 * expected
        row_means.append(expected)
    # and one batch of both rows, with every maskable token masked at p = 1/2
    mask = maskable
    noise = Noise(torch.ones(2, 50).long(), mask, maskable.double() * 0.5)
    sums = torch.stack([ce[row][maskable[row]].sum() for row in range(2)])
    for denominator, expected in (
        ("row", 2 * torch.stack(row_means).mean()),
        ("batch", 2 * sums.mean()),
        ("tokens", 2 * sums.sum() / 52),
    ):
        weights = diffusion.token_weights(noise, denominator=denominator)
        assert_close((weights.double() * ce).sum(), expected, terms=100)


def test_the_weight_is_one_over_the_p_that_masked():
    """L3: p with its eps, not t."""
    diffusion = MaskedDiffusion(mask_token_id=1, eps=0.25)
    noise = diffusion.noise(
        torch.zeros(1, 2).long(), t=torch.tensor([0.0]), u=torch.tensor([[0.2, 0.3]])
    )
    assert noise.mask.tolist() == [[True, False]]
    assert diffusion.token_weights(noise, denominator="batch").tolist() == [[4.0, 0.0]]


def test_an_id_is_never_taken_for_padding():
    """L7: pad id = eos id; the answer's eos is masked and scored when the labels say so."""
    eos = 0
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids = torch.tensor([[3, 4, eos, eos, eos]])
    maskable = torch.tensor([[True, True, True, False, False]])  # one eos, then padding
    noise = diffusion.noise(ids, maskable, t=torch.ones(1), u=torch.zeros(1, 5))
    assert noise.noisy_ids.tolist() == [[6, 6, 6, eos, eos]]
    logits = torch.zeros(1, 5, 7)
    logits[0, 2, eos] = -5.0  # a bad prediction of the eos costs
    assert diffusion.loss(logits, ids, noise) > diffusion.loss(torch.zeros(1, 5, 7), ids, noise) + 1
    everything = diffusion.noise(ids, t=torch.ones(1), u=torch.zeros(1, 5))
    assert everything.mask.all()


def test_position_i_predicts_token_i():
    """L9: perfect logits give no loss, perfect but shifted ones a large loss."""
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids = torch.tensor([[1, 2, 3, 4, 5, 0]])
    noise = diffusion.noise(ids, t=torch.ones(1), u=torch.zeros(1, 6))
    perfect = 20.0 * torch.nn.functional.one_hot(ids, 7).float()
    assert diffusion.loss(perfect, ids, noise) < 1e-3
    assert diffusion.loss(perfect.roll(1, 1), ids, noise) > 10
    assert diffusion.loss(perfect.roll(-1, 1), ids, noise) > 10


def test_columns_past_the_vocabulary_take_no_probability():
    ids, _, noise, logits = drawn(MaskedDiffusion(mask_token_id=6))
    expected = MaskedDiffusion(mask_token_id=6).loss(logits, ids, noise)
    wide = torch.cat([logits, torch.full((3, 5, 9), 50.0, dtype=torch.float64)], -1)
    (loss,), (grad,) = gradients(
        lambda x: MaskedDiffusion(mask_token_id=6, vocab_size=7).loss(x, ids, noise), [wide]
    )
    assert torch.equal(loss, expected)
    assert (grad[..., 7:] == 0).all()
    barred = wide.index_fill(-1, torch.arange(7, 16), -torch.inf)
    (loss,), (grad,) = gradients(
        lambda x: MaskedDiffusion(mask_token_id=6).loss(x, ids, noise), [barred]
    )
    assert_close(loss, expected, terms=7)
    assert grad.isfinite().all()


def test_large_logits_stay_finite():
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids, _, noise, logits = drawn(diffusion, dtype=torch.float16)
    (loss,), (grad,) = gradients(
        lambda x: diffusion.loss(x * 60000, ids, noise), [logits.sign() * 0.9]
    )
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_strided_expanded_empty_and_meta():
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids, _, noise, logits = drawn(diffusion)
    expected = diffusion.loss(logits, ids, noise)
    assert_close(diffusion.loss(logits.mT.contiguous().mT, ids, noise), expected, terms=105)
    wide = torch.stack([ids, ids], -1).flatten(1)[:, ::2]
    assert_close(diffusion.loss(logits, wide, noise), expected, terms=105)
    one = logits[:1, :1].expand(3, 5, 7)
    assert_close(diffusion.loss(one, ids, noise), diffusion.loss(one.contiguous(), ids, noise))
    for shape in ((0, 5), (3, 0)):
        nothing = torch.zeros(shape, dtype=torch.long)
        empty = torch.zeros(*shape, 7, requires_grad=True)
        loss = diffusion.loss(empty, nothing, diffusion.noise(nothing))
        loss.backward()
        assert loss.item() == 0
    meta = ids.to("meta")
    assert diffusion.loss(logits.to("meta"), meta, diffusion.noise(meta)).shape == ()


def test_compiles_to_one_graph_maps_and_recomputes():
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids, maskable, noise, logits = drawn(diffusion, dtype=torch.float32)

    def step(logits, t, u):
        noise = diffusion.noise(ids, maskable, t=t, u=u)
        return diffusion.loss(logits, ids, noise)

    inputs = [logits, torch.rand(3), torch.rand(3, 5)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs), step(*inputs), terms=105)
    noising = torch.compile(diffusion.noise, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 3):
        drawing = noising(ids[:, :tokens], maskable[:, :tokens])
        assert (drawing.noisy_ids[drawing.mask] == 6).all()
        assert not (drawing.mask & ~maskable[:, :tokens]).any()
    twice = torch.func.vmap(lambda x: diffusion.loss(x, ids, noise))(torch.stack([logits, logits]))
    assert_close(twice, diffusion.loss(logits, ids, noise).expand(2), terms=105)
    (_,), (expected,) = gradients(lambda x: diffusion.loss(x, ids, noise), [logits])
    (_,), (actual,) = gradients(
        lambda x: checkpoint(diffusion.loss, x, ids, noise, use_reentrant=False), [logits]
    )
    assert torch.equal(actual, expected)


# Three forms of one likelihood, by enumeration


class Table:
    """A model over `tokens` symbols and a mask whose logits are a table over all contexts (L,)."""

    def __init__(self, tokens=3, length=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.base, self.length = tokens + 1, length
        self.logits = 2 * torch.randn(
            self.base**length, length, tokens, generator=generator, dtype=torch.float64
        )
        self.powers = self.base ** torch.arange(length)

    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is None
        return self.logits[(ids * self.powers).sum(1)]


def any_order_log_likelihood(model: Table, x: list[int]) -> float:
    """The mean over all orders of the sum of log p(next | those before)."""
    total = 0.0
    orders = list(itertools.permutations(range(len(x))))
    for order in orders:
        context = [model.base - 1] * len(x)
        for i in order:
            total += model(torch.tensor([context]))[0, i].log_softmax(-1)[x[i]].item()
            context[i] = x[i]
    return total / len(orders)


def all_masks(length: int) -> Tensor:
    return torch.tensor(list(itertools.product([False, True], repeat=length)))


def k_form(model: Table, diffusion: MaskedDiffusion, x: list[int]) -> float:
    """`Σ_k 1/l · mean over subsets of size k of l/k Σ log p`, from the same masks and weights."""
    l = len(x)
    ids = torch.tensor(x).expand(2**l, l)
    masks = all_masks(l)
    log_p = model(ids.masked_fill(masks, diffusion.mask_token_id)).log_softmax(-1)
    sums = (log_p.gather(-1, ids[..., None])[..., 0] * masks).sum(1)
    k = masks.sum(1)
    return sum((l / j * sums[k == j].mean() / l).item() for j in range(1, l + 1))


@pytest.mark.parametrize("seed", range(4))
def test_t_integral_equals_k_form_equals_any_order(seed):
    """At eps = 0, V = 3, L = 4, exactly: every mask; Gauss-Legendre in t, a cubic polynomial."""
    model = Table(seed=seed)
    diffusion = MaskedDiffusion(mask_token_id=3, eps=0.0)
    root = math.sqrt(3 / 5)
    nodes = torch.tensor([(1 - root) / 2, 0.5, (1 + root) / 2], dtype=torch.float64)
    node_weights = torch.tensor([5 / 18, 8 / 18, 5 / 18], dtype=torch.float64)
    masks = all_masks(4)
    for x in ([0, 1, 2, 0], [2, 2, 1, 0], [1, 1, 1, 1]):
        ids = torch.tensor([x])
        integral = torch.tensor(0.0, dtype=torch.float64)
        for t, node_weight in zip(nodes, node_weights):
            for mask in masks:
                # u on either side of t makes exactly this mask
                u = torch.where(mask, t / 2, (1 + t) / 2)[None]
                noise = diffusion.noise(ids, t=t[None], u=u)
                assert torch.equal(noise.mask[0], mask)
                chance = t ** mask.sum() * (1 - t) ** (4 - mask.sum())
                loss = diffusion.loss(model(noise.noisy_ids), ids, noise, denominator="batch")
                integral += node_weight * chance * loss
        expected = any_order_log_likelihood(model, x)
        assert abs(-integral.item() - expected) < 1e-12 * abs(expected)
        assert abs(k_form(model, diffusion, x) - expected) < 1e-12 * abs(expected)
        # the Beta integral of each mask, k of 4: (k - 1)! (4 - k)! / 4! = 1 / (k · C(4, k))
        closed = torch.tensor(0.0, dtype=torch.float64)
        for mask in masks[1:]:
            k = int(mask.sum())
            losses = diffusion.cross_entropy(model(ids.masked_fill(mask, 3)), ids, mask[None])
            closed += losses.sum() / (k * math.comb(4, k))
        assert abs(closed.item() - integral.item()) < 1e-12 * abs(expected)


def test_log_likelihood_is_unbiased_and_varies_less_than_the_t_form():
    model, x = Table(seed=1), [2, 0, 1, 1]
    diffusion = MaskedDiffusion(mask_token_id=3, eps=0.0)
    ids = torch.tensor(x).expand(400, 4)
    generator = torch.Generator().manual_seed(0)
    estimates = diffusion.log_likelihood(
        model, ids, num_samples=16, batch_size=6400, generator=generator
    )
    error = estimates.std() / math.sqrt(400)
    assert (estimates.mean() - any_order_log_likelihood(model, x)).abs() < 4 * error
    noise = diffusion.noise(ids.repeat(16, 1), generator=generator)
    losses = diffusion.cross_entropy(model(noise.noisy_ids), ids.repeat(16, 1), noise.mask)
    t_form = (losses / noise.p).sum(1).view(16, 400).mean(0)
    assert t_form.var() > 4 * estimates.var()


def test_every_k_is_drawn_equally_often_and_subsets_are_uniform():
    maskable = torch.tensor([True, False, True, True, True])
    generator = torch.Generator().manual_seed(0)
    masks, weights = masked_subsets(maskable, 8000, generator)
    k = masks.sum(1)
    assert torch.equal(k.bincount(), torch.tensor([0, 2000, 2000, 2000, 2000]))
    assert torch.equal(weights, 4 / k)
    assert not masks[:, 1].any()
    for size, subsets in ((1, 4), (2, 6), (3, 4)):
        _, counts = masks[k == size].unique(dim=0, return_counts=True)
        expected = 2000 / subsets
        assert len(counts) == subsets
        statistic = ((counts - expected) ** 2 / expected).sum()
        half = torch.tensor((subsets - 1) / 2)
        assert torch.special.gammaincc(half, statistic / 2) > 1e-3
    # fewer samples than places: one k from each stratum, all k equally likely in the long run
    few = torch.stack(
        [masked_subsets(maskable, 3, generator)[0].sum(1).sort().values for _ in range(3000)]
    )
    assert ((few[:, 0] <= 2) & (few[:, 1] >= 2) & (few[:, 1] <= 3) & (few[:, 2] >= 3)).all()
    assert (few.flatten().bincount()[1:] / 9000 - 0.25).abs().max() < 4 * math.sqrt(3 / 16 / 9000)


class Mixing:
    """Logits from all real tokens and distances counted in columns; records what it was given."""

    def __init__(self, vocab=6, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(vocab, 8, generator=generator, dtype=torch.float64)
        self.head = torch.randn(8, vocab, generator=generator, dtype=torch.float64)
        self.rows = []

    def __call__(self, ids, attention_mask=None):
        self.rows.append(len(ids))
        column = torch.arange(ids.shape[1], dtype=torch.float64)
        near = torch.exp(-(column[:, None] - column).abs() / 3) + column[:, None] / 50
        real = 1.0 if attention_mask is None else attention_mask[..., None].double()
        return torch.tanh(near @ (self.embed[ids] * real)) @ self.head


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right", "anywhere"]),
    batch_size=st.sampled_from([1, 7, 64]),
)
def test_log_likelihood_of_a_batch_is_that_of_its_rows(lengths, side, batch_size):
    """L1, L4: whatever the padding holds and wherever it stands."""
    diffusion = MaskedDiffusion(mask_token_id=5)
    model, generator = Mixing(), torch.Generator().manual_seed(1)
    real = torch.zeros(len(lengths), 6, dtype=torch.bool)
    for row, length in enumerate(lengths):
        order = {"left": range(5, -1, -1), "right": range(6)}.get(side, [3, 1, 4, 0, 2, 5])
        real[row, list(order)[:length]] = True
    ids = torch.where(real, torch.randint(5, real.shape), -7)
    maskable = torch.rand(real.shape) < 0.7
    together = diffusion.log_likelihood(
        model,
        ids,
        maskable,
        attention_mask=real.long(),
        num_samples=9,
        batch_size=batch_size,
        generator=generator,
    )
    assert together.dtype == (torch.float64 if (real & maskable).any() else torch.float32)
    assert max(model.rows, default=0) <= batch_size
    generator.manual_seed(1)
    for row in range(len(lengths)):
        alone = diffusion.log_likelihood(
            model,
            ids[row : row + 1, real[row]],
            maskable[row : row + 1, real[row]],
            num_samples=9,
            generator=generator,
        )
        assert_close(alone.double(), together[row : row + 1].double(), terms=100, scale=10.0)


def test_log_likelihood_of_one_token_is_exact():
    model = Mixing()
    ids = torch.tensor([[1, 2, 3]])
    maskable = torch.tensor([[False, True, False]])
    found = MaskedDiffusion(mask_token_id=5).log_likelihood(model, ids, maskable, num_samples=3)
    expected = model(torch.tensor([[1, 5, 3]]))[:, 1].log_softmax(-1)[:, 2]
    assert_close(found, expected, terms=10)


def test_log_likelihood_of_nothing_is_zero_and_costs_no_pass():
    diffusion, model = MaskedDiffusion(mask_token_id=5), Mixing()
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert diffusion.log_likelihood(model, ids, torch.zeros(2, 3).bool()).tolist() == [0, 0]
    assert diffusion.log_likelihood(model, ids[:0]).shape == (0,)
    assert diffusion.log_likelihood(model, ids[:, :0]).tolist() == [0, 0]
    assert model.rows == []
    weight = torch.zeros(6, requires_grad=True)
    found = diffusion.log_likelihood(lambda ids, attention_mask: weight.expand(*ids.shape, 6), ids)
    assert not found.requires_grad
    assert_close(found, torch.full((2,), -3 * math.log(6)), terms=128)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": -1}, "mask_token_id must be an integer of at least 0, got -1"),
        ({"mask_token_id": 1, "eps": 1.0}, r"eps must be in \[0, 1\), got 1.0"),
        ({"mask_token_id": 1, "eps": -0.1}, r"eps must be in \[0, 1\), got -0.1"),
        ({"mask_token_id": 1, "eps": True}, r"eps must be in \[0, 1\), got True"),
        ({"mask_token_id": 1, "eps": "small"}, r"eps must be in \[0, 1\), got 'small'"),
        ({"mask_token_id": 1, "weighting": "sum"}, "weighting must be one of .* got 'sum'"),
        (
            {"mask_token_id": 1, "vocab_size": 0},
            "vocab_size must be an integer of at least 1, got 0",
        ),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        MaskedDiffusion(**options)


def test_noise_errors():
    diffusion = MaskedDiffusion(mask_token_id=6, eps=0.0)
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, T\), got \(3,\)"):
        diffusion.noise(ids[0])
    with pytest.raises(
        ValueError, match=r"the dtype of input_ids must be one of .* got torch.float32"
    ):
        diffusion.noise(ids.float())
    with pytest.raises(ValueError, match=r"maskable must have shape \(B, T\) with T = 3"):
        diffusion.noise(ids, torch.ones(2, 4).bool())
    with pytest.raises(ValueError, match=r"maskable must be bool or integer, got torch\.float32"):
        diffusion.noise(ids, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="maskable must be 0 or 1 everywhere"):
        diffusion.noise(ids, ids - 100)
    with pytest.raises(ValueError, match=r"t must have shape \(B,\) with B = 2"):
        diffusion.noise(ids, t=torch.ones(3))
    with pytest.raises(ValueError, match=r"u must have shape \(B, T\) with T = 3"):
        diffusion.noise(ids, u=torch.ones(2, 2))
    for t in (0.0, 1.5, -0.5, float("nan")):
        with pytest.raises(ValueError, match=r"t must be in \[0, 1\], above 0 where eps is 0, got"):
            diffusion.noise(ids, t=torch.full((2,), t))


def test_loss_errors():
    diffusion = MaskedDiffusion(mask_token_id=6, vocab_size=7)
    ids, _, noise, logits = drawn(diffusion)
    with pytest.raises(ValueError, match=r"logits must have shape \(B, T, V\) with T = 5"):
        diffusion.loss(logits[:, 1:], ids, noise)
    with pytest.raises(ValueError, match=r"logits must be floating point, got torch\.int64"):
        diffusion.loss(logits.long(), ids, noise)
    with pytest.raises(
        ValueError, match=r"logits must have at least vocab_size = 7 columns, got 6"
    ):
        diffusion.loss(logits[..., :6], ids, noise)
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 7\) where masked, got 0 to 7"):
        diffusion.loss(logits, ids.masked_fill(noise.mask, 7).masked_fill(~noise.mask, 0), noise)
    with pytest.raises(ValueError, match=r"noise.p must have shape \(B, T\), got \(3,\)"):
        diffusion.loss(logits, ids, noise._replace(p=noise.p[:, 0]))
    with pytest.raises(ValueError, match=r"noise.mask must have shape \(B, T\) with T = 5"):
        diffusion.loss(logits, ids, noise._replace(mask=noise.mask[:, 1:]))
    with pytest.raises(ValueError, match=r"denominator must be one of .* got 'mean'"):
        diffusion.loss(logits, ids, noise, denominator="mean")


def test_log_likelihood_errors():
    diffusion, model = MaskedDiffusion(mask_token_id=5), Mixing()
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="num_samples must be an integer of at least 1, got 0"):
        diffusion.log_likelihood(model, ids, num_samples=0)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        diffusion.log_likelihood(model, ids, batch_size=0)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, T\) with T = 3"):
        diffusion.log_likelihood(model, ids, attention_mask=torch.ones(2, 2).bool())
    with pytest.raises(ValueError, match=r"model must return logits \(B, T, V\).* got \(32, 3\)"):
        diffusion.log_likelihood(lambda ids, attention_mask: ids.double(), ids)
    with pytest.raises(ValueError, match=r"model must return logits .* got NoneType"):
        diffusion.log_likelihood(lambda ids, attention_mask: None, ids)
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, 6\) where masked, got 0 to 8"):
        diffusion.log_likelihood(
            lambda ids, attention_mask: torch.zeros(*ids.shape, 6), torch.tensor([[0, 8]])
        )


# Packing and default dtypes


def packed(lengths=(2, 5, 1), padding=2):
    """Rows of one sequence each, padded, and the same sequences in one row with padding behind."""
    ids = torch.randint(6, (len(lengths), max(lengths)))
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    row = torch.nn.functional.pad(ids[real], (0, padding))[None]
    which = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seq_ids = torch.nn.functional.pad(which % 2, (0, padding), value=int(which[-1]) % 2)[None]
    return ids, real, row, seq_ids


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_packed_sequences_are_noised_and_weighed_as_rows(weighting, denominator):
    diffusion = MaskedDiffusion(mask_token_id=6, weighting=weighting)
    ids, real, row, seq_ids = packed()
    maskable = real & (torch.rand(real.shape) < 0.8)
    maskable[1, :2] = True
    t, u = torch.tensor([0.3, 0.9, 0.6]), torch.rand(ids.shape)
    apart = diffusion.noise(ids, maskable, t=t, u=u)
    flat = {"maskable": maskable, "u": u}
    flat = {name: torch.nn.functional.pad(x[real], (0, 2))[None] for name, x in flat.items()}
    together = diffusion.noise(row, seq_ids=seq_ids, t=t[None], **flat)
    for a, b in zip(apart, together):
        assert torch.equal(a[real], b[0, :-2])
    assert not together.mask[0, -2:].any()
    logits = torch.randn(*ids.shape, 7, dtype=torch.float64)
    in_a_row = torch.nn.functional.pad(logits[real], (0, 0, 0, 2))[None]
    expected = diffusion.loss(logits, ids, apart, denominator=denominator)
    found = diffusion.loss(in_a_row, row, together, denominator=denominator, seq_ids=seq_ids)
    assert_close(found, expected, terms=7 * 8)
    if denominator != "tokens":
        as_one = diffusion.loss(in_a_row, row, together, denominator=denominator)
        assert (as_one - expected).abs() > 1e-3


def test_each_packed_sequence_draws_its_own_t():
    diffusion = MaskedDiffusion(mask_token_id=6)
    seq_ids = torch.tensor([[4, 4, 4, 0, 0, 4], [1, 1, 1, 1, 1, 1]])
    ids = torch.zeros(2, 6, dtype=torch.long)
    p = diffusion.noise(ids, seq_ids=seq_ids, generator=torch.Generator().manual_seed(0)).p
    assert [len(row.unique()) for row in p] == [3, 1]
    assert p[0, 0] == p[0, 2]
    assert p[0, 3] == p[0, 4]
    many = torch.arange(20_000)[None]
    p = diffusion.noise(many, seq_ids=many, generator=torch.Generator().manual_seed(0)).p
    assert abs(p.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 20_000)


def test_packing_compiles_and_takes_nothing():
    diffusion = MaskedDiffusion(mask_token_id=6)
    _, _, row, seq_ids = packed()
    logits = torch.randn(1, 10, 7)

    def step(t, u):
        noise = diffusion.noise(row, seq_ids=seq_ids, t=t, u=u)
        return diffusion.loss(logits, row, noise, seq_ids=seq_ids)

    draws = torch.rand(1, 3), torch.rand(1, 10)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*draws), step(*draws), terms=70)
    for shape in ((0, 5), (3, 0)):
        ids = torch.zeros(shape, dtype=torch.long)
        noise = diffusion.noise(ids, seq_ids=ids)
        assert diffusion.loss(torch.zeros(*shape, 7), ids, noise, seq_ids=ids) == 0
        assert diffusion.noise(ids, seq_ids=ids, t=torch.ones(shape[0], 1)).p.shape == shape


def test_packing_errors():
    diffusion = MaskedDiffusion(mask_token_id=6)
    ids = torch.zeros(1, 4, dtype=torch.long)
    seq_ids = torch.tensor([[0, 0, 1, 2]])
    noise = diffusion.noise(ids)
    with pytest.raises(ValueError, match=r"t must have shape \(B, N\), got \(1,\)"):
        diffusion.noise(ids, seq_ids=seq_ids, t=torch.ones(1))
    with pytest.raises(ValueError, match="t must have a value for each of 3 sequences, got"):
        diffusion.noise(ids, seq_ids=seq_ids, t=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"seq_ids must have shape \(B, T\) = \(1, 4\)"):
        diffusion.noise(ids, seq_ids=seq_ids[:, 1:])
    with pytest.raises(ValueError, match=r"seq_ids must be integers, got torch.float32"):
        diffusion.loss(torch.zeros(1, 4, 7), ids, noise, seq_ids=seq_ids.float())
    with pytest.raises(ValueError, match=r"seq_ids must have shape"):
        diffusion.token_weights(noise, denominator="tokens", seq_ids=seq_ids[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_draws_do_not_depend_on_the_default_dtype(dtype):
    """In bfloat16 a uniform draw has too few values, and the rate of masking is biased."""
    diffusion, model = MaskedDiffusion(mask_token_id=5), Mixing()
    ids = torch.zeros(2, 50, dtype=torch.long)

    def drawn_again():
        generator = torch.Generator().manual_seed(0)
        noise = diffusion.noise(ids, generator=generator)
        subsets = masked_subsets(ids[0] == 0, 7, generator)
        nothing = diffusion.log_likelihood(model, ids, ids)
        few = diffusion.log_likelihood(model, ids[:, :6], num_samples=5, generator=generator)
        torch.manual_seed(0)
        return [*noise, *subsets, nothing, few, diffusion.noise(ids).p]

    expected = drawn_again()
    torch.set_default_dtype(dtype)
    try:
        found = drawn_again()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
