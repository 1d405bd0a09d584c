"""The checks of the Triton kernels, which need no GPU; run by `make test-triton`
(`make test-gpu-bench` for `rehearsed`).

Triton decides when it is first imported whether it interprets or compiles, so each folder is a run
of its own, and a run that names neither leaves both out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    return None if any(path.is_relative_to(HERE) for path in named) else True
