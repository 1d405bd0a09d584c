from __future__ import annotations

import pytest
from interoperability import MODELS, check_onnx


@pytest.mark.parametrize("name", ["rish", "lc_plm"])
def test_onnx_for_any_batch_and_length(name):
    """Without a mask, and the other models: tests/exported/test_interoperability.py."""
    check_onnx(MODELS[name]().eval(), masked=True)
