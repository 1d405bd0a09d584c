"""Every assembly and option exported, as ONNX and compiled: too long for `make test`, which has one
case of each kind (tests/assemblies/test_export.py, test_onnx.py, test_compile.py)."""

from __future__ import annotations

import pytest
import torch
from interoperability import (
    EXAMPLE,
    MODELS,
    VARIANTS,
    assert_equal_where_real,
    check_graphs,
    check_module,
    check_onnx,
    export,
    inputs,
    lc_plm,
)

# PyTorch's own, at the first use of its scan in a process.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
EVERY = MODELS | VARIANTS
unmasked_and_masked = pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])


@unmasked_and_masked
@pytest.mark.parametrize("name", EVERY)
def test_export_for_any_batch_and_length(name, masked):
    model = EVERY[name]().eval()
    exported = export(model, inputs(*EXAMPLE, masked=masked))
    check_module(exported.module(), model, masked=masked)


def test_packed_sequences_export():
    model = lc_plm("Mamba2").eval()
    packed = {"seq_ids": torch.tensor([[1, 1, 1, 2, 2, 2]] * 3)}
    exported = export(model, inputs(*EXAMPLE, masked=True) | packed).module()
    given = inputs(2, 70, masked=True) | {"seq_ids": torch.arange(70).expand(2, -1) // 13}
    assert_equal_where_real(exported(**given).logits, model(**given).logits, given)


@pytest.mark.parametrize("name", EVERY)
def test_onnx_for_any_batch_and_length(name):
    check_onnx(EVERY[name]().eval(), masked=name in VARIANTS)


@pytest.mark.parametrize(
    ("training", "masked"),
    [(False, True), (True, False)],
    ids=["inference, masked", "training"],
)
@pytest.mark.parametrize("name", [*MODELS, "rish dynamic", "lc_plm hybrid"])
def test_compilation_makes_two_graphs_whatever_the_lengths(name, training, masked):
    check_graphs(EVERY[name](), training=training, masked=masked)
