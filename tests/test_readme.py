"""The README says nothing that does not run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from brickwork.kernels.backend import OPS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_python_snippets_run_one_after_the_other(tmp_path):
    """In a fresh process and another folder, with warnings as errors, as a reader would."""
    code = "\n\n".join(snippets("python"))
    assert code
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_first_snippet_is_a_model_in_under_twenty_lines_that_learns():
    code = snippets("python")[0]
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) < 20
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    for name, parameter in names["model"].named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_named_make_targets_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^|^ +)make ([a-z]+)", text, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, flags=re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_the_table_names_every_block():
    import brickwork.blocks

    public = {name for name, member in vars(brickwork.blocks).items() if callable(member)}
    parts = {"MoEOutput", "Noise"}  # results, explained where they are returned
    named = set(re.findall(r"`(\w+)`", README))
    assert public - parts <= named, f"not in the README: {sorted(public - parts - named)}"


def test_extras_are_those_of_the_metadata():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    section = re.search(r"^\[options\.extras_require\]\n(.*?)^\[", setup, re.M | re.S).group(1)
    extras = set(re.findall(r"^(\w+) =", section, flags=re.MULTILINE))
    table = README[README.index("| extra | for |") :].split("\n\n")[0]
    rows = table.splitlines()[2:]
    assert set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows))) == extras


def test_the_site_shows_every_public_name():
    import brickwork.assemblies
    import brickwork.blocks

    shown = " ".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))
    for room in (brickwork.blocks, brickwork.assemblies):
        for name, member in vars(room).items():
            if callable(member):
                assert f"::: {room.__name__}.{name}\n" in shown, name
    for op in OPS:
        assert f"::: brickwork.kernels.{op}.{op}\n" in shown, op
