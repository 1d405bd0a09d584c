from __future__ import annotations

import pytest
import torch
from support import assert_close

from brickwork.assemblies import MiniLLaDA, MiniLLaDAConfig
from brickwork.blocks.masked_diffusion import Noise

TINY = {
    "vocab_size": 23,
    "mask_token_id": 22,
    "dim": 16,
    "depth": 2,
    "head": 2,
    "intermediate_size": 12,
    "max_seq_len": 24,
}


def tiny(**changes):
    model = MiniLLaDA(MiniLLaDAConfig(**(TINY | changes)))
    torch.nn.init.normal_(model.embed.weight)
    return model


def test_default_config_has_the_published_size():
    with torch.device("meta"):
        model = MiniLLaDA(MiniLLaDAConfig())
    assert sum(p.numel() for p in model.parameters()) == 1_137_911_808


@pytest.mark.parametrize("before", [0, 2, 5])
@pytest.mark.parametrize("after", [0, 3])
def test_padding_changes_nothing(before, after):
    """L1: values and gradients; padding ids are arbitrary."""
    model = tiny()
    row = torch.randint(0, 22, (1, 6))
    ids = torch.cat([torch.randint(0, 22, (1, before)), row, torch.randint(0, 22, (1, after))], 1)
    mask = torch.zeros_like(ids)
    mask[:, before : before + 6] = 1
    embeds = model.embed(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, attention_mask=mask).logits[:, before : before + 6]
    assert_close(logits, model(row).logits, terms=256)
    (grad,) = torch.autograd.grad(logits.square().sum(), embeds)
    assert (grad[mask == 0] == 0).all()
    assert (grad[mask == 1] != 0).any()


def test_no_mask_is_a_mask_of_ones():
    """L7: padding is never inferred from an id."""
    model = tiny()
    ids = torch.randint(0, 22, (2, 6))
    assert_close(model(ids, attention_mask=torch.ones(2, 6)).logits, model(ids).logits, terms=256)


def test_packed_equals_separate():
    model = tiny()
    rows = [torch.randint(0, 22, (n,)) for n in (4, 1, 7)]
    seq_ids = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 1, 7]))[None]
    found = model(torch.cat(rows)[None], seq_ids=seq_ids).logits[0]
    assert_close(found, torch.cat([model(r[None]).logits[0] for r in rows]), terms=256)


def test_loss_is_repeatable_and_padding_is_not_noised():
    model = tiny()
    ids = torch.randint(0, 22, (4, 10))
    mask = torch.ones_like(ids)
    mask[:, 7:] = 0
    outs = [
        model(
            ids,
            attention_mask=mask,
            labels=ids,
            generator=torch.Generator().manual_seed(5),
        )
        for _ in range(2)
    ]
    assert torch.equal(outs[0].loss, outs[1].loss)
    assert not outs[0].noise.mask[:, 7:].any()
    labels = ids.clone()
    labels[:, :3] = -100
    assert not model(ids, labels=labels).noise.mask[:, :3].any()


@pytest.mark.parametrize("weighting", ["elbo", "uniform"])
def test_loss_is_finite_when_nothing_may_be_masked(weighting):
    """L2"""
    model = tiny(weighting=weighting)
    ids = torch.randint(0, 22, (3, 5))
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss == 0
    loss.backward()
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_position_i_predicts_token_i():
    """L9: a head rigged to the answer gives a loss near zero, one shifted by a token does not."""
    model = tiny()
    ids = torch.randint(0, 22, (2, 8))
    out = model(ids, labels=ids)
    perfect = 50.0 * torch.nn.functional.one_hot(ids, 23)
    assert model.diffusion.loss(perfect, ids, out.noise) < 1e-3
    assert model.diffusion.loss(perfect.roll(1, 1), ids, out.noise) > 1


def test_sampling_a_batch_equals_its_rows():
    """L4, through the model"""
    model = tiny()
    rows = [torch.randint(0, 22, (n,)) for n in (3, 6)]
    options = {"gen_length": 6, "steps": 6, "block_length": 3}
    alone = [model.diffusion.sample(model, r[None], **options)[0, len(r) :] for r in rows]
    ids = torch.zeros(2, 6, dtype=torch.int64)
    for side in ("left", "right"):
        mask = torch.zeros(2, 6, dtype=torch.int64)
        for i, row in enumerate(rows):
            at = slice(6 - len(row), 6) if side == "left" else slice(0, len(row))
            ids[i, at], mask[i, at] = row, 1
        found = model.diffusion.sample(model, ids, attention_mask=mask, **options)
        for i in range(2):
            assert alone[i].tolist() in [
                found[i, j : j + 6].tolist() for j in range(found.shape[1] - 5)
            ], (side, i)
        assert not (found == 22).any()


def test_gradient_checkpointing_and_hidden_states():
    model = tiny().train()
    ids = torch.randint(0, 22, (2, 6))
    grads = []
    for on in (False, True):
        model.gradient_checkpointing = on
        model.zero_grad()
        generator = torch.Generator().manual_seed(0)
        out = model(ids, labels=ids, generator=generator, output_hidden_states=True)
        assert len(out.hidden_states) == 3
        out.loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_wrong_inputs():
    """R8 and clear errors"""
    model = tiny()
    ids = torch.randint(0, 22, (1, 25))
    with pytest.raises(ValueError, match="24"):
        model(ids)
    ids = ids[:, :4]
    with pytest.raises(ValueError, match="labels need input_ids"):
        model(inputs_embeds=model.embed(ids), labels=ids)
    noise = model(ids, labels=ids).noise
    with pytest.raises(ValueError, match="noise needs labels"):
        model(ids, noise=noise)
    with pytest.raises(TypeError, match="use_cache"):
        model(ids, use_cache=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_cast_models_keep_their_positions(dtype):
    """R2, R3: rotary angles are not part of what a cast can damage."""
    model = tiny()
    ids = torch.randint(0, 22, (1, 20))
    exact = model(ids).logits
    cast = tiny().to(dtype)
    cast.load_state_dict(model.state_dict())
    error = (cast(ids).logits.float() - exact).abs().max()
    assert (
        error < 64 * torch.finfo(torch.promote_types(dtype, dtype)).eps * exact.abs().max() + 1e-5
    )
    assert not list(model.buffers())


def test_compiles_and_exports():
    """R1: no complex number in the exported graph"""
    model = tiny().eval()
    ids = torch.randint(0, 22, (2, 6))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(ids).logits, model(ids).logits, terms=256)


@pytest.mark.parametrize("weighting", ["elbo", "uniform"])
@pytest.mark.parametrize("return_logits", [True, False])
def test_packed_sequences_have_the_loss_of_a_batch(weighting, return_logits):
    """Same noise, same loss and gradients; the ids of padding in between are arbitrary."""
    model = tiny(weighting=weighting)
    ids = torch.randint(0, 22, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    t, u = torch.tensor([0.4, 0.9]), torch.rand(2, 8)
    u[:, 0] = 0  # something is masked in both
    apart = model.diffusion.noise(ids, mask, t=t, u=u)
    order = [0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15]  # two columns of padding between
    seq_ids = torch.tensor([[1] * 3 + [7, 8] + [2] * 8])
    row, real = ids.flatten()[order][None], mask.flatten()[order][None]
    together = Noise(*(field.flatten()[order][None] for field in apart))
    losses, grads = [], []
    for given in (
        {"input_ids": ids, "labels": ids, "attention_mask": mask, "noise": apart},
        {
            "input_ids": row,
            "labels": row,
            "attention_mask": real,
            "noise": together,
            "seq_ids": seq_ids,
        },
    ):
        model.zero_grad()
        losses.append(model(**given, return_logits=return_logits).loss)
        losses[-1].backward()
        grads.append(model.layers[0].mlp.down.weight.grad.clone())
    assert_close(losses[1], losses[0], terms=256)
    assert_close(grads[1], grads[0], terms=4096)
    drawn = model(row, labels=row, attention_mask=real, seq_ids=seq_ids).noise.p[0]
    assert len(drawn[:3].unique()) == len(drawn[5:].unique()) == 1
    assert drawn[0] != drawn[5]
    assert (drawn[3:5] == 0).all()


def test_labels_are_looked_at():
    """Nothing that labels or noise say is ignored."""
    model = tiny()
    ids = torch.randint(0, 22, (2, 4))
    for dtype in (torch.float32, torch.bool, torch.int16):
        with pytest.raises(ValueError, match=f"labels must be int64 or int32, got {dtype}"):
            model(ids, labels=ids.to(dtype))
    for value in (1000, -1):
        labels = ids.clone()
        labels[1, 2] = value
        with pytest.raises(
            ValueError, match=rf"labels must be -100 or the token .* got {value} .* at \(1, 2\)"
        ):
            model(ids, labels=labels)
    with pytest.raises(ValueError, match="labels must be -100 or the token"):  # L9: shifted ones
        model(torch.arange(8).view(2, 4), labels=torch.arange(8).view(2, 4).roll(-1, 1))
    with pytest.raises(ValueError, match=r"labels must have shape \(B, T\) with T = 4"):
        model(ids, labels=ids[:, 1:])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, T\) with T = 4"):
        model(ids, labels=ids, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="generator needs labels"):
        model(ids, generator=torch.Generator())
    assert model(ids.int(), labels=ids).loss.isfinite()


def test_noise_is_looked_at():
    """Noise is of these ids, and masks only what labels and attention_mask let it."""
    model = tiny()
    ids = torch.randint(0, 22, (2, 4))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, 1], mask[1, 3] = -100, 0
    t, u = torch.ones(2), torch.zeros(2, 4)
    everything = model.diffusion.noise(ids, t=t, u=u)
    good = model.diffusion.noise(ids, (labels != -100) & (mask == 1), t=t, u=u)
    expected = model(ids, labels=labels, attention_mask=mask, noise=good).loss
    loose = good._replace(p=everything.p)  # a p over tokens that are not maskable is no count
    assert torch.equal(model(ids, labels=labels, attention_mask=mask, noise=loose).loss, expected)
    with pytest.raises(ValueError, match=r"noise.mask must be False where labels .* at \(0, 1\)"):
        model(ids, labels=labels, noise=everything)
    with pytest.raises(ValueError, match=r"noise.mask must be False where .* at \(1, 3\)"):
        model(ids, labels=ids, attention_mask=mask, noise=everything)
    with pytest.raises(ValueError, match="generator must be None with noise"):
        model(ids, labels=ids, noise=everything, generator=torch.Generator())
    with pytest.raises(ValueError, match="noise must be a Noise, got tuple"):
        model(ids, labels=ids, noise=tuple(everything))
    for name in Noise._fields:
        short = everything._replace(**{name: getattr(everything, name)[:, 1:]})
        with pytest.raises(ValueError, match=rf"noise.{name} must have shape \(B, T\) with T = 4"):
            model(ids, labels=ids, noise=short)
    with pytest.raises(ValueError, match=r"noise.mask must be bool, got torch.int64"):
        model(ids, labels=ids, noise=everything._replace(mask=everything.mask.long()))
    with pytest.raises(ValueError, match=r"noise.p must be floating point, got torch.int64"):
        model(ids, labels=ids, noise=everything._replace(p=everything.p.long()))
    with pytest.raises(ValueError, match=r"noise.p must be above 0 where noise.mask is True"):
        model(ids, labels=ids, noise=everything._replace(p=everything.p * 0))
