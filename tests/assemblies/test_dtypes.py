"""Half precision, by cast and by autocast, against float32 at the same parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from interoperability import MODELS, inputs
from support import assert_close

from brickwork.assemblies import LCPLM, MiniLLaDA, Rish

TERMS = 32  # of the longest sum along the width: an expert's gate and up, or the inner width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_float32_rounded(name, autocast, dtype):
    """Loss and logits, and a finite gradient of the parameter's dtype for everything."""
    narrow = MODELS[name]()
    narrow = narrow if autocast else narrow.to(dtype)
    wide = copy.deepcopy(narrow).float()
    given = inputs(3, 9, masked=True)
    given["labels"] = given["input_ids"]
    if isinstance(narrow, MiniLLaDA):
        given["noise"] = narrow.diffusion.noise(given["input_ids"], given["attention_mask"])
    with torch.autocast("cpu", dtype, enabled=autocast):
        found = narrow(**given)
    found.loss.backward()
    if isinstance(narrow, Rish):  # a near tie between experts may go either way
        given["routing"] = found.indices
        assert {logits.dtype for logits in found.router_logits} == {torch.float32}
    expected = wide(**given)
    expected.loss.backward()

    assert found.logits.dtype == (torch.float32 if isinstance(narrow, LCPLM) else dtype)
    assert found.loss.dtype == torch.float32
    real = given["attention_mask"] == 1
    assert_close(found.logits[real], expected.logits[real], terms=TERMS, compute=dtype)
    assert_close(found.loss, expected.loss, terms=TERMS, compute=dtype)
    for (parameter, ours), theirs in zip(narrow.named_parameters(), wide.parameters()):
        assert ours.grad.dtype == ours.dtype, parameter
        assert ours.grad.isfinite().all(), parameter
        assert_close(ours.grad.float(), theirs.grad, terms=TERMS, compute=dtype, name=parameter)
