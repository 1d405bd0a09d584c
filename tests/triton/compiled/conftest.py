"""Nothing here runs a kernel: they are compiled, dispatched on fake tensors, or run in a process of
their own."""

from __future__ import annotations

import os

import pytest


def pytest_pycollect_makemodule() -> None:
    from brickwork.kernels.backend import triton_interprets

    if triton_interprets():
        raise pytest.UsageError("tests/triton/compiled needs TRITON_INTERPRET unset")


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is compiled here is kept apart, unless the environment says where."""
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
