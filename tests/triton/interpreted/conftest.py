"""Every test here runs kernels in Triton's interpreter, made to round as a GPU does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_pycollect_makemodule() -> None:
    from brickwork.kernels.backend import triton_interprets

    if not triton_interprets():
        raise pytest.UsageError(
            "tests/triton/interpreted needs TRITON_INTERPRET=1 in the environment"
        )


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import interpreter
    import numpy as np

    interpreter.round_to_nearest(monkeypatch)
    interpreter.leave_tensors_in_place(monkeypatch)
    with np.errstate(all="ignore"), interpreter.language_patched_once():
        yield  # of an infinity a GPU does not warn
