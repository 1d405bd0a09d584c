"""What others do with a whole model: trace it, export it, map it over samples."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from interoperability import EXAMPLE, MODELS, check_module, export, inputs, mini_llada
from support import assert_close
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from brickwork.assemblies import MiniLLaDA
from brickwork.assemblies.outputs import LCPLMOutput, MiniLLaDAOutput, RishOutput

models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
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


# PyTorch's own, at the first use of its scan in a process.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_exports_for_any_batch_and_length(name):
    """Loads again too, and returns the same kind of output. Without a mask, and the other variants:
    tests/exported/test_interoperability.py."""
    model = MODELS[name]().eval()
    given = inputs(*EXAMPLE, masked=True)
    exported = export(model, given)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    check_module(torch.export.load(file).module(), model, masked=True)
    assert type(exported.module()(**given)) is type(model(**given))
    nodes = [node for node in exported.graph.nodes if "val" in node.meta]
    assert not any(
        isinstance(value, torch.Tensor) and value.is_complex()
        for node in nodes
        for value in pytree.tree_leaves(node.meta["val"])
    )
    assert not any("brickwork" in str(node.target) for node in exported.graph.nodes)


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
