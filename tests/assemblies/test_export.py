"""What others do with a whole model: trace it, export it, map it over samples."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from support import assert_close
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from brickwork.assemblies import LCPLM, LCPLMConfig, MiniLLaDA, MiniLLaDAConfig, Rish, RishConfig
from brickwork.assemblies.outputs import LCPLMOutput, MiniLLaDAOutput, RishOutput


def mini_llada():
    return MiniLLaDA(
        MiniLLaDAConfig(
            vocab_size=23, mask_token_id=22, dim=16, depth=2, head=2, intermediate_size=12
        )
    )


def rish(kv_heads=2):
    return Rish(
        RishConfig(
            vocab_size=23,
            hidden_size=16,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            num_experts=4,
            num_experts_per_tok=2,
            pad_token_id=None,
            eos_token_id=None,
        )
    )


def lc_plm():
    return LCPLM(LCPLMConfig(d_model=16, n_layer=1, ssm_cfg={"layer": "Mamba1", "d_state": 4}))


MODELS = [mini_llada, rish, lambda: rish(kv_heads=4), lc_plm]
NAMES = ["mini_llada", "rish", "rish without groups", "lc_plm"]
models = pytest.mark.parametrize("make", MODELS, ids=NAMES)
# PyTorch's own, about the CPU's attention kernel: the result is right.
slow_under_vmap = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def ids_of(rows, tokens=6):
    return torch.randint(0, 20, (rows, tokens))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask).logits


@models
def test_traces(make):
    model = Logits(make().eval())
    mask = torch.ones(2, 6, dtype=torch.int64)
    with warnings.catch_warnings():
        # Tracing is deprecated, and warns that it records shapes as they are.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, (ids_of(2), mask))
    ids, mask = ids_of(2), mask.clone()
    mask[1, 4:] = 0
    assert_close(traced(ids, mask)[mask == 1], model(ids, mask)[mask == 1], terms=256)


@models
def test_exports_for_any_batch(make):
    """Loads again too, and the exported model returns the same kind of output."""
    model = make().eval()
    given = {"input_ids": ids_of(3), "attention_mask": torch.ones(3, 6, dtype=torch.int64)}
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(
        model, (), given, dynamic_shapes={name: {0: batch} for name in given}
    )
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, torch.export.load(file)):
        for rows in (2, 5):
            mask = torch.ones(rows, 6, dtype=torch.int64)
            mask[0, 4:] = 0
            ids = ids_of(rows)
            found = program.module()(input_ids=ids, attention_mask=mask)
            expected = model(ids, attention_mask=mask)
            assert type(found) is type(expected)
            assert_close(found.logits[mask == 1], expected.logits[mask == 1], terms=256)
    nodes = [node for node in exported.graph.nodes if "val" in node.meta]
    assert not any(
        isinstance(value, torch.Tensor) and value.is_complex()
        for node in nodes
        for value in pytree.tree_leaves(node.meta["val"])
    )


@pytest.mark.parametrize("make", [mini_llada, rish], ids=["mini_llada", "rish"])
def test_exports_for_any_length(make):
    """LC-PLM's scan is unrolled over the tokens: it is exported for one length."""
    model = make().eval()
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("tokens", min=2)}
    exported = torch.export.export(model, (ids_of(3),), dynamic_shapes=(sizes,))
    for rows, tokens in ((2, 9), (5, 4)):
        ids = ids_of(rows, tokens)
        assert_close(exported.module()(ids).logits, model(ids).logits, terms=256)


@slow_under_vmap
@models
def test_gradients_of_each_sample_by_vmap(make):
    model = make()
    ids = ids_of(3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    kwargs = {"attention_mask": torch.ones(3, 6, dtype=torch.int64), "labels": ids}
    kwargs["attention_mask"][1, 4:] = 0
    if isinstance(model, MiniLLaDA):
        mask = kwargs["attention_mask"]
        kwargs["noise"] = model.diffusion.noise(ids, mask, t=torch.ones(3))

    def loss(parameters, ids, kwargs):
        one, kwargs = pytree.tree_map(lambda tensor: tensor[None], (ids, kwargs))
        return functional_call(model, parameters, (one,), kwargs).loss

    mapped = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, ids, kwargs)
    for i in range(3):
        sample = pytree.tree_map(lambda tensor, i=i: tensor[i], (ids, kwargs))
        alone = grad(loss)(parameters, *sample)
        for name, expected in alone.items():
            assert_close(mapped[name][i], expected, terms=4096, name=name)


@slow_under_vmap
def test_noise_is_drawn_for_each_mapped_sample():
    model = mini_llada()
    ids = ids_of(1).expand(50, -1)
    mapped = vmap(lambda row: model(row[None], labels=row[None]), randomness="different")
    noise = mapped(ids).noise
    assert len(noise.p[:, 0, 0].unique()) == 50
    assert len(noise.mask[:, 0].unique(dim=0)) > 10


@pytest.mark.parametrize("output", [MiniLLaDAOutput, RishOutput, LCPLMOutput])
def test_outputs_are_trees_of_their_tensors(output):
    one = torch.ones(1)
    given = output(one, (one, one))
    leaves, tree = pytree.tree_flatten(given)
    assert len(leaves) == 3
    assert pytree.tree_unflatten(leaves, tree) == given
