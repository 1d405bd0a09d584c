from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from brickwork.assemblies.checkpoint_files import load_config, open_checkpoint, save_checkpoint


def ours():
    return {
        "embed.weight": torch.randn(5, 3),
        "layers.0.gate_up": torch.randn(2, 8, 3),
        "layers.0.q.weight": torch.randn(4, 3),
        "layers.0.k.weight": torch.randn(2, 3),
        "layers.10.mlp": torch.randn(2),
    }


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


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [10**9, 100])
@pytest.mark.parametrize("after", [10**9, 100])
def test_a_save_cut_at_any_rename_leaves_the_earlier_checkpoint(
    tmp_path, monkeypatch, before, after, error
):
    first = ours()
    save_checkpoint(tmp_path, {"n": 1}, first, max_shard_bytes=before)
    files = sorted(p.name for p in tmp_path.iterdir())
    replace = type(tmp_path).replace
    for cut in range(100):
        calls = []

        def fails(path, target, cut=cut, calls=calls):
            calls.append(target)
            if len(calls) == cut + 1:
                raise error("cut")
            return replace(path, target)

        monkeypatch.setattr(type(tmp_path), "replace", fails)
        try:
            save_checkpoint(tmp_path, {"n": 2}, ours(), max_shard_bytes=after)
        except error:
            monkeypatch.undo()
            assert load_config(tmp_path) == {"n": 1}
            found = read(tmp_path)
            assert all(torch.equal(found[name], tensor) for name, tensor in first.items())
            assert sorted(p.name for p in tmp_path.iterdir()) == files
        else:
            break
    assert cut >= 4
    monkeypatch.undo()
    assert load_config(tmp_path) == {"n": 2}
    assert not list(tmp_path.glob(".*"))


def test_old_leftovers_of_a_killed_save_are_swept(tmp_path):
    old = tmp_path / ".model.safetensors.0123456789abcdef.tmp"
    fresh = tmp_path / ".model.safetensors.fedcba9876543210.tmp"
    other = tmp_path / ".notes.0123456789abcdef.tmp"
    for path in (old, fresh, other):
        path.write_text("x")
    for path in (old, other):
        os.utime(path, (0, 0))
    save_checkpoint(tmp_path, {}, ours())
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()


def test_files_are_as_readable_as_any(tmp_path):
    save_checkpoint(tmp_path, {}, ours())
    modes = {(tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    (tmp_path / "plain").write_text("")
    assert modes == {(tmp_path / "plain").stat().st_mode}


def test_two_processes_saving_at_once_leave_one_whole_checkpoint(tmp_path):
    code = (
        "import sys, torch; from brickwork.assemblies.checkpoint_files import save_checkpoint\n"
        "for i in range(20):\n"
        "    n = float(sys.argv[2]) * 100 + i\n"
        "    save_checkpoint(sys.argv[1], {'n': n}, {k: torch.full((9,), n) for k in 'abc'},"
        " max_shard_bytes=40)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen([*command, str(i)]) for i in (1, 2)]
    assert [process.wait() for process in running] == [0, 0]
    n = load_config(tmp_path)["n"]
    found = read(tmp_path)
    assert all(torch.equal(found[name], torch.full((9,), n)) for name in "abc")


def test_weights_of_another_save_than_the_config_are_refused(tmp_path):
    save_checkpoint(tmp_path / "a", {}, ours())
    save_checkpoint(tmp_path / "b", {}, ours())
    (tmp_path / "a" / "config.json").replace(tmp_path / "b" / "config.json")
    with pytest.raises(ValueError, match="come from different saves"):
        read(tmp_path / "b")


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
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist \(a local folder"):
        load_config(tmp_path)
    (tmp_path / "step-000010").mkdir()
    (tmp_path / "step-000010" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="one of its folders may be meant: step-000010"):
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
