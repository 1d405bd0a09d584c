"""Training under transformers: Trainer, recomputation, adapters."""

from __future__ import annotations

import pytest
import torch
from hf_models import KINDS, build, lc_plm, mini_llada, rish, token_ids
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils.generic import find_labels

from brickwork.blocks.masked_diffusion import Noise

LENGTHS = (7, 3, 5, 6)

# peft, and the arguments of the oldest transformers, have names that newer ones deprecate.
old_names = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def rows():
    """Four examples of one width, with labels of different numbers, the first of which scores
    nothing in two of them."""
    torch.manual_seed(2)
    ids = token_ids(4, 7)
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    labels = ids.masked_fill(~mask, -100)
    labels[1:3, 0] = -100
    keys = ("input_ids", "attention_mask", "labels")
    return [dict(zip(keys, row)) for row in zip(ids, mask.long(), labels)]


def fixed_noise(model):
    """Make every token with an even id be masked, so that nothing depends on how rows are drawn."""

    def noise(input_ids, maskable, **_):
        mask = maskable & (input_ids % 2 == 0)
        p = torch.full(input_ids.shape, 0.5)
        return Noise(input_ids.masked_fill(mask, model.config.mask_token_id), mask, p)

    model.diffusion.noise = noise
    return model


class Recorder(Trainer):
    """Keeps the gradients of the one step that it takes."""

    def create_optimizer(self, *args):
        optimizer = super().create_optimizer(*args)
        optimizer.register_step_pre_hook(lambda *_: self.keep())
        return optimizer

    def keep(self):
        self.kept = {n: p.grad.clone() for n, p in self.model.named_parameters()}


def step(kind, folder, *, batch, accumulation, data=None, **fields):
    """The gradients and the loss of one step over the four rows."""
    pytest.importorskip("accelerate")
    torch.manual_seed(1)
    model = build(kind, **fields)
    if kind == "mini_llada":
        fixed_noise(model)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
    )
    trainer = Recorder(model, arguments, train_dataset=data or rows())
    trainer.train()
    loss = trainer.state.log_history[0]["loss"]
    assert trainer.label_names == ["labels"]
    return trainer.kept, loss


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_over_four_batches_is_one_batch(kind, tmp_path):
    """H1, L3"""
    fields = {"router_aux_loss_coef": 0.0} if kind == "rish" else {}
    expected, loss = step(kind, tmp_path, batch=4, accumulation=1, **fields)
    found, accumulated = step(kind, tmp_path, batch=1, accumulation=4, **fields)
    assert accumulated == pytest.approx(loss, rel=1e-4)
    scale = max(grad.abs().max() for grad in expected.values())
    assert scale > 0
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=float(scale) * 1e-5, rtol=1e-4, msg=name)


def test_the_balancing_loss_counts_once_under_accumulation(tmp_path):
    """H1, M9"""
    data = rows()[:1] * 4  # of equal rows it is the same over one and over four
    parts = [
        step("rish", tmp_path, batch=4 // n, accumulation=n, data=data, router_aux_loss_coef=c)
        for c, n in ((5.0, 1), (5.0, 4), (0.0, 1))
    ]
    (expected, loss), (found, accumulated), (without, _) = parts
    assert accumulated == pytest.approx(loss, rel=1e-4)
    name = "model.layers.0.moe.router.weight"
    assert (expected[name] - without[name]).norm() > 0.1
    torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["rish", "lc_plm"])
def test_the_loss_is_the_sum_over_the_items_of_the_step(kind):
    """H1"""
    fields = {"router_aux_loss_coef": 0.5} if kind == "rish" else {}
    model, ids = build(kind, **fields), token_ids(2, 7)
    out = model(ids, labels=ids)
    scored = 12 if kind == "rish" else 14
    for items in (scored, 40, torch.tensor(40)):
        found = model(ids, labels=ids, num_items_in_batch=items).loss
        torch.testing.assert_close(found, out.loss * (scored / items))


def test_mini_llada_leaves_the_averaging_to_the_trainer():
    """H1, L3"""
    model, ids = mini_llada(), token_ids(2, 7)
    assert model.accepts_loss_kwargs is False
    with pytest.raises(TypeError, match="num_items_in_batch"):
        model(ids, labels=ids, num_items_in_batch=3)
    with pytest.raises(ValueError, match=r"labels must be -100 or the token of input_ids"):
        model(ids, labels=ids.roll(1, 1))
    with pytest.raises(ValueError, match="labels need input_ids"):
        model(inputs_embeds=torch.zeros(2, 7, 16), labels=ids)
    with pytest.raises(ValueError, match="noise needs labels"):
        model(ids, noise=Noise(ids, ids > 0, torch.ones(2, 7)))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_score(kind):
    """L2"""
    model, ids = build(kind), token_ids(2, 7)
    fields = {"router_aux_loss_coef": 0.0} if kind == "rish" else {}
    model.config.update(fields)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_found_by_name(kind):
    assert find_labels(type(build(kind))) == ["labels"]


def gradients(model, ids):
    model.zero_grad()
    torch.manual_seed(4)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def recompute(model, **options):
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable(**options) if options else enable()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_of_both_kinds_changes_nothing(kind, reentrant, implementation):
    """A10, M9, M13"""
    model, ids = build(kind, attn_implementation=implementation).train(), token_ids(2, 7)
    loss, expected = gradients(model, ids)
    calls = []
    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    recompute(model)
    model._set_gradient_checkpointing(
        True, lambda *a: torch.utils.checkpoint.checkpoint(*a, use_reentrant=reentrant)
    )
    again, found = gradients(model, ids)
    assert len(calls) == 4
    torch.testing.assert_close(again, loss)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-4, msg=name)
    model.eval()
    calls.clear()
    gradients(model, ids)
    assert len(calls) == 2


def test_recomputation_of_every_second_layer():
    model, ids = lc_plm(n_layer=4).train(), token_ids(2, 7)
    calls = []
    for layer in model.base_model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    model._set_gradient_checkpointing(
        True,
        lambda *a: torch.utils.checkpoint.checkpoint(*a, use_reentrant=False),
        every_n_layers=2,
    )
    gradients(model, ids)
    assert len(calls) == 6


def test_no_cache_while_layers_are_recomputed():
    """A10"""
    from transformers import DynamicCache

    model, ids = rish().train(), token_ids(2, 7)
    recompute(model)
    out = model(ids, use_cache=True)
    assert (out.get("cache") or out.get("past_key_values")) is None
    with pytest.raises(ValueError, match="cache must be None while layers are recomputed"):
        model(ids, cache=DynamicCache(config=model.config))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_but_for_one_weight_in_the_first_layer(kind, reentrant):
    """H6"""
    model, ids = build(kind).train(), token_ids(2, 7)
    model.requires_grad_(False)
    weight = next(p for n, p in model.named_parameters() if ".layers.0." in n and p.ndim == 1)
    weight.requires_grad_(True)
    expected = gradients(model, ids)[1]
    recompute(model)
    model._set_gradient_checkpointing(
        True, lambda *a: torch.utils.checkpoint.checkpoint(*a, use_reentrant=reentrant)
    )
    model.enable_input_require_grads()
    found = gradients(model, ids)[1]
    (name,) = expected
    assert found[name].any()
    torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-4)


@old_names
@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_the_listed_modules(kind, tmp_path):
    """G2, H6"""
    peft = pytest.importorskip("peft")
    model, ids = build(kind), token_ids(2, 7)
    listed = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert listed - {"lm_head", "head"} <= set(model.lora_targets)
    before = model(ids).logits.detach()
    options = {"target_parameters": ["moe.gate_up", "moe.down"]} if kind == "rish" else {}
    config = peft.LoraConfig(r=2, target_modules=[*model.lora_targets], **options)
    adapted = peft.get_peft_model(model, config).train()
    torch.testing.assert_close(adapted(input_ids=ids).logits, before)
    trained = [(n, p) for n, p in adapted.named_parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([p for _, p in trained], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        torch.manual_seed(4)
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in trained:
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    found = adapted.eval()(input_ids=ids).logits.detach()
    assert (found - before).abs().max() > 1e-4
    adapted.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = build(kind)
    base.load_state_dict(_base_state(adapted))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, found)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, found, atol=1e-4, rtol=1e-4)


def _base_state(adapted):
    """The parameters of the model under the adapters, under its own names."""
    state = {}
    for name, tensor in adapted.base_model.model.state_dict().items():
        if "lora_" not in name:
            state[name.replace(".base_layer", "").replace(".parametrizations", "")] = tensor
    return state


@old_names
def test_lora_and_recomputation_in_a_trainer(tmp_path):
    """H1, H6"""
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    model = rish()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[*model.lora_targets]))
    arguments = TrainingArguments(
        output_dir=tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=3,
        learning_rate=0.05,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        label_names=["labels"],
    )
    trainer = Trainer(adapted, arguments, train_dataset=rows())
    before = {n: p.detach().clone() for n, p in adapted.named_parameters()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
