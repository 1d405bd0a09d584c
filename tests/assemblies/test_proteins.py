from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import assert_close

from brickwork.assemblies import LCPLM, LCPLMConfig, proteins
from brickwork.assemblies.proteins import (
    ALPHABET,
    MASK,
    decode,
    embed_proteins,
    masked_log_probs,
    tokenize,
)


def tiny():
    model = LCPLM(LCPLMConfig(d_model=16, n_layer=2))
    torch.nn.init.normal_(model.embedding.weight)
    return model.eval()


def test_alphabet_is_esm2s():
    assert len(ALPHABET) == 33
    assert ALPHABET[:5] == ("<cls>", "<pad>", "<eos>", "<unk>", "L")
    assert ALPHABET[28:] == ("O", ".", "-", "<null_1>", "<mask>")


def test_tokens_come_back():
    sequences = ["M", "", "LAGVSERTIDPKQNFYMHWCXBUZO", "MK<mask>L.-"]
    batch = tokenize(sequences)
    assert decode(batch.input_ids) == sequences
    assert batch.attention_mask.sum(1).tolist() == [3, 2, 27, 8]
    assert (batch.input_ids[:, 0] == 0).all()
    assert batch.input_ids[3, 3] == MASK


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ("MKV", "must be a list"),
        ([], "at least one protein"),
        (["MK", "MkV"], "sequence 1 has 'k' at 1"),
        (["M*"], r"sequence 0 has '\*' at 1"),
        (["M<pad>"], "sequence 0 has '<' at 1"),
        (["M K"], "sequence 0 has ' ' at 1"),
    ],
)
def test_bad_sequences(sequences, message):
    with pytest.raises(ValueError, match=message):
        tokenize(sequences)


def test_embeddings_are_means_over_residues_whatever_the_batch():
    """P4"""
    model = tiny()
    sequences = ["MKV", "M", "LAGVSERTIDPK", "MKVLA", "M"]
    found = embed_proteins(model, sequences, max_tokens=28)
    for i, sequence in enumerate(sequences):
        hidden = model(tokenize([sequence]).input_ids).last_hidden_state[0, 1:-1]
        assert_close(found[i], hidden.mean(0), terms=256)
    assert not found.requires_grad
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        embed_proteins(model, ["M", ""])
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 3, got 0"):
        embed_proteins(model, ["M"], max_tokens=0)


def test_masked_log_probs_mask_one_residue_each():
    model = tiny()
    found = masked_log_probs(model, "MKVLA", max_tokens=14)
    assert found.shape == (5, 33)
    for i, masked in enumerate(["<mask>KVLA", "M<mask>VLA", "MK<mask>LA"]):
        logits = model(tokenize([masked]).input_ids).logits[0, i + 1]
        assert_close(found[i], logits.log_softmax(-1), terms=256)
    assert_close(masked_log_probs(model, "MKVLA", positions=[2])[0], found[2], terms=256)
    assert masked_log_probs(model, "MKVLA", positions=[]).shape == (0, 33)
    with pytest.raises(ValueError, match=r"positions must be in \[0, 5\), got 5"):
        masked_log_probs(model, "MKVLA", positions=[5])


def test_the_site_shows_every_function_and_class():
    page = Path(__file__).parents[2] / "docs" / "api" / "assemblies.md"
    shown = page.read_text(encoding="utf-8")
    for name, member in vars(proteins).items():
        if callable(member):
            assert f"::: brickwork.assemblies.proteins.{name}\n" in shown, name
