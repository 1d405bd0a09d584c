"""The examples in the docstrings, run under the modules' real import names."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    f"brickwork.{path.parent.name}.{path.stem}"
    for room in ("blocks", "kernels", "assemblies")
    for path in (ROOT / room).glob("*.py")
    if path.stem != "__init__" and "_triton" not in path.stem
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example that writes a checkpoint leaves nothing in the tree
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for example in doctest.DocTestFinder().find(importlib.import_module(name)):
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
