from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from brickwork.kernels import cpu_extension

SOURCE = '#include "cpu_vector.h"\nextern "C" int answer() { return 42; }\n'
USE = """
from pathlib import Path
from brickwork.kernels import cpu_extension
cpu_extension._HERE = Path({folder!r})
print(cpu_extension.unavailable("probe_cpu"))
print(cpu_extension.load("probe_cpu").answer())
"""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, cpu_extension._COMPILERS)), reason="no C++ compiler"
)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with one small kernel in place of the library's own, and empty caches."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "probe_cpu.cpp").write_text(SOURCE)
    shutil.copy(Path(cpu_extension.__file__).parent / "cpu_vector.h", folder)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(cpu_extension, "_HERE", folder)
    monkeypatch.setattr(cpu_extension, "_loaded", {})
    monkeypatch.setattr(cpu_extension, "_failed", {})
    monkeypatch.setattr(
        cpu_extension.tempfile, "tempdir", None
    )  # or TMPDIR would not be read again
    monkeypatch.setenv("BRICKWORK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.delenv("BRICKWORK_BUILD", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return folder


def compiler(tmp_path, text):
    """A program that stands in for the compiler; it notes each call in `calls`."""
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{text}\n')
    path.chmod(0o700)
    return str(path)


def calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


@needs_compiler
def test_builds_once_says_so_and_remembers(sources, tmp_path, monkeypatch, capfd):
    assert cpu_extension.load("probe_cpu").answer() == 42
    assert "compiling brickwork's CPU kernels" in capfd.readouterr().err
    assert cpu_extension.load("probe_cpu") is cpu_extension.load("probe_cpu")
    (library,) = (tmp_path / "cache").glob("*.so")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    monkeypatch.setattr(cpu_extension, "_loaded", {})
    monkeypatch.setenv("CXX", "no-such-compiler")  # not needed: it is in the cache
    assert cpu_extension.load("probe_cpu").answer() == 42
    assert capfd.readouterr().err == ""
    assert library.exists()


@needs_compiler
def test_two_processes_build_one_library(sources, tmp_path, monkeypatch):
    slow = f'sleep 3\nexec {cpu_extension._compiler()[0]} "$@"'  # so that both want to build
    monkeypatch.setenv("CXX", compiler(tmp_path, slow))
    program = [sys.executable, "-c", USE.format(folder=str(sources))]
    both = [
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [process.communicate(timeout=300) for process in both]
    assert [out.split() for out, _ in ends] == [["None", "42"]] * 2
    assert sum("compiling" in err for _, err in ends) == 1
    assert len(calls(tmp_path)) == 1
    names = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert names == [".lock", ".so"]


def test_name_follows_source_header_pytorch_and_cpu(sources, tmp_path, monkeypatch):
    names = {cpu_extension.library_path("probe_cpu", tmp_path)}
    (sources / "probe_cpu.cpp").write_text(SOURCE + "\n")
    names.add(cpu_extension.library_path("probe_cpu", tmp_path))
    (sources / "cpu_vector.h").write_text("\n")
    names.add(cpu_extension.library_path("probe_cpu", tmp_path))
    monkeypatch.setattr(cpu_extension.torch, "__version__", "0.0")
    names.add(cpu_extension.library_path("probe_cpu", tmp_path))
    monkeypatch.setattr(cpu_extension, "_cpu", lambda: "another")
    names.add(cpu_extension.library_path("probe_cpu", tmp_path))
    assert len(names) == 5


def test_building_forbidden(sources, monkeypatch):
    monkeypatch.setenv("BRICKWORK_BUILD", "0")
    reason = cpu_extension.unavailable("probe_cpu")
    assert reason == "not built yet, and BRICKWORK_BUILD=0 forbids building"
    with pytest.raises(cpu_extension.ExtensionUnavailable, match="BRICKWORK_BUILD=0"):
        cpu_extension.load("probe_cpu")


def test_no_compiler(sources, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O0")
    reason = cpu_extension.unavailable("probe_cpu")
    assert reason == "no C++ compiler found (looked for CXX=no-such-compiler -O0)"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(sources))
    monkeypatch.setattr(cpu_extension, "_failed", {})
    reason = cpu_extension.unavailable("probe_cpu")
    assert reason == "no C++ compiler found (looked for c++, g++, clang++)"


def test_failed_build_is_remembered_with_its_reason(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo 'no space left' >&2; exit 1"))
    reason = cpu_extension.unavailable("probe_cpu")
    assert reason is not None
    assert reason.endswith("cannot compile probe_cpu.cpp: no space left")
    assert len(calls(tmp_path)) == len(cpu_extension._TUNING)
    assert cpu_extension.unavailable("probe_cpu") == reason
    assert len(calls(tmp_path)) == len(cpu_extension._TUNING)
    assert not list((tmp_path / "cache").glob("*.tmp"))
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_compiler_that_hangs_is_given_up(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_extension, "_SECONDS", 0.2)
    monkeypatch.setenv("CXX", compiler(tmp_path, "exec sleep 60"))
    assert "timed out" in str(cpu_extension.unavailable("probe_cpu"))


@needs_compiler
def test_a_compiler_without_native_tuning(sources, tmp_path, monkeypatch):
    real = cpu_extension._compiler()[0]
    refuse = f'case "$*" in *=native*) exit 1;; esac\nexec {real} "$@"'
    monkeypatch.setenv("CXX", compiler(tmp_path, refuse))
    assert cpu_extension.load("probe_cpu").answer() == 42
    assert len(calls(tmp_path)) == 3


@needs_compiler
def test_a_damaged_library_is_built_again(sources, tmp_path):
    (tmp_path / "cache").mkdir()
    path = cpu_extension.library_path("probe_cpu", tmp_path / "cache")
    path.write_bytes(b"\x7fELF cut short")
    assert cpu_extension.load("probe_cpu").answer() == 42


@needs_compiler
def test_a_cache_that_cannot_be_written(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BRICKWORK_CACHE", str(tmp_path / "file" / "cache"))
    assert cpu_extension.load("probe_cpu").answer() == 42
    (folder,) = (tmp_path / "temporary").iterdir()
    assert folder.name == f"brickwork-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(cpu_extension, "_loaded", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu_extension.load("probe_cpu").answer() == 42


@needs_compiler
def test_a_temporary_folder_open_to_others_is_not_trusted(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BRICKWORK_CACHE", str(tmp_path / "file" / "cache"))
    shared = tmp_path / "temporary" / f"brickwork-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    cpu_extension.library_path("probe_cpu", shared).write_bytes(b"planted")
    assert cpu_extension.load("probe_cpu").answer() == 42
    assert [path.read_bytes() for path in shared.iterdir()] == [b"planted"]


def test_windows_is_refused(sources, monkeypatch):
    monkeypatch.setattr(cpu_extension.sys, "platform", "win32")
    assert cpu_extension.unavailable("probe_cpu") == "compiled kernels are not written for Windows"


def test_cache_is_where_users_expect_it(monkeypatch):
    monkeypatch.delenv("BRICKWORK_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cpu_extension.cache_folders()[0] == Path("/home/someone/.cache/brickwork")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cpu_extension.cache_folders()[0] == Path("/elsewhere/brickwork")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@needs_compiler
def test_ahead_of_time(sources, tmp_path):
    """What `make ext` runs, on the real kernels."""
    done = run("-m", "brickwork.kernels.cpu_extension", BRICKWORK_CACHE=str(tmp_path / "ext"))
    assert done.returncode == 0, done.stderr
    (library,) = (tmp_path / "ext").glob("selective_scan_cpu-*.so")
    assert f"selective_scan_cpu: {library}" in done.stdout
    without = {"BRICKWORK_CACHE": str(tmp_path / "none"), "CXX": "no-such-compiler"}
    done = run("-m", "brickwork.kernels.cpu_extension", **without)
    assert done.returncode == 1
    assert "selective_scan_cpu: no C++ compiler found" in done.stdout


def test_without_a_compiler_auto_is_quiet_and_the_doctor_says_why(sources, tmp_path):
    without = {"BRICKWORK_CACHE": str(tmp_path / "none"), "CXX": "no-such-compiler"}
    program = """
import torch
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.selective_scan import selective_scan
one = torch.ones(1, 3, 1)
arguments = one, one, torch.zeros(1, 1), one, one
print(selective_scan(*arguments).y.flatten().tolist())
try:
    selective_scan(*arguments, backend="cpu")
except BackendUnavailable as error:
    print(error)
"""
    done = run("-W", "error", "-c", program, **without)
    assert done.stderr == ""
    reason = "no C++ compiler found (looked for CXX=no-such-compiler)"
    values, said = done.stdout.splitlines()
    assert values == "[1.0, 2.0, 3.0]"
    assert said == f"selective_scan: backend 'cpu' cannot run here: {reason}"
    doctor = json.loads(run("-m", "brickwork.kernels.backend", "--json", **without).stdout)
    assert doctor["ops"]["selective_scan"]["cpu"] == reason


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="glibc 2.33 or later is not there",
)
@needs_compiler
def test_glibc_keeps_what_a_pass_frees_once_a_kernel_is_loaded():
    """A block of 24 MiB then comes from memory that it goes back to, not from the system."""
    program = """
import ctypes, sys
from brickwork.kernels import cpu_extension

if sys.argv[1:] == ["load"]:
    cpu_extension.load("causal_conv1d_cpu")
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
fields = [(name, ctypes.c_size_t) for name in names]
c.mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": fields})
before = c.mallinfo2().hblks
assert c.malloc(ctypes.c_size_t(24 << 20))
print(c.mallinfo2().hblks - before)
"""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    mapped = []
    for arguments in ([], ["load"]):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, env=ours, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        mapped.append(int(done.stdout))
    assert mapped == [1, 0]
