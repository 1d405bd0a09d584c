"""The built distributions: what is in them, what they ask for, and that they run by themselves."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("blocks", "kernels", "assemblies")
PACKED = (*ROOMS, "setup.cfg", "pyproject.toml", "LICENSE", "README.md")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the source distribution, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in PACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    (source / "kernels" / "probe.cpp").write_text("// compiled kernels travel as source\n")
    # --no-isolation: what builds is installed already, and nothing is fetched.
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("brickwork-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_every_file_of_the_rooms(wheel):
    wanted = {
        f"brickwork/{room}/{path.name}"
        for room in ROOMS
        for path in (ROOT / room).iterdir()
        if path.suffix in (".py", ".cpp", ".h") or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"brickwork/{room}/py.typed" for room in ROOMS} <= wanted
    assert {n for n in names if ".dist-info/" not in n} == {*wanted, "brickwork/kernels/probe.cpp"}
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_source_distribution_holds_licence_and_readme(built):
    (path,) = built.glob("brickwork-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"} <= names
    assert {"kernels/backend.py", "kernels/py.typed", "kernels/probe.cpp"} <= names


def test_metadata(metadata):
    assert metadata["Name"] == "brickwork"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == {
        *("train", "hf", "onnx", "mamba", "test", "bench", "docs", "dev")
    }
    assert metadata.get_payload().startswith("# brickwork")


def test_no_requirement_has_an_upper_bound(metadata):
    requirements = metadata.get_all("Requires-Dist")
    hard = {r for r in requirements if "extra ==" not in r}
    assert {re.split(r"[><=\[; ]", r)[0] for r in hard} == {"torch", "einops"}
    for requirement in requirements:
        assert not re.search(r"<|==(?! *[\"'])|~=|!=", requirement.partition(";")[0]), requirement


def test_wheel_runs_in_an_environment_of_its_own(wheel, tmp_path):
    """A new environment gets the wheel alone; torch and einops come from this one."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(
        sysconfig.get_path("purelib", "venv", vars={"base": str(home), "platbase": str(home)})
    )
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True)
    # A path file adds the folder but runs none of its path files: not this editable install.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = """
import torch, brickwork.blocks, brickwork.kernels.backend
norm = brickwork.blocks.RMSNorm(2, eps=0.0)
torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 12.5**0.5)
print(brickwork.blocks.__file__)
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [python, "-W", "error", "-c", code],
        cwd=elsewhere,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)
