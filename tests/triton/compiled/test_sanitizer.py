"""Every kernel under triton-viz's sanitizer; see `tests/sanitize.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from resources import modules

TESTS = Path(__file__).parents[2]
OPS = [module.removesuffix("_triton") for module in modules()]

pytest.importorskip("triton_viz")


def sanitize(op: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tests/sanitize.py", op],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("op", OPS)
def test_every_access_is_inside_its_tensor(op):
    done = sanitize(op)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "are within their tensors" in done.stdout


def test_every_op_has_cases():
    assert {path.stem for path in (TESTS / "triton" / "sanitized").glob("*.py")} == set(OPS)
