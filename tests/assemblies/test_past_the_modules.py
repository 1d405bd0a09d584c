"""The passes that see parameters only: they must stand for the modules, or step aside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from brickwork.assemblies import MiniLLaDA, MiniLLaDAConfig, Rish, RishConfig
from brickwork.assemblies.decoding import DecodeStep
from brickwork.assemblies.mini_llada_pass import ColumnsPass
from brickwork.assemblies.rish import Block
from brickwork.blocks import Attention, BlockKVCache, RoPE, SwiGLU
from brickwork.kernels.backend import prefer

PROMPT = torch.tensor([[1, 2, 3, 4, 5]])


def rish() -> Rish:
    torch.manual_seed(0)
    config = RishConfig(
        vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_experts=4, num_experts_per_tok=2, pad_token_id=None,
        eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    return Rish(config).double().eval()


def llada() -> MiniLLaDA:
    torch.manual_seed(0)
    config = MiniLLaDAConfig(
        vocab_size=41, mask_token_id=40, dim=32, depth=2, head=4, intermediate_size=48
    )
    model = MiniLLaDA(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def bias(layer: nn.Module) -> None:
    layer.bias = nn.Parameter(torch.randn(layer.weight.shape[0], dtype=layer.weight.dtype) * 4)


class ScaledBlock(Block):
    def forward(self, x, routing, **where):
        y, out = super().forward(x, routing, **where)
        return y * torch.linspace(-2, 2, 32), out


class ScaledRish(Rish):
    def run_layer(self, *args, **options):
        y, out = super().run_layer(*args, **options)
        return y * torch.linspace(-2, 2, 32), out


def each_layer(change):
    def apply(model):
        for layer in model.layers:
            change(layer)

    return apply


def other_class(kind):
    def apply(module):
        module.__class__ = kind

    return apply


OF_RISH = {
    "layers of a subclass": each_layer(other_class(ScaledBlock)),
    "a subclass": other_class(ScaledRish),
    "a RoPE of its own": lambda m: setattr(m.layers[1].attention, "rope", RoPE(8, base=3.0)),
    "another head width": lambda m: setattr(
        m.layers[1],
        "attention",
        Attention(32, num_heads=2, qk_norm="full", rope=RoPE(16), causal=True).double().eval(),
    ),
    "another router": lambda m: setattr(
        m.layers[0].moe, "router", nn.Linear(32, 4, bias=False).double()
    ),
    "one bias of three": each_layer(lambda layer: bias(layer.attention.k_proj)),
    "norms of two eps": each_layer(lambda layer: setattr(layer.attention.k_norm, "eps", 0.5)),
    "max_norm": lambda m: setattr(m.embed_tokens, "max_norm", 0.1),
    "a bias of the head": lambda m: bias(m.lm_head),
    "a head that is replaced": lambda m: setattr(
        m, "lm_head", nn.Sequential(m.lm_head, nn.Linear(40, 40).double())
    ),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("what", OF_RISH)
def test_an_altered_rish_decodes_as_its_modules(what, rows):
    model = rish()
    OF_RISH[what](model)
    prompt = PROMPT.repeat(rows, 1)
    found, expected = (
        model.generate(prompt, max_new_tokens=12, cache=cache) for cache in ("growing", "none")
    )
    assert torch.equal(found, expected)


OF_LLADA = {
    "bias of the head": lambda m: bias(m.head),
    "biases of projections": each_layer(lambda layer: bias(layer.attention.v_proj)),
    "biases of the MLP": each_layer(
        lambda layer: setattr(layer, "mlp", SwiGLU(32, hidden_dim=48, bias=True).double())
    ),
    "grouped heads": each_layer(
        lambda layer: setattr(
            layer,
            "attention",
            Attention(32, num_heads=4, num_kv_heads=2, rope=layer.attention.rope).double(),
        )
    ),
    "another head width": each_layer(
        lambda layer: setattr(
            layer,
            "attention",
            Attention(32, num_heads=4, head_dim=16, rope=RoPE(16, layout="interleaved")).double(),
        )
    ),
    "a RoPE of its own": lambda m: setattr(
        m.layers[1].attention, "rope", RoPE(8, base=3.0, layout="interleaved")
    ),
    "max_norm": lambda m: setattr(m.embed, "max_norm", 0.1),
}


class Wrapped(nn.Module):
    """Another model that hands on what it has not, as adapters do."""

    def __init__(self, model, scale=0.0):
        super().__init__()
        self.model, self.scale = model, scale

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, *args, **options):
        out = self.model(*args, **options)
        out.logits = out.logits + self.scale * torch.linspace(-9, 9, 41)
        return out


def filled(diffusion, model, **options):
    return diffusion.sample(model, PROMPT, gen_length=16, block_length=8, cache="dual", **options)


@pytest.mark.parametrize("what", OF_LLADA)
def test_an_altered_llada_samples_as_its_modules(what):
    model = llada()
    OF_LLADA[what](model)
    assert torch.equal(
        filled(model.diffusion, model), filled(model.diffusion, Wrapped(copy.deepcopy(model)))
    )


def test_a_wrapper_offers_no_pass_of_the_model_in_it():
    model = llada()
    shifted = filled(model.diffusion, Wrapped(model, scale=1.0))
    model.columns_pass = lambda caches: None
    assert torch.equal(shifted, filled(model.diffusion, Wrapped(model, scale=1.0)))
    assert not torch.equal(shifted, filled(model.diffusion, model))


def test_a_model_that_changes_between_blocks_is_asked_anew():
    def run(wrap):
        model = llada()

        def change(step, ids):
            if step == 8:  # the first block is full
                model.layers[0].mlp.register_forward_hook(lambda module, args, out: -out)
                model.layers[1].attention.v_proj.weight.data.neg_()

        return filled(model.diffusion, wrap(model), callback=change)

    assert torch.equal(run(lambda model: model), run(Wrapped))


def test_hooks_of_every_module_are_seen():
    one, other = rish(), llada()
    caches = [BlockKVCache() for _ in other.layers]

    def halve(module, args, out):
        return out * 0.5 if isinstance(module, nn.Linear) and out.shape[-1] == 32 else None

    hook = nn.modules.module.register_module_forward_hook(halve)
    try:
        ids = [one.generate(PROMPT, max_new_tokens=9, cache=c) for c in ("growing", "none")]
        assert torch.equal(*ids)
        assert other.columns_pass(caches) is None
        turned = RoPE(8).qk(torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8), torch.arange(3))
        assert len(turned) == 2
    finally:
        hook.remove()


def test_modes_and_preferences_are_heeded():
    one, other = rish(), llada()
    with FlopCounterMode(display=False) as cached:
        one.generate(PROMPT, max_new_tokens=4)
    assert cached.get_total_flops() > 4 * 2 * sum(
        layer.attention.q_proj.weight.numel() for layer in one.layers
    )
    with prefer("torch"):
        assert DecodeStep.why_not(one) == "the specification is asked for"
        assert ColumnsPass.why_not(other) == "the specification is asked for"
    assert DecodeStep.why_not(one) is None
    assert ColumnsPass.why_not(other) is None


@pytest.mark.parametrize("return_logits", [False, True])
def test_a_head_that_is_more_than_a_product_is_called(return_logits):
    ids = torch.randint(40, (2, 6))
    for model, head, options in (
        (rish(), "lm_head", {}),
        (llada(), "head", {"generator": torch.Generator().manual_seed(0)}),
    ):
        given = {"labels": ids, "return_logits": return_logits, **options}
        plain = model(ids, **given).loss
        calls = []
        getattr(model, head).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if options:
            given["generator"] = torch.Generator().manual_seed(0)
        out = model(ids, **given)
        assert calls == [1]
        torch.testing.assert_close(out.loss, plain)
        assert (out.logits is None) == (not return_logits)
        bias(getattr(model, head))
        if options:
            given["generator"] = torch.Generator().manual_seed(0)
        assert not torch.allclose(model(ids, **given).loss, plain)
