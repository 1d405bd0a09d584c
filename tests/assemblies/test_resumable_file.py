from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from brickwork.assemblies import resumable_file as module
from brickwork.assemblies.resumable_file import resumable_file
from brickwork.assemblies.safetensors_layout import Layout, read_settings

TENSORS = {
    "bytes": (torch.uint8, (5,)),
    "half": (torch.bfloat16, (4, 3)),
    "rows": (torch.float32, (4, 2)),
    "counts": (torch.int64, (4,)),
    "none": (torch.float64, (0, 7)),
}
VALUES = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "half": torch.arange(12.0).view(4, 3).bfloat16(),
    "rows": torch.arange(8.0).view(4, 2) / 3,
    "counts": torch.arange(4) - 2,
    "none": torch.zeros(0, 7, dtype=torch.float64),
}
NAMES = ["f.safetensors", "f.safetensors.partial", "f.safetensors.partial.done"]


def layout(**settings):
    return Layout(TENSORS, settings or {"of": [1, "é"]})


def fill(path, *, resume=False, overwrite=False, at=layout(), each=lambda: None):  # noqa: B008
    """The steps that were not done before, which are done now; None if all was."""
    with resumable_file(path, at, resume=resume, overwrite=overwrite) as file:
        if file is None:
            return None
        file.write("bytes", 0, VALUES["bytes"])
        steps = [step for step in range(4) if step not in file.done]
        for step in steps:
            for name in ("half", "rows", "counts"):
                file.write(name, step, VALUES[name][step : step + 1])
                each()
            file.finish_step(step)
            each()
        return steps


def stop(path):
    """Leave a run after two steps and a half."""
    left = [1] * 10 + [0]
    with pytest.raises(ZeroDivisionError):
        fill(path, each=lambda: 1 / left.pop(0))


def assert_whole(path):
    found = load_file(path)
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert os.listdir(path.parent) == [path.name]


def test_safetensors_reads_what_is_written(tmp_path):
    path = tmp_path / NAMES[0]
    assert fill(path) == [0, 1, 2, 3]
    assert_whole(path)
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata().keys() == {"format", "settings"}
    assert read_settings(path) == {"of": [1, "é"]}


def test_rows_may_be_strided_and_of_another_dtype(tmp_path):
    wanted = torch.arange(8.0).view(2, 4).T
    with resumable_file(tmp_path / "f", layout(), resume=False, overwrite=False) as file:
        for step in range(4):
            file.write("rows", step, wanted[step : step + 1].double())
    assert torch.equal(load_file(tmp_path / "f")["rows"], wanted)


def test_whenever_it_is_killed_it_goes_on(tmp_path, monkeypatch):
    """What is on the disk at every moment is what a kill at that moment leaves."""
    path = tmp_path / "run" / NAMES[0]
    path.parent.mkdir()
    left: list[Path] = []

    def snapshot():
        left.append(shutil.copytree(path.parent, tmp_path / f"killed{len(left)}"))

    def and_before_and_after(function):
        def call(*args, **options):
            snapshot()
            result = function(*args, **options)
            snapshot()
            return result

        return call

    monkeypatch.setattr(module, "_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", and_before_and_after(os.fsync))
        patch.setattr(Path, "replace", and_before_and_after(Path.replace))
        fill(path, each=snapshot)
    assert len(left) > 30
    seen = set()
    for folder in left:
        files = sorted(os.listdir(folder))
        journal = folder / NAMES[2]
        lines = journal.read_bytes().split(b"\n") if journal.exists() else []
        done = {int(line) for line in lines[1:-1]}
        steps = fill(folder / NAMES[0], resume=True)
        if NAMES[0] in files:
            assert steps is None
        else:
            assert steps == [step for step in range(4) if step not in done]
            seen.add(len(steps))
        assert_whole(folder / NAMES[0])
    assert seen == {0, 1, 2, 3, 4}


def test_a_torn_journal(tmp_path):
    path = tmp_path / NAMES[0]
    stop(path)
    journal = tmp_path / NAMES[2]
    text, data = journal.read_bytes(), (tmp_path / NAMES[1]).read_bytes()
    begin = text.index(b"\n")
    for length in [1, begin // 2, *range(begin - 1, len(text) + 1)]:
        (tmp_path / NAMES[1]).write_bytes(data)
        journal.write_bytes(text[:length])
        done = max(0, text[:length].count(b"\n") - 1)
        assert fill(path, resume=True) == list(range(done, 4))
        assert_whole(path)
        path.unlink()


def test_what_stands_there_is_not_replaced_unasked(tmp_path):
    path = tmp_path / NAMES[0]
    stop(path)
    assert sorted(os.listdir(tmp_path)) == NAMES[1:]
    with pytest.raises(ValueError, match=r"is unfinished: resume \(--resume\) or --overwrite it"):
        fill(path)
    with pytest.raises(ValueError, match=r"begun with of = \[1, 'é'\], not 2: a resumed run"):
        fill(path, resume=True, at=layout(of=2))
    assert fill(path, overwrite=True) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"exists: resume \(--resume\) or --overwrite it"):
        fill(path)
    with pytest.raises(ValueError, match=r"begun with more = None, not 3"):
        fill(path, resume=True, at=layout(of=[1, "é"], more=3))
    assert_whole(path)
    assert fill(path, resume=True) is None
    assert fill(path, overwrite=True, at=layout(of=2)) == [0, 1, 2, 3]
    assert_whole(path)


def test_the_earlier_file_stays_until_its_successor_is_whole(tmp_path):
    path = tmp_path / NAMES[0]
    fill(path)
    with pytest.raises(ZeroDivisionError):
        fill(path, overwrite=True, at=layout(of=2), each=lambda: 1 / 0)
    assert read_settings(path) == {"of": [1, "é"]}
    assert fill(path, resume=True, at=layout(of=2)) == [0, 1, 2, 3]
    assert read_settings(path) == {"of": 2}
    assert_whole(path)


def test_another_file_or_a_damaged_one(tmp_path):
    path = tmp_path / NAMES[0]
    for content in (b"", b"a text, and a longer one than eight bytes", b"\2" + b"\0" * 7 + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a file of embeddings"):
            fill(path, resume=True)
        assert path.read_bytes() == content
    path.unlink()
    stop(path)
    os.truncate(tmp_path / NAMES[1], 300)
    with pytest.raises(ValueError, match="is damaged: overwrite"):
        fill(path, resume=True)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / NAMES[1])


def test_one_program_at_a_time(tmp_path):
    path = tmp_path / NAMES[0]

    def another():
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match="another program is writing"):
                fill(path, **options)

    assert fill(path, each=another) == [0, 1, 2, 3]
    assert_whole(path)


@pytest.mark.parametrize(("syncs", "missing"), [(4, [1, 2, 3]), (5, [2, 3])])
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path, monkeypatch, syncs, missing):
    path = tmp_path / NAMES[0]
    real, calls = os.fsync, iter([None] * syncs + [OSError(28, "No space left on device")])

    def full(descriptor):
        if error := next(calls, None):
            raise error
        real(descriptor)

    monkeypatch.setattr(module, "_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            fill(path)
    assert fill(path, resume=True) == missing
    assert_whole(path)
    with pytest.raises(FileNotFoundError):
        fill(tmp_path / "no folder" / "f")
