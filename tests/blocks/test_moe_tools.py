from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close
from torch import nn

from brickwork.assemblies import (
    LCPLM,
    LCPLMConfig,
    MiniLLaDA,
    MiniLLaDAConfig,
    Rish,
    RishConfig,
)
from brickwork.blocks import (
    MoE,
    MoEOutput,
    SigmoidRouter,
    SwiGLU,
    adapter_targets,
    quantization_skip,
    router_statistics,
)

RISH = {
    **{"vocab_size": 17, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_experts": 6, "num_experts_per_tok": 2},
    **{"pad_token_id": None, "eos_token_id": None},
}


def output(logits, top_k):
    indices = logits.softmax(-1).topk(top_k).indices
    return MoEOutput(torch.zeros(0), logits, indices, torch.zeros(0))


@given(
    num_experts=st.sampled_from([1, 2, 5]),
    top_k=st.sampled_from([1, 2]),
    layers=st.sampled_from([1, 3]),
    padded=st.booleans(),
)
def test_is_the_definition(num_experts, top_k, layers, padded):
    """Counted token by token; D4 66: padding may hold anything and counts for nothing."""
    top_k = min(top_k, num_experts)
    mask = torch.rand(2, 7) < 0.6 if padded else torch.ones(2, 7, dtype=torch.bool)
    mask[0, 0] = True
    outputs = [output(torch.randn(2, 7, num_experts), top_k) for _ in range(layers)]
    clean = [(o.router_logits[mask], o.indices[mask]) for o in outputs]
    if padded:
        for o in outputs:
            o.router_logits[~mask] = math.nan
    found = router_statistics(outputs, mask=mask if padded else None)
    assert found.counts.shape == found.load.shape == (layers, num_experts)
    for i, (logits, indices) in enumerate(clean):
        counts = [0] * num_experts
        for e in indices.flatten().tolist():
            counts[e] += 1
        total = sum(counts)
        load = [count / total for count in counts]
        spread = -sum(p * math.log(p) for p in load if p)
        spread = spread / math.log(num_experts) if num_experts > 1 else 1.0
        p = logits.double().softmax(-1)
        assert found.counts[i].tolist() == counts
        assert_close(found.load[i], torch.tensor(load), terms=4)
        assert_close(found.load_entropy[i], torch.tensor(spread), terms=8, scale=1.0)
        assert_close(
            found.router_entropy[i], (-(p * p.log()).sum(-1).mean()).float(), terms=60, scale=2.0
        )
        violation = torch.tensor(max(load) * num_experts - 1)
        assert_close(found.max_violation[i], violation, terms=4, scale=float(num_experts))
    assert found.dropped == 0


def test_extremes():
    """Balance, collapse, and nothing real."""
    even = MoEOutput(None, torch.zeros(4, 4), torch.arange(4)[:, None], None)
    found = router_statistics(even)
    assert found.load_entropy.item() == pytest.approx(1)
    assert found.max_violation.item() == pytest.approx(0, abs=1e-6)
    assert found.router_entropy.item() == pytest.approx(math.log(4))
    collapsed = MoEOutput(None, torch.zeros(9, 4), torch.tensor([[2, 1]] * 9), None)
    found = router_statistics([even, collapsed]).as_dict("moe.")
    assert found["moe.max_violation"] == pytest.approx(4 / 2 - 1)
    assert found["moe.load_entropy"] == pytest.approx((1 + 0.5) / 2)
    assert found["moe.dropped"] == 0
    assert all(type(value) is float for value in found.values())
    nothing = router_statistics(even, mask=torch.zeros(4))
    for value in (nothing.counts, nothing.load, *nothing.as_dict().values()):
        assert not torch.as_tensor(value).any()


def test_of_models_and_blocks():
    """One MoEOutput, a list, and what Rish returns; any rule; no graph."""
    model, ids = Rish(RishConfig(**RISH)), torch.randint(17, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    out = model(ids, attention_mask=mask)
    found = router_statistics(out, mask=mask)
    assert found.counts.sum(-1).tolist() == [16, 16]
    assert not found.router_entropy.requires_grad
    outputs = [MoEOutput(None, *pair, None) for pair in zip(out.router_logits, out.indices)]
    again = router_statistics(outputs, mask=mask)
    assert torch.equal(found.counts, again.counts)
    assert torch.equal(router_statistics(outputs[1], mask=mask).counts[0], found.counts[1])
    router = SigmoidRouter(8, num_experts=4, num_groups=2, top_groups=1)
    moe = MoE(8, hidden_dim=4, num_experts=4, top_k=2, router=router)
    counts = router_statistics(moe(torch.randn(9, 8))).counts[0]
    assert counts[0] == counts[1]
    assert counts.sum() == 18
    assert router_statistics(moe(torch.randn(0, 8))).load.sum() == 0
    assert router_statistics(moe.double()(torch.randn(3, 8).double())).load.dtype == torch.float64


def test_statistics_errors():
    good = output(torch.randn(3, 4), 2)
    with pytest.raises(ValueError, match="router_logits must hold at least one layer, got none"):
        router_statistics([])
    with pytest.raises(ValueError, match=r"with one E, got \(3, 5\) beside \(3, 4\)"):
        router_statistics([good, output(torch.randn(3, 5), 2)])
    with pytest.raises(ValueError, match="mask must have the leading shape"):
        router_statistics(good, mask=torch.ones(4))
    with pytest.raises(ValueError, match=r"indices must have the leading shape .* got \(2, 2\)"):
        router_statistics(good._replace(indices=good.indices[:2]))


def models():
    mamba = {"d_model": 8, "n_layer": 2}
    return {
        "rish": Rish(RishConfig(**RISH)),
        "tied": Rish(RishConfig(**RISH, tie_word_embeddings=True)),
        "mini_llada": MiniLLaDA(
            MiniLLaDAConfig(vocab_size=17, dim=8, depth=2, head=2, intermediate_size=12)
        ),
        "mamba1": LCPLM(LCPLMConfig(**mamba)),
        "mamba2": LCPLM(LCPLMConfig(**mamba, ssm_cfg={"layer": "Mamba2", "headdim": 4})),
        "parts": nn.Sequential(
            MoE(
                6, hidden_dim=5, num_experts=4, top_k=2, shared=SwiGLU(6, hidden_dim=3),
                selection_bias=True, router=nn.Sequential(nn.Linear(6, 4)),
            )
        ),
    }  # fmt: skip


EXPECTED = {
    "rish": (
        [f"layers.{i}.attention.{p}_proj" for i in range(2) for p in "qkvo"],
        [f"layers.{i}.moe.{p}" for i in range(2) for p in ("gate_up", "down")],
        {"lm_head", "norm", "layers.0.moe.router", "layers.1.attention.q_norm"},
    ),
    "tied": (
        [f"layers.{i}.attention.{p}_proj" for i in range(2) for p in "qkvo"],
        [f"layers.{i}.moe.{p}" for i in range(2) for p in ("gate_up", "down")],
        {"norm", "layers.0.moe.router"},
    ),
    "parts": (
        ["0.shared.gate_up", "0.shared.down"],
        ["0.gate_up", "0.down"],
        {"0.router", "0.router.0", "0.selection_bias"},
    ),
}


def test_names_are_those_of_the_model():
    """G2: each exists, each linear layer is named once: adapted, or kept precise."""
    for kind, model in models().items():
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        targets, skip = adapter_targets(model), quantization_skip(model)
        assert all(isinstance(modules[name], nn.Linear) for name in targets.modules), kind
        assert all(parameters[name].dim() == 3 for name in targets.parameters), kind
        assert set(skip) <= set(modules), kind
        assert len(set(skip)) == len(skip), kind
        assert not set(targets.modules) & set(skip), kind
        linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
        assert linear == set(targets.modules) | (linear & set(skip)), kind
        if kind in EXPECTED:
            wanted_modules, wanted_parameters, kept = EXPECTED[kind]
            assert targets.modules == wanted_modules, kind
            assert targets.parameters == wanted_parameters, kind
            assert kept <= set(skip), kind


def test_what_mambas_keep():
    """Step projections and norms; in_proj and out_proj may be adapted and quantised."""
    for kind in ("mamba1", "mamba2"):
        model = models()[kind]
        modules = dict(model.named_modules())
        skip, targets = quantization_skip(model), adapter_targets(model).modules
        assert "lm_head" in skip
        owners = {name for name, m in modules.items() if type(m).__name__ == "StepProjection"}
        assert owners <= set(skip)
        assert bool(owners) == (kind == "mamba1")
        assert any(name.endswith("norm") for name in skip)
        assert sum(name.endswith("in_proj") for name in targets) == 2  # tied: once a layer
        assert not any(name.endswith(("in_proj", "out_proj")) for name in skip)


def test_targets_after_unstacking():
    moe = MoE(6, hidden_dim=5, num_experts=2, top_k=1).unstack()
    names = [f"experts.{e}.{part}" for e in range(2) for part in ("gate_up", "down")]
    assert adapter_targets(moe) == (names, [])
    assert quantization_skip(moe) == ["router"]


def test_every_adapter_target_reaches_the_output():
    """A forward that read a layer's weight past the layer would ignore an adapter around it."""
    for kind, model in models().items():
        if kind == "parts":
            run = lambda m: m(torch.ones(3, 6)).y  # noqa: E731
        else:
            run = lambda m: m(torch.tensor([[5, 6, 7]])).logits  # noqa: E731
        called = []
        for name in adapter_targets(model).modules:
            model.get_submodule(name).register_forward_hook(
                lambda module, args, out, name=name, seen=called: seen.append(name)
            )
        run(model.eval())
        assert set(called) == set(adapter_targets(model).modules), kind
