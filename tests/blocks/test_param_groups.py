from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from brickwork.blocks import AddNorm, BiMamba, Mamba2, decay_parameter_groups

KEPT = (".A_log", ".D", ".dt_bias", ".bias", "norm.weight", "norm2.weight")


def model():
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 8),
            "bi": BiMamba(8, bias=True),
            "two": Mamba2(8, d_state=4, head_dim=4, D_has_hdim=True),
            "norm2": AddNorm(8, kind="layer"),
        }
    )


@pytest.mark.parametrize(
    "treat",
    [
        lambda m: m,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.bfloat16(),
        lambda m: (m.load_state_dict(m.state_dict(), assign=True), m)[1],
    ],
)
def test_groups(treat):
    """B6: disjoint, every parameter once, ties once, stable after reloading and copying."""
    module = treat(model())
    decayed, kept = decay_parameter_groups(module, weight_decay=0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    names = decayed["param_names"] + kept["param_names"]
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    ids = [id(p) for group in (decayed, kept) for p in group["params"]]
    assert len(set(ids)) == len(ids)
    assert all(name.endswith(KEPT) for name in kept["param_names"])
    assert not any(name.endswith(KEPT) for name in decayed["param_names"])
    assert "bi.mamba_fwd.A_log" in kept["param_names"]
    assert "bi.mamba_rev.dt_proj.bias" in kept["param_names"]
    assert "embedding.weight" in decayed["param_names"]


def test_an_optimiser_takes_them():
    module = model()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    groups = decay_parameter_groups(module, weight_decay=0.5)
    optimiser = torch.optim.AdamW(groups, lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, parameter in module.named_parameters():
        if name in groups[0]["param_names"]:
            torch.testing.assert_close(parameter, before[name] * 0.95)
        else:
            assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), True])
def test_errors(value):
    with pytest.raises(ValueError, match="weight_decay must be finite and at least 0"):
        decay_parameter_groups(nn.Linear(2, 2), weight_decay=value)
