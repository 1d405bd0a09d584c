from __future__ import annotations

import pytest
from interoperability import MODELS, check_graphs


@pytest.mark.parametrize("name", ["mini_llada", "rish", "lc_plm"])
def test_training_makes_two_graphs_whatever_the_lengths(name):
    """Inference, without a mask, and the other models: tests/exported/test_interoperability.py."""
    check_graphs(MODELS[name](), training=True, masked=True)
