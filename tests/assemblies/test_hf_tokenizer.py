"""The tokenizer of proteins under transformers."""

from __future__ import annotations

import pytest
import torch
from hf_models import lc_plm
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from brickwork.assemblies.hf import protein_tokenizer
from brickwork.assemblies.proteins import ALPHABET, RESIDUES, decode, tokenize

PROTEINS = ["MKVL", "M", "A<mask>C.-B", RESIDUES]


def test_ids_are_those_of_our_own():
    tokenizer = protein_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(ALPHABET)}
    found = tokenizer(PROTEINS, padding=True, return_tensors="pt")
    expected = tokenize(PROTEINS)
    assert torch.equal(found["input_ids"], expected.input_ids)
    assert torch.equal(found["attention_mask"].bool(), expected.attention_mask)
    assert found.keys() == {"input_ids", "attention_mask"}
    assert lc_plm()(**found).logits.shape[-1] == len(tokenizer) == 33


def test_decodes_to_the_sequence():
    tokenizer, ids = protein_tokenizer(), tokenize(["MKVL", "AC"]).input_ids
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == decode(ids) == ["MKVL", "AC"]
    assert tokenizer.decode(ids[1]) == "<cls>AC<eos><pad><pad>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("M K\nV", "MKV"), ("mK", "<unk>K"), ("M*K", "M<unk>K"), ("", "")],
)
def test_spaces_and_strangers(text, expected):
    found = protein_tokenizer()(text)["input_ids"]
    assert "".join(ALPHABET[i] for i in found) == f"<cls>{expected}<eos>"


def test_pairs_truncation_and_special_tokens():
    tokenizer = protein_tokenizer()
    assert tokenizer("MK", "AC")["input_ids"] == [0, 20, 15, 2, 5, 23, 2]
    assert tokenizer("MKVL", truncation=True, max_length=4)["input_ids"] == [0, 20, 15, 2]
    special = {"cls": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 32}
    assert {name: getattr(tokenizer, f"{name}_token_id") for name in special} == special


def test_what_it_saves_loads_without_brickwork(tmp_path):
    protein_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert "brickwork" not in (tmp_path / "tokenizer_config.json").read_text()
    text = [*PROTEINS, "mK"]
    assert loaded(text)["input_ids"] == protein_tokenizer()(text)["input_ids"]
    assert loaded.mask_token_id == 32
    assert loaded.padding_side == "right"


def test_a_collator_masks_for_lc_plm():
    tokenizer = protein_tokenizer()
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    batch = collate([tokenizer("MKVLAGVSERT"), tokenizer("MKV")])
    scored = batch["labels"] != -100
    assert scored.any()
    assert not scored[batch["attention_mask"] == 0].any()
    assert lc_plm()(**batch).loss.isfinite()
