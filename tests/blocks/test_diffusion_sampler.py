from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_close
from torch import Tensor

from brickwork.blocks import MaskedDiffusion
from brickwork.blocks.diffusion_canvas import RowDraws, row_generators
from brickwork.blocks.diffusion_rules import PARALLEL, block_steps, gumbel, pick

VOCAB, MASK = 9, 5
RULES = ["low_confidence", "random", "margin", "entropy", "threshold", "factor"]
SIDES = {"left": [5, 4, 3, 2, 1, 0], "right": [0, 1, 2, 3, 4, 5], "anywhere": [3, 1, 4, 0, 2, 5]}


class Mixing:
    """Logits from the real tokens around; positions are columns, or counted over real tokens.

    Keeps what it was given. The mask token's logit is the largest everywhere.
    """

    def __init__(self, positions="columns", seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(VOCAB, 8, generator=generator, dtype=torch.float64)
        self.head = 2 * torch.randn(8, VOCAB, generator=generator, dtype=torch.float64)
        self.positions = positions
        self.calls: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, ids, attention_mask=None):
        self.calls.append((ids.clone(), attention_mask))
        real = torch.ones_like(ids) if attention_mask is None else attention_mask.long()
        column = torch.arange(ids.shape[1]).expand_as(ids)
        place = column if self.positions == "columns" else real.cumsum(1) - 1
        near = torch.exp(-(place[:, :, None] - place[:, None]).abs() / 3.0) + place[..., None] / 20
        logits = torch.tanh((near * real[:, None]).double() @ self.embed[ids]) @ self.head
        logits[..., MASK] = 50.0
        return logits


class Known:
    """The same logits (L, V) whatever the context."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.count = 0

    def __call__(self, ids, attention_mask=None):
        self.count += 1
        return self.logits.expand(*ids.shape, self.logits.shape[-1])


def options_for(rule: str, **options):
    own = {"threshold": {"threshold": 0.8}, "factor": {"factor": 0.9}}
    return {"rule": rule, **own.get(rule, {}), **options}


def prompts(lengths: list[int], side: str, seed: int = 0, pads: int | None = None):
    """Prompts (B, 6) of these lengths with padding on `side`, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.zeros(len(lengths), 6, dtype=torch.bool)
    for row, length in enumerate(lengths):
        real[row, SIDES[side][:length]] = True
    ids = torch.randint(MASK, real.shape, generator=generator)
    junk = torch.randint(VOCAB, real.shape, generator=generator) if pads is None else pads
    return torch.where(real, ids, junk), real


def shares(count: int, steps: int) -> list[int]:
    """`count` tokens over `steps`: the first ones take the remainder."""
    return [count // steps + (i < count % steps) for i in range(steps)]


def answers(ids: Tensor, real: Tensor, side: str, gen_length: int) -> list[Tensor]:
    """Prompt and answer of every row, cut out of the documented layout."""
    rows = []
    for row, given_real in zip(ids, real):
        length = int(given_real.sum())
        lead = int((given_real.cumsum(0) == 0).sum())
        rows.append(row[lead : lead + length + gen_length])
    return rows


# Invariants


@settings(max_examples=120)
@given(
    rule=st.sampled_from(RULES),
    gen_length=st.integers(0, 11),
    block_length=st.integers(1, 12),
    steps=st.integers(1, 15),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    side=st.sampled_from(list(SIDES)),
    temperature=st.sampled_from([0.0, 1.0]),
    cfg_scale=st.sampled_from([0.0, 0.7]),
)
def test_invariants(rule, gen_length, block_length, steps, lengths, side, temperature, cfg_scale):
    """L5, L6: all masks filled, nothing given or committed changes, the schedule is kept."""
    model = Mixing()
    ids, real = prompts(lengths, side)
    states: list[Tensor] = []
    found = MaskedDiffusion(mask_token_id=MASK).sample(
        model,
        ids,
        attention_mask=real,
        generator=torch.Generator().manual_seed(1),
        callback=lambda step, state: states.append(state),
        **options_for(rule, gen_length=gen_length, block_length=block_length, steps=steps,
                      temperature=temperature, cfg_scale=cfg_scale),
    )  # fmt: skip
    assert found.shape == (len(lengths), 6 + gen_length)
    assert found.dtype == ids.dtype
    whole = answers(found, real, side, gen_length)
    for row, (cells, length) in enumerate(zip(whole, lengths)):
        assert torch.equal(cells[:length], ids[row, real[row]])
        assert len(cells) == length + gen_length
        assert (cells[length:] != MASK).all()
        kept = sorted(found[row].tolist())
        assert kept == sorted(ids[row].tolist() + cells[length:].tolist())
    # replay: the states open masks block by block and never change what is there
    blocks = [min(block_length, gen_length - at) for at in range(0, gen_length, block_length)]
    per_block = [max(1, n) for n in shares(steps, len(blocks))] if blocks else []
    expected = [n for size, s in zip(blocks, per_block) for n in shares(size, s) if n]
    before = [
        torch.cat([ids[row, real[row]], torch.full((gen_length,), MASK)])
        for row in range(len(lengths))
    ]
    counts = []
    for state in states:
        after = answers(state, real, side, gen_length)
        for row, (old, new) in enumerate(zip(before, after)):
            assert torch.equal(old[old != MASK], new[old != MASK])
            changed = (old != new).nonzero()[:, 0]
            masks = (old == MASK).nonzero()[:, 0]
            if len(masks):  # only inside the first block that is not full
                first = int(masks[0] - lengths[row]) // block_length
                assert ((changed - lengths[row]) // block_length == first).all()
            counts.append((row, len(changed)))
        before = after
    assert len(model.calls) == len(states) <= max(steps, len(blocks))
    if rule not in PARALLEL:
        for row in range(len(lengths)):
            assert [n for r, n in counts if r == row] == expected
    else:
        assert all(any(n for _, n in counts[i : i + len(lengths)])
                   for i in range(0, len(counts), len(lengths)))  # fmt: skip


@pytest.mark.parametrize("positions", ["columns", "real"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", RULES)
def test_a_batch_equals_its_rows(rule, temperature, positions):
    """L1, L4: any lengths, padding on any side with any ids, also with randomness and guidance."""
    diffusion = MaskedDiffusion(mask_token_id=MASK)
    for side, pads, cfg_scale in (
        ("left", None, 0.0),
        ("right", -100, 1.5),
        ("anywhere", MASK, 0.0),
    ):
        lengths = [3, 6, 0, 1]
        ids, real = prompts(lengths, side, pads=pads)
        ids[1, 2:5] = MASK  # and places to fill inside a prompt
        steps = None if rule in PARALLEL else 5
        options = options_for(rule, gen_length=7, block_length=3, steps=steps,
                              temperature=temperature, cfg_scale=cfg_scale)  # fmt: skip
        generator = torch.Generator().manual_seed(2)
        found = diffusion.sample(Mixing(positions), ids, attention_mask=real.long(),
                                 generator=generator, **options)  # fmt: skip
        together = answers(found, real, side, 7)
        generator.manual_seed(2)
        for row, cells in enumerate(together):
            alone = diffusion.sample(
                Mixing(positions), ids[row : row + 1, real[row]], generator=generator, **options
            )
            assert torch.equal(alone[0], cells)


def test_rows_that_finish_a_block_early_draw_no_more_than_alone():
    diffusion = MaskedDiffusion(mask_token_id=2)
    model = Known(torch.tensor([0.6, 0.4, 1.0]).log())
    options = {"gen_length": 12, "block_length": 3, "rule": "threshold", "threshold": 0.5,
               "temperature": 1.0}  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    together = diffusion.sample(model, torch.zeros(6, 0).long(), generator=generator, **options)
    generator.manual_seed(0)
    for row in together:
        alone = diffusion.sample(model, torch.zeros(1, 0).long(), generator=generator, **options)
        assert torch.equal(alone[0], row)


def test_layout_of_the_result():
    """L4: the answer stands right behind its prompt; padding keeps its ids and its side."""
    model = Known(torch.tensor([0.0] * 8 + [1.0]))
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]])
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    found = MaskedDiffusion(mask_token_id=MASK).sample(
        model, ids, attention_mask=real, gen_length=2, block_length=2, steps=1
    )
    assert found.tolist() == [
        [0, 1, 2, 3, 8, 8],
        [0, 1, 8, 8, 2, 3],
        [0, 1, 3, 8, 8, 2],
        [0, 1, 2, 3, 8, 8],
    ]


def test_the_model_sees_no_gap_and_no_padding_ids():
    """L4: whatever the side, the canvas is prompt, masks, filler hidden by the mask."""
    model = Mixing()
    ids, real = prompts([2, 4], "left", pads=-100)
    MaskedDiffusion(mask_token_id=MASK).sample(
        model, ids, attention_mask=real, gen_length=2, block_length=2, steps=1
    )
    ((canvas, mask),) = model.calls
    assert canvas.tolist() == [
        [*ids[0, real[0]].tolist(), *[MASK] * 4],
        [*ids[1, real[1]].tolist(), *[MASK] * 2],
    ]
    assert mask is not None
    assert mask.tolist() == [[True] * 4 + [False] * 2, [True] * 6]


def test_no_mask_equals_a_mask_of_ones():
    """L1: and neither hands the model a mask it does not need."""
    ids, real = prompts([6, 6], "left")
    diffusion, found = MaskedDiffusion(mask_token_id=MASK), []
    for mask in (None, real, real.int()):
        model = Mixing()
        found.append(diffusion.sample(model, ids, attention_mask=mask, gen_length=4,
                                      block_length=4, steps=4))  # fmt: skip
        assert all(given is None for _, given in model.calls)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_no_id_is_taken_for_padding():
    """L7: a prompt of pad ids is a prompt, unless the attention mask says otherwise."""
    model = Mixing()
    ids = torch.tensor([[0, 0, 0, 3]])
    MaskedDiffusion(mask_token_id=MASK).sample(model, ids, gen_length=1, block_length=1, steps=1)
    assert model.calls[0][0].tolist() == [[0, 0, 0, 3, MASK]]
    assert model.calls[0][1] is None


# The schedule


@pytest.mark.parametrize("rule", ["low_confidence", "random", "margin", "entropy"])
def test_eight_tokens_in_three_steps(rule):
    states = [torch.full((1, 8), MASK)]
    MaskedDiffusion(mask_token_id=MASK).sample(
        Mixing(), torch.zeros(1, 0).long(), gen_length=8, block_length=8, steps=3, rule=rule,
        callback=lambda step, state: states.append(state),
    )  # fmt: skip
    left = [int((state == MASK).sum()) for state in states]
    assert left == [8, 5, 2, 0]


def test_steps_are_shared_over_blocks_the_first_take_the_remainder():
    assert [block_steps(7, 10, start, 4) for start in (0, 4, 8)] == [3, 2, 2]
    assert [block_steps(2, 10, start, 4) for start in (0, 4, 8)] == [1, 1, 1]
    assert block_steps(None, 10, 0, 4) is None


@pytest.mark.parametrize(("steps", "calls"), [(1, 2), (2, 2), (5, 5), (8, 8), (9, 8), (100, 8)])
def test_a_step_with_nothing_to_commit_costs_no_forward(steps, calls):
    model = Mixing()
    ids = torch.zeros(1, 2).long()
    diffusion = MaskedDiffusion(mask_token_id=MASK)
    diffusion.sample(model, ids, gen_length=8, block_length=4, steps=steps)
    assert len(model.calls) == calls
    diffusion.sample(model, ids, gen_length=0, block_length=4, steps=steps)
    diffusion.sample(model, ids[:0], gen_length=8, block_length=4, steps=steps)
    assert len(model.calls) == calls


def plain_loop(model, prompt: Tensor, gen_length: int, block_length: int, steps: int) -> Tensor:
    """The published loop, row by row, one forward pass at every step, needed or not."""
    rows = []
    for row in prompt:
        x = torch.cat([row, torch.full((gen_length,), MASK)])
        blocks = gen_length // block_length
        for block in range(blocks):
            end = len(row) + (block + 1) * block_length
            for count in shares(block_length, steps // blocks):
                logits = model(x[None])[0].clone()
                logits[:, MASK] = -torch.inf
                confidence, token = logits.softmax(-1).max(-1)
                open_ = (x == MASK) & (torch.arange(len(x)) < end)
                ranked = torch.where(open_, confidence, -1.0).argsort(descending=True, stable=True)
                x[ranked[:count]] = token[ranked[:count]]
        rows.append(x)
    return torch.stack(rows)


@pytest.mark.parametrize("steps", [2, 4, 6, 12, 40])
def test_equals_the_plain_loop_that_predicts_at_every_step(steps):
    """Reusing the prediction when a step changes nothing is exact."""
    prompt = torch.randint(MASK, (3, 4))
    found = MaskedDiffusion(mask_token_id=MASK).sample(
        Mixing(), prompt, gen_length=12, block_length=6, steps=steps
    )
    assert torch.equal(found, plain_loop(Mixing(), prompt, 12, 6, steps))


# What is drawn


def p_value(observed: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square test of counts (V,) against probabilities (V,)."""
    expected = probabilities.double() * observed.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_samples_follow_softmax_of_logits_over_temperature(temperature, dtype):
    logits = torch.tensor([1.0, -0.5, 2.0, 0.25, 9.0], dtype=dtype)  # the last is the mask's
    found = MaskedDiffusion(mask_token_id=4).sample(
        Known(logits), torch.zeros(100, 0).long(), gen_length=300, block_length=300, steps=1,
        temperature=temperature, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    expected = (logits[:4].double() / temperature).softmax(-1)
    assert p_value(found.flatten().bincount(minlength=4), expected) > 1e-3
    assert p_value(found[:, :7].flatten().bincount(minlength=4), expected.flip(0)) < 1e-9


def test_a_joint_distribution_is_sampled_from_its_conditionals():
    """At T = 1, one token a step in random order, a model of true conditionals gives its joint."""
    joint = torch.tensor([[0.20, 0.02, 0.08], [0.05, 0.25, 0.05], [0.10, 0.05, 0.20]])

    def model(ids, attention_mask=None):
        padded = torch.zeros(4, 4)
        padded[:3, :3] = joint
        padded[3, :3], padded[:3, 3] = joint.sum(0), joint.sum(1)  # the other one masked
        logits = torch.zeros(*ids.shape, 4)
        logits[:, 0, :3] = padded[:3, ids[:, 1]].T.log()
        logits[:, 1, :3] = padded[ids[:, 0], :3].log()
        return logits

    found = MaskedDiffusion(mask_token_id=3).sample(
        model, torch.zeros(4000, 0).long(), gen_length=2, block_length=2, steps=2, rule="random",
        temperature=1.0, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert p_value((found[:, 0] * 3 + found[:, 1]).bincount(minlength=9), joint.flatten()) > 1e-3


def test_random_order_is_uniform():
    first: list[Tensor] = []
    MaskedDiffusion(mask_token_id=3).sample(
        Known(torch.tensor([1.0, 2.0, 3.0, 0.0])), torch.zeros(4000, 0).long(),
        gen_length=4, block_length=4, steps=4, rule="random",
        generator=torch.Generator().manual_seed(0),
        callback=lambda step, state: first.append((state != 3).long().argmax(1)),
    )  # fmt: skip
    assert p_value(first[0].bincount(minlength=4), torch.full((4,), 0.25)) > 1e-3


def test_gumbel_noise_has_its_whole_tail():
    u = torch.tensor([0.0, 0.0, 0.0, 1 - 2**-24])
    v = torch.tensor([0.5, 2**-20, 0.0, 1 - 2**-24])
    noise = gumbel(u, v)
    assert noise.isfinite().all()
    expected = -torch.tensor([2.0**-25, 2.0**-44], dtype=torch.float64).log()
    assert_close(noise[:2], expected)
    assert noise[2] > 80
    draws = gumbel(torch.rand(200_000), torch.rand(200_000)).double()
    euler, variance = 0.5772156649, torch.pi**2 / 6
    assert (draws.mean() - euler).abs() < 4 * (variance / 200_000) ** 0.5
    assert (draws.var() - variance).abs() < 4 * variance * (4.4 / 200_000) ** 0.5


def test_small_temperatures_approach_the_argmax():
    logits = torch.tensor([1.0, 1.5, -3.0, 0.0])
    found = MaskedDiffusion(mask_token_id=3).sample(
        Known(logits), torch.zeros(2, 0).long(), gen_length=50, block_length=50, steps=1,
        temperature=1e-40,
    )  # fmt: skip
    assert (found == 1).all()


def test_temperature_zero_is_deterministic_and_leaves_every_generator_alone():
    diffusion, generator = MaskedDiffusion(mask_token_id=MASK), torch.Generator()
    ids, _ = prompts([6, 6], "left")
    before, own = torch.get_rng_state(), generator.get_state()
    for rule in ("low_confidence", "margin", "entropy"):
        found = [diffusion.sample(Mixing(), ids, gen_length=6, block_length=3, steps=6, rule=rule,
                                  generator=generator) for _ in range(2)]  # fmt: skip
        assert torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)


def test_seeds_repeat_and_rows_draw_differently():
    diffusion = MaskedDiffusion(mask_token_id=3)
    empty, flat = torch.zeros(2, 0).long(), Known(torch.zeros(4))

    def draw(seed):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return diffusion.sample(flat, empty, gen_length=40, block_length=40, steps=2,
                                temperature=1.0, generator=generator)  # fmt: skip

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert not torch.equal(*draw(1))
    torch.manual_seed(7)
    first = draw(None)
    assert not torch.equal(draw(None), first)
    torch.manual_seed(7)
    assert torch.equal(draw(None), first)


def test_seeds_are_drawn_one_by_one():
    generator = torch.Generator().manual_seed(5)
    batch = [g.initial_seed() for g in row_generators(20, generator, torch.device("cpu"))]
    generator.manual_seed(5)
    rows = [row_generators(1, generator, torch.device("cpu"))[0].initial_seed() for _ in batch]
    assert batch == rows
    assert len(set(batch)) == 20


# The mask token and suppressed tokens


@pytest.mark.parametrize("mask_token_id", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_mask_and_suppressed_ids_are_never_emitted(rule, temperature, mask_token_id):
    """L5: however large their logits, in every mode, with guidance too."""
    diffusion = MaskedDiffusion(mask_token_id=mask_token_id)
    logits = torch.randn(20, 6)
    logits[:, mask_token_id], logits[:, 2] = 1e4, 9e3

    def model(ids, attention_mask=None):
        return logits.expand(len(ids), 20, 6)

    for cfg_scale in (0.0, 2.0):
        found = diffusion.sample(
            model, torch.zeros(3, 0).long(), suppress_ids=[2, 5],
            generator=torch.Generator().manual_seed(0),
            **options_for(rule, gen_length=20, block_length=7, steps=9, temperature=temperature,
                          cfg_scale=cfg_scale),
        )  # fmt: skip
        assert not (found[..., None] == torch.tensor([mask_token_id, 2, 5])).any()


def test_barred_tokens_take_no_part_in_the_confidence():
    """L5: the order of commits is that of a model without these tokens."""
    logits = torch.randn(6, 4, dtype=torch.float64)
    barred = torch.randn(6, 2, dtype=torch.float64) * 20

    def order(rule, table, **options):
        states = []
        MaskedDiffusion(mask_token_id=9).sample(
            lambda ids, attention_mask=None: table[None], torch.zeros(1, 0).long(),
            gen_length=6, block_length=6, steps=6, rule=rule,
            callback=lambda step, state: states.append(state), **options,
        )  # fmt: skip
        return torch.cat(states)

    for rule in ("low_confidence", "margin", "entropy"):
        wide = order(rule, torch.cat([logits, barred], 1), suppress_ids=[4, 5])
        assert torch.equal(wide, order(rule, logits))
        assert not torch.equal(wide, order(rule, torch.cat([logits, barred], 1)))


@pytest.mark.parametrize("mask_token_id", [2, 6])
def test_columns_past_the_vocabulary_are_never_emitted(mask_token_id):
    """The mask token may stand among them."""
    logits = torch.tensor([0.0, 3.0, 1.0, 50.0, 60.0, 70.0, 80.0])
    for temperature in (0.0, 1.0):
        found = MaskedDiffusion(mask_token_id=mask_token_id, vocab_size=3).sample(
            Known(logits), torch.zeros(2, 0).long(), gen_length=30, block_length=30, steps=1,
            temperature=temperature,
        )  # fmt: skip
        assert found.max() < 3
        assert (found != mask_token_id).all()


# Rules


def table_of(*distributions: list[float]) -> Tensor:
    """Log-probabilities (1, K, V + 1), the mask last and impossible."""
    p = torch.tensor(distributions, dtype=torch.float64)
    return torch.nn.functional.pad(p.log(), (0, 1), value=-torch.inf)[None]


@pytest.mark.parametrize(
    ("rule", "order"),
    [("low_confidence", [1, 0, 2]), ("margin", [2, 1, 0]), ("entropy", [0, 1, 2])],
)
def test_each_rule_ranks_by_its_own_confidence(rule, order):
    logits = table_of(
        [0.50, 0.49, 0.01, 0.00],  # least entropy, least margin
        [0.55, 0.30, 0.10, 0.05],  # highest probability
        [0.49, 0.17, 0.17, 0.17],  # highest margin
    )
    pending = torch.ones(1, 3, dtype=torch.bool)
    for count in (1, 2, 3):
        tokens, chosen = pick(logits, pending, torch.tensor([count]), rule=rule)
        assert tokens.tolist() == [[0, 0, 0]]
        assert sorted(order[:count]) == chosen[0].nonzero()[:, 0].tolist()


def test_confidence_is_that_of_the_drawn_token_without_temperature():
    logits = table_of(*[[0.6, 0.4]] * 30)
    pending = torch.ones(1, 30, dtype=torch.bool)
    draw = RowDraws([torch.Generator().manual_seed(3)], [30])
    tokens, chosen = pick(
        logits, pending, torch.tensor([0]), rule="threshold", threshold=0.5,
        temperature=4.0, draw=draw,
    )  # fmt: skip
    assert sorted(tokens[0].unique().tolist()) == [0, 1]
    assert torch.equal(chosen, tokens == 0)


def test_only_pending_masks_are_chosen_however_many_are_asked_for():
    logits, pending = torch.randn(1, 4, 3), torch.tensor([[True, False, True, False]])
    _, chosen = pick(logits, pending, torch.tensor([4]), rule="entropy")
    assert torch.equal(chosen, pending)


@pytest.mark.parametrize("rule", ["low_confidence", "margin", "entropy"])
def test_equal_confidences_are_committed_from_the_left(rule):
    states = []
    MaskedDiffusion(mask_token_id=3).sample(
        Known(torch.tensor([1.0, 1.0, 0.0, 5.0])), torch.zeros(1, 0).long(), gen_length=40,
        block_length=40, steps=20, rule=rule, callback=lambda step, state: states.append(state),
    )  # fmt: skip
    for step, state in enumerate(states, 1):
        assert state.tolist() == [[0] * (2 * step) + [3] * (40 - 2 * step)]


def test_threshold_commits_all_above_it_and_at_least_one():
    logits = table_of([0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.55, 0.45])[0]
    for threshold, expected in ((0.75, [2, 1, 1]), (0.6, [3, 1]), (0.0, [4]), (1.0, [1, 1, 1, 1])):
        states = [torch.full((1, 4), 2)]
        MaskedDiffusion(mask_token_id=2).sample(
            lambda ids, attention_mask=None: logits[None], torch.zeros(1, 0).long(), gen_length=4,
            block_length=4, rule="threshold", threshold=threshold,
            callback=lambda step, state, states=states: states.append(state),
        )  # fmt: skip
        left = [int((state == 2).sum()) for state in states]
        assert [a - b for a, b in pairwise(left)] == expected


def test_threshold_steps_are_a_limit():
    model = Known(torch.zeros(4))
    for steps, calls in ((None, 8), (100, 8), (6, 6), (2, 2), (1, 2)):
        model.count = 0
        found = MaskedDiffusion(mask_token_id=3).sample(
            model, torch.zeros(2, 0).long(), gen_length=8, block_length=4, steps=steps,
            rule="threshold", threshold=0.9,
        )  # fmt: skip
        assert (found != 3).all()
        assert model.count == calls


# Guidance


def test_guidance_formula_and_what_its_second_half_sees():
    generator = torch.Generator().manual_seed(0)
    cond, un = torch.randn(2, 5, VOCAB, generator=generator, dtype=torch.float64)
    cond[:, 7] = un[:, 7] = -torch.inf  # a head that bars a token gives no NaN
    seen = []

    def model(ids, attention_mask=None):
        seen.append((ids.clone(), attention_mask))
        return torch.stack([cond, un])

    prompt = torch.tensor([[1, MASK, 2]])
    states = []
    found = MaskedDiffusion(mask_token_id=MASK).sample(
        model, prompt, gen_length=2, block_length=3, steps=3, cfg_scale=1.5,
        callback=lambda step, state: states.append(state),
    )  # fmt: skip
    guided = un + 2.5 * (cond - un)
    guided[:, [MASK, 7]] = -torch.inf
    assert torch.equal(found[0, [1, 3, 4]], guided.argmax(-1)[[1, 3, 4]])
    first = guided.softmax(-1).amax(-1)[[1, 3, 4]].argmax()
    assert (states[0][0, [1, 3, 4]] != MASK).nonzero()[:, 0].tolist() == [first.item()]
    for call, state in zip(seen, [torch.tensor([[1, MASK, 2, MASK, MASK]]), *states]):
        blind = state.clone()
        blind[:, [0, 2]] = MASK  # the given tokens; what was committed stays
        assert torch.equal(call[0], torch.cat([state, blind]))


# Infilling, and odd shapes


def test_infilling_fills_masks_from_left_to_right_in_blocks():
    prompt = torch.tensor([[MASK, 1, MASK, MASK, 2, MASK], [1, 2, 3, 4, 1, 2]])
    states = [torch.nn.functional.pad(prompt, (0, 2), value=MASK)]
    found = MaskedDiffusion(mask_token_id=MASK).sample(
        Mixing(), prompt, gen_length=2, block_length=3, steps=6,
        callback=lambda step, state: states.append(state),
    )  # fmt: skip
    given = prompt != MASK
    assert torch.equal(found[:, :6][given], prompt[given])
    assert (found != MASK).all()
    places = [0, 2, 3, 5, 6, 7]  # the first row's masks: two blocks of three, one a step
    for step, (old, new) in enumerate(pairwise(states)):
        (changed,) = (old[0] != new[0]).nonzero()[:, 0].tolist()
        assert changed in places[3 * (step // 3) : 3 * (step // 3) + 3]
    # the other row has one block of two and its own schedule
    assert [int((state[1] == MASK).sum()) for state in states] == [2, 1, 0, 0, 0, 0, 0]
    only = MaskedDiffusion(mask_token_id=MASK).sample(
        Mixing(), prompt, gen_length=0, block_length=3, steps=6
    )
    assert only.shape == prompt.shape
    assert (only != MASK).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_output_objects_dtypes_empty_batches_and_empty_prompts(dtype):
    diffusion, logits = MaskedDiffusion(mask_token_id=3), torch.tensor([0.0, 2.0, 1.0, 9.0])

    def model(ids, attention_mask):
        return SimpleNamespace(logits=logits.half().expand(*ids.shape, 4), loss=None)

    options = {"gen_length": 3, "block_length": 2, "steps": 2}
    for rows, columns in ((2, 3), (2, 0), (0, 3), (0, 0)):
        prompt = torch.zeros(rows, columns, dtype=dtype)
        for mask in (None, torch.zeros(rows, columns).bool()):
            found = diffusion.sample(model, prompt, attention_mask=mask, **options)
            assert found.dtype == dtype
            assert found.tolist() == [[0] * columns + [1] * 3] * rows
    with torch.autocast("cpu", torch.bfloat16):
        assert diffusion.sample(model, prompt, **options).shape == (0, 3)


def test_the_prompt_is_not_written_to_and_states_are_free_to_keep():
    ids, real = prompts([2, 5], "right")
    ids[0, 0] = MASK
    before = ids.clone()

    def spoil(step, state):
        state.fill_(MASK)

    diffusion = MaskedDiffusion(mask_token_id=MASK)
    options = {"attention_mask": real, "gen_length": 5, "block_length": 5, "steps": 5}
    found = diffusion.sample(Mixing(), ids, callback=spoil, **options)
    assert torch.equal(ids, before)
    assert torch.equal(found, diffusion.sample(Mixing(), ids, **options))


def test_no_gradient_is_recorded():
    weight = torch.zeros(4, requires_grad=True)
    modes = []

    def model(ids, attention_mask):
        modes.append(torch.is_grad_enabled())
        return weight.expand(*ids.shape, 4)

    MaskedDiffusion(mask_token_id=3).sample(
        model, torch.zeros(1, 1).long(), gen_length=1, block_length=1, steps=1
    )
    assert modes == [False]


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gen_length": -1}, "gen_length must be an integer of at least 0, got -1"),
        ({"block_length": 0}, "block_length must be an integer of at least 1, got 0"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"steps": 2.0}, r"steps must be an integer of at least 1, got 2\.0"),
        ({"temperature": -0.1}, r"temperature must be a finite number of at least 0, got -0\.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number .* got nan"),
        ({"temperature": "hot"}, "temperature must be a finite number .* got 'hot'"),
        ({"cfg_scale": -1}, "cfg_scale must be a finite number of at least 0, got -1"),
        ({"cfg_scale": float("inf")}, "cfg_scale must be a finite number .* got inf"),
        ({"rule": "best"}, r"rule must be one of \('low_confidence', .* got 'best'"),
        ({"rule": "threshold"}, "threshold must be given with rule='threshold' .* got None"),
        ({"threshold": 0.5}, r"threshold must be given .* got 0\.5 with 'low_confidence'"),
        ({"rule": "threshold", "threshold": 1.5}, r"threshold must be in \[0, 1\], got 1\.5"),
        ({"suppress_ids": [-1]}, "each of suppress_ids must be an integer of at least 0, got -1"),
        ({"suppress_ids": [9]}, "suppress_ids must be below V = 9, got 9"),
        ({"suppress_ids": range(9)}, "suppress_ids must leave one of the 9 tokens"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask must be bool or integer"),
        ({"attention_mask": torch.ones(1, 3).bool()}, r"attention_mask must have shape \(B, T\)"),
        ({"attention_mask": torch.tensor([[1, 2]])}, "attention_mask must be 0 or 1 everywhere"),
    ],
)
def test_option_errors(options, message):
    arguments = {"gen_length": 2, "block_length": 2, "steps": 2, **options}
    with pytest.raises(ValueError, match=message):
        MaskedDiffusion(mask_token_id=MASK).sample(Mixing(), torch.tensor([[1, 2]]), **arguments)
    with pytest.raises(TypeError, match="unexpected keyword"):
        MaskedDiffusion(mask_token_id=MASK).sample(
            Mixing(), torch.tensor([[1, 2]]), gen_length=2, block_length=2, steps=2, top_k=3
        )


@pytest.mark.parametrize(
    ("prompt", "vocab_size", "message"),
    [
        (torch.tensor([1, 2]), None, r"prompt_ids must have shape \(B, T\), got \(2,\)"),
        (torch.tensor([[1.0]]), None, r"the dtype of prompt_ids must be one of .* torch\.float32"),
        (torch.tensor([[-1]]), None, r"prompt_ids must be at least 0, got -1"),
        (torch.tensor([[0, 7]]), 7, r"prompt_ids must be in \[0, 7\), got 0 to 7"),
    ],
)
def test_prompt_errors(prompt, vocab_size, message):
    diffusion = MaskedDiffusion(mask_token_id=MASK, vocab_size=vocab_size)
    with pytest.raises(ValueError, match=message):
        diffusion.sample(Mixing(), prompt, gen_length=2, block_length=2, steps=2)


def test_model_errors():
    prompt = torch.tensor([[1, 2]])
    options = {"gen_length": 2, "block_length": 2, "steps": 2}
    diffusion = MaskedDiffusion(mask_token_id=3, vocab_size=6)
    for logits, message in (
        (
            torch.zeros(1, 3, 6),
            r"model must return logits \(B, T, V\).* = \(1, 4\), got \(1, 3, 6\)",
        ),
        (torch.zeros(4, 6), r"model must return logits .* got \(4, 6\)"),
        (None, "model must return logits .* got NoneType"),
        (torch.zeros(1, 4, 5), "logits must have at least vocab_size = 6 columns, got 5"),
        (torch.zeros(1, 4, 6).long(), r"logits must be floating point, got torch\.int64"),
        (torch.full((1, 4, 6), float("nan")), "model must return logits with a finite maximum"),
        (torch.full((1, 4, 6), -torch.inf), "model must return logits with a finite maximum"),
    ):
        with pytest.raises(ValueError, match=message):
            diffusion.sample(lambda ids, attention_mask, logits=logits: logits, prompt, **options)


def test_without_steps_every_step_commits_one_token():
    calls = []

    def model(ids, attention_mask=None):
        calls.append(ids)
        return torch.randn(*ids.shape, 7)

    diffusion = MaskedDiffusion(mask_token_id=6)
    diffusion.sample(model, torch.zeros(1, 2, dtype=torch.int64), gen_length=5, block_length=3)
    masks = [int((ids == 6).sum()) for ids in calls]
    assert masks == [5, 4, 3, 2, 1]
