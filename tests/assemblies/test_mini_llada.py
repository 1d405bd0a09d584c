from __future__ import annotations

import pytest
import torch
from support import assert_close

from brickwork.assemblies import MiniLLaDA, MiniLLaDAConfig

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
