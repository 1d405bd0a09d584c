from __future__ import annotations

import pytest
import torch

from brickwork.assemblies.checkpoint import Rename, from_original, to_original

TABLE = (
    Rename("layers.{i}.gate_up", ("l.{i}.experts.{e}.gate", "l.{i}.experts.{e}.up")),
    Rename(("layers.{i}.q.weight", "layers.{i}.k.weight"), "l.{i}.qk.weight"),
    Rename("layers.{i}.mlp", "l.{i}.fc1", swap_halves=True),
    Rename("*", "model.*"),
)


def ours():
    return {
        "embed.weight": torch.randn(5, 3),
        "layers.0.gate_up": torch.randn(2, 8, 3),
        "layers.0.q.weight": torch.randn(4, 3),
        "layers.0.k.weight": torch.randn(2, 3),
        "layers.0.mlp": torch.randn(6, 3),
        "layers.10.mlp": torch.randn(2),
    }


def shapes(tensors):
    return {name: t.shape for name, t in tensors.items()}


def test_rules_mean_what_they_say():
    tensors = ours()
    theirs = to_original(tensors, TABLE, {"head.weight": "model.embed.weight"})
    assert torch.equal(theirs["l.0.experts.1.gate"], tensors["layers.0.gate_up"][1, :4])
    assert torch.equal(theirs["l.0.experts.1.up"], tensors["layers.0.gate_up"][1, 4:])
    q, k = tensors["layers.0.q.weight"], tensors["layers.0.k.weight"]
    assert torch.equal(theirs["l.0.qk.weight"], torch.cat([q, k]))
    mlp = tensors["layers.0.mlp"]
    assert torch.equal(theirs["l.0.fc1"], torch.cat([mlp[3:], mlp[:3]]))
    assert torch.equal(theirs["l.10.fc1"], tensors["layers.10.mlp"].flip(0))
    assert theirs["head.weight"] is theirs["model.embed.weight"]
    assert len(theirs) == 9


def test_renaming_is_exact_both_ways():
    tensors = ours()
    aliases = {"head.weight": "model.embed.weight"}
    theirs = to_original(tensors, TABLE, aliases)
    for dropped in ([], ["head.weight"], ["model.embed.weight"]):
        state = {k: v for k, v in theirs.items() if k not in dropped}
        back = from_original(state, shapes(tensors), TABLE, aliases)
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(back[name], tensor), name


def test_every_wrong_entry_is_named():
    tensors = ours()
    aliases = {"head.weight": "model.embed.weight"}
    state = to_original(tensors, TABLE, aliases)
    state["head.weight"] = state["head.weight"] + 1
    del state["l.0.experts.0.up"]
    state["stray"] = torch.zeros(1)
    state["l.0.fc1"] = torch.zeros(6, 4)
    state["l.10.fc1"] = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError) as caught:
        from_original(state, shapes(tensors), TABLE, aliases)
    message = str(caught.value)
    assert "head.weight and model.embed.weight must be one tensor, but they differ" in message
    assert "missing: l.0.experts.0.up" in message
    assert "unexpected: stray" in message
    assert "misshapen: l.0.fc1 is (6, 4), needs (6, 3)" in message
    assert "wrong dtype: l.10.fc1 is torch.int64" in message


def test_a_parameter_that_no_rule_names_is_an_error():
    with pytest.raises(ValueError, match="no rule of the rename table names b"):
        to_original({"b": torch.zeros(1)}, (Rename("a", "a"),))


def test_parts_of_one_parameter_must_have_one_dtype():
    tensors = ours()
    state = to_original(tensors, TABLE)
    state["l.0.experts.0.up"] = state["l.0.experts.0.up"].bfloat16()
    with pytest.raises(ValueError, match=r"mixed dtypes: l\.0\.experts\.0\.up is torch\.bfloat16"):
        from_original(state, shapes(tensors), TABLE)
    wide = from_original(state, shapes(tensors), TABLE, widen=True)
    assert torch.equal(wide["layers.0.gate_up"][1], tensors["layers.0.gate_up"][1])
    for wrong in (torch.zeros(5, 3, device="meta"), None, torch.zeros(5, 3).to(torch.float8_e5m2)):
        with pytest.raises(ValueError, match=r"(no values|wrong dtype): model\.embed\.weight"):
            from_original(state | {"model.embed.weight": wrong}, shapes(tensors), TABLE, widen=True)
