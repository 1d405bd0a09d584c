"""The real mamba-ssm and causal-conv1d beside ours, on the CPU; run by `make test-vendor`.

Both are installed without their kernels in the folder that `BRICKWORK_VENDOR` names. Empty modules
stand in for the kernels, so that everything written in PyTorch can be imported and run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

VENDOR = os.environ.get("BRICKWORK_VENDOR")
collect_ignore_glob = [] if VENDOR else ["*"]
_TRANSFORMERS_MARKERS = (
    *("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test"),
    *("torch_compile_test", "slow", "generate", "flash_attn_mps_test"),
)

if VENDOR:
    sys.path.insert(0, str(Path(VENDOR).resolve()))
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        sys.modules.setdefault(name, ModuleType(name))


def pytest_configure(config: pytest.Config) -> None:
    for marker in _TRANSFORMERS_MARKERS:
        config.addinivalue_line("markers", f"{marker}: of transformers' own tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case",
        action="store_true",
        help="run causal-conv1d's suite at every number of channels, not only at the smallest",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every-case", default=False):
        return
    left, kept = [], []
    for item in items:
        size = getattr(item, "callspec", None) and item.callspec.params.get("dim", 0)
        from_suite = item.path.name == "test_causal_conv1d_suite.py"
        (left if from_suite and size not in (None, 0, 64, 2048) else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
