from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch

from brickwork.kernels import backend as backends
from brickwork.kernels.backend import (
    BACKENDS,
    OPS,
    BackendUnavailable,
    autocast_off,
    choose,
    compute_dtype,
    prefer,
    record_choices,
    unavailable,
)
from brickwork.kernels.doctor import diagnose
from brickwork.kernels.rms_norm import rms_norm


def yes() -> str | None:
    return None


def no() -> str | None:
    return "x is on the CPU"


def never() -> str | None:
    raise AssertionError("asked although it was not needed")


def test_auto_takes_the_first_that_can():
    assert choose("op", "auto") == "torch"
    assert choose("op", "auto", triton=yes, cpu=never) == "triton"
    assert choose("op", "auto", triton=no, cpu=yes) == "cpu"
    assert choose("op", "auto", triton=no, cpu=no) == "torch"


def test_a_named_backend_runs_or_says_why_not():
    assert choose("op", "torch", triton=never) == "torch"
    assert choose("op", "triton", cpu=never, triton=yes) == "triton"
    with pytest.raises(
        BackendUnavailable, match=r"^op: backend 'triton' cannot run .* on the CPU$"
    ):
        choose("op", "triton", triton=no, cpu=yes)
    with pytest.raises(BackendUnavailable, match=r"^op has no backend 'cpu'; it has .*'torch', "):
        choose("op", "cpu", triton=yes)
    for wrong in ("fast", "Torch", None):
        with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*, got "):
            choose("op", wrong, triton=yes)


def test_prefer_changes_auto_and_nothing_else():
    with prefer("cpu"):
        assert choose("op", "auto", triton=yes, cpu=yes) == "cpu"
        assert choose("op", "auto", triton=yes, cpu=no) == "triton"
        assert choose("op", "auto", triton=yes) == "triton"
        assert choose("op", "triton", triton=yes, cpu=yes) == "triton"
        with prefer("torch"):
            assert choose("op", "auto", triton=never) == "torch"
        assert choose("op", "auto", triton=yes, cpu=yes) == "cpu"
    assert choose("op", "auto", triton=yes, cpu=yes) == "triton"


def test_prefer_ends_with_an_error_too():
    with pytest.raises(KeyError), prefer("torch"):
        raise KeyError
    assert choose("op", "auto", triton=yes) == "triton"
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'auto'"), prefer("auto"):
        pass


def test_choice_is_traced_and_guarded():
    """D1 28: one graph, and a graph made under one preference is not used under another."""

    def function(x):
        return x + 1 if choose("op", "auto", triton=yes) == "triton" else x + 2

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    x = torch.zeros(1)
    assert compiled(x) == 1
    with prefer("torch"):
        assert compiled(x) == 2
    assert compiled(x) == 1


def test_choices_are_recorded_in_the_block_alone():
    choose("before", "torch")
    with record_choices() as outer:
        choose("one", "auto", triton=yes)
        with record_choices() as inner:
            choose("two", "torch")
        with pytest.raises(BackendUnavailable):
            choose("three", "cpu", cpu=no)
        choose("four", "auto", triton=no)
    choose("after", "torch")
    assert outer == [("one", "triton"), ("four", "torch")]
    assert inner == [("two", "torch")]


def test_a_compiled_program_chooses_when_it_is_compiled():
    """And is not compiled anew because somebody listens."""
    compiled = []

    def compile_it(graph, _):
        compiled.append(graph)
        return graph

    function = torch.compile(
        lambda x: x + (choose("op", "auto", triton=yes) == "triton"),
        fullgraph=True,
        backend=compile_it,
    )
    with record_choices() as choices:
        for _ in range(3):
            assert function(torch.zeros(1)) == 1
    assert choices == [("op", "triton")]
    function(torch.zeros(1))
    assert len(compiled) == 1


def test_unavailable_packages_keep_their_error(monkeypatch):
    monkeypatch.setattr(backends, "_availability", {})
    calls = []

    def broken(name):
        calls.append(name)
        raise OSError("undefined symbol")

    assert unavailable("torch") is None
    assert "ModuleNotFoundError" in unavailable("no_such_package_at_all")
    monkeypatch.setattr(importlib, "import_module", broken)
    for _ in range(2):
        assert unavailable("mamba_ssm") == "import mamba_ssm failed: OSError: undefined symbol"
    assert calls == ["mamba_ssm"]


def test_unavailable_is_a_constant_to_the_compiler():
    def function(x):
        return x + 1 if unavailable("torch") is None else x + 2

    x = torch.zeros(1)
    assert torch.compile(function, fullgraph=True, backend="eager")(x) == 1


def test_compute_dtype():
    half, single, double = (
        torch.zeros(1, dtype=d) for d in (torch.float16, torch.float32, torch.float64)
    )
    assert compute_dtype(half, single, None) == torch.float32
    assert compute_dtype(None, half, double) == torch.float64


def test_autocast_off():
    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with autocast_off(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with autocast_off(x.to("meta")):
        pass


def doctor(*arguments: str, before: str = "") -> str:
    code = f"{before}\nimport runpy, sys; sys.argv[1:] = {list(arguments)!r}\n"
    code += "runpy.run_module('brickwork.kernels.backend', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_doctor_speaks_to_programs():
    found = json.loads(doctor("--json"))
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"]["cpu"]["cores"] >= 1
    assert len(found["devices"]["cuda"]) == torch.cuda.device_count()
    assert set(found["ops"]) == set(OPS)
    assert all(set(row) == set(BACKENDS) for row in found["ops"].values())
    assert all(row["torch"] is None for row in found["ops"].values())


def test_the_doctor_speaks_to_people():
    page = doctor()
    for word in (*OPS, *BACKENDS, f"torch {torch.__version__}", "C++ compiler", "CUDA"):
        assert word in page
    assert max(map(len, page.splitlines())) < 200


def test_the_doctor_may_be_cut_short():
    command = f"{sys.executable} -m brickwork.kernels.backend --json"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | true"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_doctor_works_without_optional_packages():
    packages = ("triton", "mamba_ssm", "causal_conv1d", "transformers", "safetensors")
    absent = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))"
    found = json.loads(doctor("--json", before=absent))
    assert all(row["torch"] is None for row in found["ops"].values())
    assert all(row["triton"] for row in found["ops"].values())


def test_the_doctor_asks_the_backend_module(monkeypatch):
    module = type(sys)("brickwork.kernels.rms_norm_cpu")
    module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "_availability", {})
    assert diagnose()["ops"]["rms_norm"]["cpu"] is None
    module.unavailable_here = lambda: "no C++ compiler found"
    assert diagnose()["ops"]["rms_norm"]["cpu"] == "no C++ compiler found"
    assert diagnose()["ops"]["add_norm"]["cpu"] == "not written for this op"


def test_the_doctor_reports_a_package_that_does_not_import(monkeypatch):
    module = type(sys)("brickwork.kernels.rms_norm_mamba_ssm")
    module.__spec__ = importlib.util.spec_from_loader(module.__name__, loader=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "_availability", {"mamba_ssm": "import mamba_ssm failed: why"})
    assert diagnose()["ops"]["rms_norm"]["mamba_ssm"] == "import mamba_ssm failed: why"


def test_ops_check_the_backend_argument():
    with pytest.raises(BackendUnavailable, match="rms_norm has no backend 'grouped'"):
        rms_norm(torch.ones(2), torch.ones(2), backend="grouped")
