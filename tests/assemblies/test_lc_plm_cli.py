"""The commands, as a user gives them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

import pytest
import torch
from support import assert_close

from brickwork.assemblies import LCPLM, LCPLMConfig, Rish, RishConfig, embed_records
from brickwork.assemblies.lc_plm_cli import main
from brickwork.assemblies.proteins import ProteinEmbeddings, embed_proteins, variant_scores

FASTA = ">a first\nMKTAYIAKQR\n>b\nMKV\n>c\nMKTAYIAKQR\n"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = LCPLM(LCPLMConfig(d_model=16, n_layer=2))
    torch.nn.init.normal_(model.embedding.weight)
    return model.eval()


@pytest.fixture
def here(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    (tmp_path / "in.fasta").write_text(FASTA)
    (tmp_path / "in.csv").write_text("id,mutant\na,K2R\na,K2R:A4G\nb,V3L\n")
    return tmp_path


def refusal(*arguments):
    """What a command that fails says, in one message without a trace."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--model", "model", "--quiet"])
    assert str(stop.value).startswith("error: ")
    return str(stop.value)


def test_both_commands(here, model):
    """The first through `python -m`, warnings as errors, with the FASTA file from a pipe."""
    command = [sys.executable, "-W", "error", "-m", "brickwork.assemblies.lc_plm"]
    done = subprocess.run(
        [*command, "embed", "-", "out.safetensors", "--model", "model", "--max-tokens", "30"],
        input=FASTA,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "23.0/23.0" in done.stderr
    found = ProteinEmbeddings("out.safetensors")
    assert found.ids == ["a", "b", "c"]
    expected = embed_proteins(model, ["MKTAYIAKQR", "MKV", "MKTAYIAKQR"])
    assert_close(found.mean(), expected, terms=256)
    main(["variants", "in.fasta", "in.csv", "out.csv", "--model", "model", "--quiet"])
    with open("out.csv", newline="") as file:
        scores = torch.tensor([float(row["score"]) for row in csv.DictReader(file)])
    assert torch.equal(scores[:2], variant_scores(model, "MKTAYIAKQR", ["K2R", "K2R:A4G"]))
    assert torch.equal(scores[2:], variant_scores(model, "MKV", ["V3L"]))


def test_options_of_embed(here, model):
    options = "--layers 0 -1 --pool both --max-length 5 --truncate --dtype float64 --save-dtype"
    main(["embed", "in.fasta", "out", "--model", "model", *options.split(), "float16"])
    found = ProteinEmbeddings("out")
    assert found.layers == (0, 2)
    assert found.lengths.tolist() == [5, 3, 5]
    assert found.settings["max_length"] == 5
    assert found.mean().dtype == torch.float16
    assert_close(found.mean().float()[1], embed_proteins(model, ["MKV"])[0].half().float(), terms=1)
    assert "exists" in refusal("embed", "in.fasta", "out")
    assert "both" in refusal("embed", "in.fasta", "out", "--resume", "--overwrite")
    assert "was begun with" in refusal("embed", "in.fasta", "out", "--resume")
    main(["embed", "in.fasta", "out", "--model", "model", "--quiet", "--overwrite"])
    assert ProteinEmbeddings("out").layers == (2,)


def test_bad_records_are_named_or_listed(here, capsys):
    bad = FASTA + ">d\nMKJ\n>b\nMM\n"
    (here / "in.fasta").write_text(bad)
    message = refusal("embed", "in.fasta", "out")
    assert "in.fasta has 2 bad records:\n  line 7, 'd': residue 3 is 'J'" in message
    assert "\n  line 9, 'b': the id of line 3 again, with another sequence" in message
    main(["embed", "in.fasta", "out", "--model", "model", "--quiet", "--skip-bad"])
    assert "2 bad records were left out: see out.skipped.tsv" in capsys.readouterr().err
    with open("out.skipped.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [(row["line"], row["id"]) for row in rows] == [("7", "d"), ("9", "b")]
    main(["embed", "in.fasta", "kept", "--model", "model", "--skip-bad", "--keep-duplicate-ids"])
    assert ProteinEmbeddings("kept").ids == ["a", "b", "c", "b"]


def test_options_of_variants(here, model):
    (here / "in.fasta").write_text(">only\nMKV\n")
    (here / "in.tsv").write_text("v\nK25R\n")
    options = "--column v --score-column log_odds --first-position 24 --max-tokens 9"
    main(["variants", "in.fasta", "in.tsv", "out.csv", "--model", "model", *options.split()])
    head, row = (here / "out.csv").read_text().split()
    assert head == "v,log_odds"
    expected = variant_scores(model, "MKV", ["K2R"])
    assert_close(torch.tensor([float(row.split(",")[1])]), expected, terms=256, scale=10.0)
    assert "position 25 is outside the sequence, 1 to 3" in refusal(
        "variants", "in.fasta", "in.tsv", "other.csv", "--column", "v"
    )
    assert "out.csv exists" in refusal("variants", "in.fasta", "in.tsv", "out.csv")


def test_errors_of_the_surroundings(here):
    assert "none.fasta" in refusal("embed", "none.fasta", "out")
    assert "no/out" in refusal("embed", "in.fasta", "no/out")
    assert "in.csv is not FASTA" in refusal("embed", "in.csv", "out")
    assert "--device cuda:99 cannot be used here" in refusal(
        "embed", "in.fasta", "out", "--device", "cuda:99"
    )
    assert "--device meta cannot be used" in refusal("embed", "in.fasta", "o", "--device", "meta")
    assert "none.csv" in refusal("variants", "in.fasta", "none.csv", "out.csv")
    os.unlink("model/model.safetensors")
    assert "model.safetensors" in refusal("embed", "in.fasta", "out")
    os.unlink("model/config.json")
    assert "config.json does not exist" in refusal("embed", "in.fasta", "out")
    Rish(
        RishConfig(
            vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=1, num_experts=2, num_experts_per_tok=1, pad_token_id=None,
            eos_token_id=None,
        )
    ).save_pretrained("model")  # fmt: skip
    assert "rish_ai" in refusal("embed", "in.fasta", "out")
    assert not os.path.exists("out")


@pytest.mark.parametrize(
    "arguments", [[], ["embed"], ["embed", "a", "b"], ["score"], ["embed", "a", "b", "--pool", "x"]]
)
def test_misspelt_commands_show_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m brickwork.assemblies.lc_plm" in capsys.readouterr().err


def test_interrupted_it_says_how_to_go_on(here, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embed_records, "residue_states", interrupted)
        with pytest.raises(SystemExit) as stop:
            main(["embed", "in.fasta", "out", "--model", "model", "--quiet"])
    assert stop.value.code == 130
    assert "--resume goes on" in capsys.readouterr().err
    main(["embed", "in.fasta", "out", "--model", "model", "--quiet", "--resume"])
    assert len(ProteinEmbeddings("out")) == 3


def test_out_of_memory_says_what_to_try(here, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(embed_records, "residue_states", full)
    assert "try a lower --max-tokens" in refusal("embed", "in.fasta", "out")
