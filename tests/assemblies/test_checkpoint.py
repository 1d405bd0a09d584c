from __future__ import annotations

import errno
import json
import struct

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from brickwork.assemblies.checkpoint import (
    Rename,
    from_original,
    load_config,
    open_checkpoint,
    save_checkpoint,
    to_original,
)

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


def read(folder):
    with open_checkpoint(folder) as state:
        return dict(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("most", [10**9, 100, 1])
def test_files_round_trip(tmp_path, dtype, most):
    state = {name: t.to(dtype) for name, t in ours().items()}
    save_checkpoint(tmp_path, {"a": 1}, state, max_shard_bytes=most)
    assert load_config(tmp_path) == {"a": 1}
    found = read(tmp_path)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)
    assert not list(tmp_path.glob(".*")), "temporary files stayed behind"


def test_saving_over_another_layout_leaves_no_stale_file(tmp_path):
    state = ours()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model_card.safetensors").write_text("the user's")
    for most in (1, 10**9, 100):
        save_checkpoint(tmp_path, {}, state, max_shard_bytes=most)
        assert read(tmp_path).keys() == state.keys()
    assert (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "model_card.safetensors").exists()


@pytest.mark.parametrize("most", [10**9, 1])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, most, failing):
    before = ours()
    save_checkpoint(tmp_path, {"n": 1}, before, max_shard_bytes=most)
    names = sorted(p.name for p in tmp_path.iterdir())
    calls = []
    write = safetensors.torch.save_file if failing == 0 else type(tmp_path).write_text

    def full(*args, **kwargs):
        calls.append(args)
        if failing == 0 and len(calls) < 2 and most == 1:
            return write(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == 0:
        monkeypatch.setattr(safetensors.torch, "save_file", full)
    else:
        monkeypatch.setattr(type(tmp_path), "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, {"n": 2}, ours(), max_shard_bytes=most)
    monkeypatch.undo()
    assert calls
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert load_config(tmp_path) == {"n": 1}
    found = read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_a_really_full_disk_is_an_os_error(tmp_path):
    target = tmp_path / "full"
    target.mkdir()
    (target / "config.json").symlink_to("/dev/full")
    with open("/dev/full", "w") as full, pytest.raises(OSError):
        full.write("x" * 10**6)
    save_checkpoint(target, {"n": 1}, ours())
    assert load_config(target) == {"n": 1}


def test_tied_and_viewed_tensors_can_be_saved(tmp_path):
    base = torch.randn(6, 3)
    save_checkpoint(tmp_path, {}, {"a": base[:3], "b": base[3:], "c": base.t()})
    assert torch.equal(read(tmp_path)["b"], base[3:])
    assert torch.equal(read(tmp_path)["c"], base.t())


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    save_checkpoint(tmp_path, {}, ours())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt"):
        read(tmp_path)


def test_a_tampered_header_is_named(tmp_path):
    save_checkpoint(tmp_path, {}, ours())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    path.write_bytes(data[:8] + b"x" * size + data[8 + size :])
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt"):
        read(tmp_path)


def test_shards_that_do_not_belong_together_are_refused(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    state = ours()
    for folder in (first, second):
        save_checkpoint(folder, {}, state, max_shard_bytes=100)
    shard = sorted(first.glob("model-*.safetensors"))[0]
    shard.write_bytes((second / shard.name).read_bytes())
    with pytest.raises(ValueError, match="come from different saves"):
        read(first)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        read(first)


def test_an_index_that_lies_is_refused(tmp_path):
    save_checkpoint(tmp_path, {}, ours(), max_shard_bytes=100)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00001.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00001"):
        read(tmp_path)
    index["weight_map"]["ghost"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"differ in .*ghost"):
        read(tmp_path)
    for broken in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}'):
        path.write_text(broken)
        with pytest.raises((ValueError, FileNotFoundError), match=r"index\.json"):
            read(tmp_path)


def test_foreign_shards_without_our_save_id_load(tmp_path):
    state = ours()
    half = dict(list(state.items())[:3])
    rest = dict(list(state.items())[3:])
    safetensors.torch.save_file(half, tmp_path / "one.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(rest, tmp_path / "two.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(half, "one.safetensors") | dict.fromkeys(rest, "two.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read(tmp_path).keys() == state.keys()


def test_missing_files_and_bad_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    for text in ("[1]", "{", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"config\.json"):
            load_config(tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes must be positive, got 0"):
        save_checkpoint(tmp_path, {}, {}, max_shard_bytes=0)


def test_files_carry_the_format_that_transformers_reads(tmp_path):
    save_checkpoint(tmp_path, {}, ours())
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        assert file.metadata()["format"] == "pt"
