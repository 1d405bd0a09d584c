"""Every kernel under triton-viz's sanitizer; see `tests/sanitize.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from resources import modules

TESTS = Path(__file__).parents[2]
OPS = [module.removesuffix("_triton") for module in modules()]

pytest.importorskip("triton_viz")


def sanitize(*ops: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tests/sanitize.py", *ops],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("ops", [OPS[::2], OPS[1::2]], ids=" ".join)
def test_every_access_is_inside_its_tensor(ops):
    """Two processes, as one spends seconds on its imports."""
    done = sanitize(*ops)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    for op in ops:
        assert re.search(rf"^{op}: [1-9]\d* kernels are within their tensors", done.stdout, re.M)


def test_every_op_has_cases():
    assert {path.stem for path in (TESTS / "triton" / "sanitized").glob("*.py")} == set(OPS)
