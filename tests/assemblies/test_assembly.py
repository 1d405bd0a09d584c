from __future__ import annotations

import json

import pytest
import torch

from brickwork.assemblies import MiniLLaDA, MiniLLaDAConfig

TINY = {"vocab_size": 9, "dim": 8, "depth": 1, "head": 2, "intermediate_size": 8}


def tiny():
    return MiniLLaDA(MiniLLaDAConfig(**TINY))


def test_what_the_originals_loader_needs_is_written_back(tmp_path):
    tiny().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    bookkeeping = {"architectures": ["Original"], "auto_map": {"AutoModel": "m.Original"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | bookkeeping))
    MiniLLaDA.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path / "again")
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: found[name] for name in bookkeeping} == bookkeeping
    assert found["torch_dtype"] == "bfloat16"


def test_a_model_without_storage_is_not_loaded_into():
    with torch.device("meta"):
        blank = tiny()
    with pytest.raises(ValueError, match=r"meta device: call to_empty\(device=...\) first"):
        blank.load_original_state_dict(tiny().original_state_dict())


def test_nothing_changes_unless_everything_fits():
    model = tiny()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = {name: t + 1 for name, t in model.original_state_dict().items()}
    name = list(state)[-1]
    for wrong in (state[name][:-1], state[name].long(), state[name].to("meta")):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            model.load_original_state_dict(state | {name: wrong})
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int64])
def test_dtype_must_be_floating(dtype, tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"dtype must be a floating-point torch\.dtype"):
        MiniLLaDA.from_pretrained(tmp_path, dtype=dtype)
