"""The assemblies reproduce what the originals computed with every op's kernels, too: the tests of
`tests/assemblies/test_goldens.py` under `prefer("triton")`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from brickwork.kernels.backend import prefer

_path = Path(__file__).parents[2] / "assemblies" / "test_goldens.py"
_spec = importlib.util.spec_from_file_location("goldens_for_triton", _path)
assert _spec
assert _spec.loader
_goldens = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_goldens)

test_mini_llada = _goldens.test_mini_llada
test_rish = _goldens.test_rish
test_lc_plm = _goldens.test_lc_plm


@pytest.fixture
def backend() -> Iterator[None]:
    with prefer("triton"):
        yield
