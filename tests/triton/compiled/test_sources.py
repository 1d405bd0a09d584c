"""What no Triton file may hold, whatever it computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "kernels"
FILES = sorted(KERNELS.glob("*triton*.py"))
FORBIDDEN = {
    r"\bautotune\b": "D1 26, D1 27: a choice by timing breaks a capture, and depends on the run",
    r"\batomic_\w+": "D1 31: sums in the order of arrival differ from run to run",
    r"\.item\(|\.tolist\(|\bnonzero\(|\.cpu\(": "D4 58: the host waits for the GPU",
    r"\btl\.float64\b": "D1 20: no float64 in a kernel",
    r"\.data\b(?!_)": "D4 74: gradients of sharded weights get lost",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_forbidden(path):
    """D1 20, D1 26, D1 27, D1 31, D4 58, D4 74."""
    text = path.read_text(encoding="utf-8")
    for pattern, reason in FORBIDDEN.items():
        assert not re.search(pattern, text), f"{path.name}: {pattern}: {reason}"


def test_there_are_files():
    assert len(FILES) > 10
