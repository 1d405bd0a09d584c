from __future__ import annotations

import csv
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_close

from brickwork.assemblies import LCPLM, LCPLMConfig
from brickwork.assemblies.protein_variants import Mutation, parse_variant
from brickwork.assemblies.proteins import (
    ALPHABET,
    MASK,
    RESIDUES,
    score_variants_table,
    variant_scores,
)

WILD = "MKTAYIAKQRQISFVKSHFSRQ"


def tiny(**options):
    torch.manual_seed(0)
    model = LCPLM(LCPLMConfig(d_model=16, n_layer=2, **options))
    torch.nn.init.normal_(model.embedding.weight)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


@torch.no_grad()
def by_hand(model, tokens, variant, first_position=1):
    """The score from the definition, token by token, one masked copy for each mutation."""
    score = 0.0
    for part in variant.split(":"):
        wild, position, mutant = part[0], int(part[1:-1]), part[-1]
        ids = [0] + [ALPHABET.index(token) for token in tokens] + [2]
        place = 1 + position - first_position
        assert ids[place] == ALPHABET.index(wild)
        ids[place] = MASK
        p = model(torch.tensor([ids])).logits[0, place].double().softmax(-1)
        score += (p[ALPHABET.index(mutant)] / p[ALPHABET.index(wild)]).log().item()
    return score


CHANGES = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from(RESIDUES)),
    min_size=1,
    max_size=3,
    unique_by=lambda change: change[0],
)


@settings(max_examples=12)
@given(
    sequence=st.text(RESIDUES, min_size=1, max_size=12),
    changes=st.lists(CHANGES, max_size=3),
    first=st.integers(-20, 20),
    max_tokens=st.integers(14, 40),
)
def test_scores_are_the_definition(model, sequence, changes, first, max_tokens):
    """Whatever the first residue's number: no offset is off by one, at either end."""
    variants = [
        ":".join(f"{sequence[i]}{i + first}{to}" for i, to in change if i < len(sequence))
        for change in changes
    ]
    variants = [variant for variant in variants if variant]
    found = variant_scores(model, sequence, variants, first_position=first, max_tokens=max_tokens)
    assert found.shape == (len(variants),)
    assert found.dtype == torch.float32
    expected = [by_hand(model, sequence, variant, first) for variant in variants]
    assert_close(found, torch.tensor(expected), terms=256, scale=10.0)


def test_both_ends_and_duplicates():
    model = tiny()
    variants = ["M1A", "Q22L", "M1A", "M1M", "M1A:Q22L"]
    found = variant_scores(model, WILD, variants)
    expected = torch.tensor([by_hand(model, WILD, variant) for variant in variants])
    assert_close(found, expected, terms=256, scale=10.0)
    assert found[0] == found[2]
    assert found[3] == 0
    assert_close(found[4], found[0] + found[1])
    assert variant_scores(model, WILD, []).shape == (0,)


def test_a_masked_residue_of_the_wild_type_is_one_token():
    model = tiny()
    tokens = ["M", "<mask>", "K", "V"]
    found = variant_scores(model, "M<mask>KV", ["K3R", "V4L"])
    expected = torch.tensor([by_hand(model, tokens, variant) for variant in ("K3R", "V4L")])
    assert_close(found, expected, terms=256, scale=10.0)
    with pytest.raises(ValueError, match="the sequence has <mask> at position 2, not A"):
        variant_scores(model, "M<mask>KV", ["A2R"])


def test_a_position_is_computed_once(monkeypatch):
    model, shapes, done = tiny(), [], []
    model.register_forward_pre_hook(lambda _, arguments: shapes.append(arguments[0].shape))
    variants = [f"{WILD[i]}{i + 1}{to}" for i in (3, 4, 9) for to in "ACD"] + ["A4C:Q9C"]
    variant_scores(model, WILD, variants, max_tokens=50, on_progress=done.append)
    assert shapes == [(2, 24), (2, 24)]
    assert done == [2, 2]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("K3R", r"'K3R': the sequence has T at position 3, not K"),
        ("M1A:K3R", r"'M1A:K3R': the sequence has T at position 3, not K"),
        ("A0G", r"'A0G': position 0 is outside the sequence, 1 to 22"),
        ("Q23A", r"'Q23A': position 23 is outside the sequence, 1 to 22"),
        ("M-1A", r"position -1 is outside the sequence"),
        ("M1J", r"'M1J': 'J' is not one of"),
        ("M1A:M1C", r"'M1A:M1C' changes position 1 twice"),
        ("", r"'': '' is not a mutation such as A42G"),
        ("M1", r"'M1' is not a mutation"),
        ("m1A", r"'m1A' is not a mutation"),
        ("M1A,K2R", r"'M1A,K2R' is not a mutation such as A42G, several joined by ':'"),
        ("M1A:", r"'M1A:': '' is not a mutation"),
        ("M1*", r"is not a mutation"),
        ("WT", r"is not a mutation"),
    ],
)
def test_variants_that_do_not_fit(variant, message):
    with pytest.raises(ValueError, match=message):
        variant_scores(tiny(), WILD, ["M1A", variant])


def test_positions_are_counted_from_the_first():
    assert parse_variant("M24A:T26S", WILD, first_position=24) == [
        Mutation("M", 0, "A"),
        Mutation("T", 2, "S"),
    ]
    with pytest.raises(ValueError, match="position 1 is outside the sequence, 24 to 45"):
        parse_variant("M1A", WILD, first_position=24)


def test_arguments():
    with pytest.raises(ValueError, match="variants must be a list of strings, got 'M1A'"):
        variant_scores(tiny(), WILD, "M1A")
    with pytest.raises(ValueError, match="it has 22 residues, got 23"):
        variant_scores(tiny(), WILD, ["M1A"], max_tokens=23)
    model = tiny()
    model.lm_head.weight.data[5] = float("inf")
    with pytest.raises(ValueError, match="logits are not finite"):
        variant_scores(model, WILD, ["M1A"])


def write(path, text):
    path.write_text(text)
    return path


def test_a_table_keeps_its_rows_and_columns(tmp_path):
    model = tiny()
    fasta = write(tmp_path / "wt.fasta", f">wt\n{WILD}\n")
    table = write(tmp_path / "in.csv", 'mutant,dms,note\nM1A,0.5,"a, b"\nK2R:A4G,,x\nM1A,1,\n')
    score_variants_table(model, fasta, table, tmp_path / "out.tsv")
    with (tmp_path / "out.tsv").open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    assert [row[:3] for row in rows] == [
        ["mutant", "dms", "note"],
        ["M1A", "0.5", "a, b"],
        ["K2R:A4G", "", "x"],
        ["M1A", "1", ""],
    ]
    assert rows[0][3] == "score"
    found = torch.tensor([float(row[3]) for row in rows[1:]])
    assert torch.equal(found, variant_scores(model, WILD, ["M1A", "K2R:A4G", "M1A"]))
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "out.tsv", "wt.fasta"]


def test_a_table_of_several_proteins(tmp_path):
    model = tiny()
    fasta = write(tmp_path / "wt.fasta", f">a\n{WILD}\n>unused\nBAD*\n>b\nAAAA\n>a\n{WILD}\n")
    table = write(tmp_path / "in.tsv", "id\tv\nb\tA2G\na\tM1A\nb\tA4C\n")
    score_variants_table(
        model, fasta, table, tmp_path / "out.csv", column="v", score_column="s", first_position=1
    )
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["v"]) for row in rows] == [("b", "A2G"), ("a", "M1A"), ("b", "A4C")]
    expected = [by_hand(model, s, v) for s, v in [("AAAA", "A2G"), (WILD, "M1A"), ("AAAA", "A4C")]]
    found = torch.tensor([float(row["s"]) for row in rows])
    assert_close(found, torch.tensor(expected), terms=256, scale=10.0)


@pytest.mark.parametrize(
    ("fasta", "table", "options", "message"),
    [
        ("", "mutant\nM1A\n", {}, r"wt.fasta holds no record"),
        (">a\nMK\n>b\nMV\n", "mutant\nM1A\n", {}, "several records: the table needs a column 'id'"),
        (">a\nMK\n", "id,mutant\nc,M1A\n", {}, r"has no record \['c'\], which the table's column"),
        (">a\nMK\n>a\nMV\n", "id,mutant\na,M1A\n", {}, "has two records 'a' that differ"),
        (">a\nM*\n", "mutant\nM1A\n", {}, r"line 1, 'a': residue 2 is '\*'"),
        (">a\nMK\n", "variant\nM1A\n", {}, r"must have one column 'mutant', its columns are \['v"),
        (">a\nMK\n", "", {}, r"must have one column 'mutant', its columns are \[\]"),
        (">a\nMK\n", "mutant,mutant\nM1A,M1A\n", {}, "must have one column 'mutant'"),
        (">a\nMK\n", "mutant,x\nM1A\n", {}, "line 2, must have 2 cells"),
        (">a\nMK\n", "mutant\nM1A\nM1A,x\n", {}, "line 3, must have 1 cells"),
        (">a\nMK\n", 'mutant,x\nM1A,"a\n', {}, "line 2: unexpected end"),
        (">a\nMK\n", "mutant,score\nM1A,1\n", {}, "score_column must be new, .* 'score'"),
        (">a\nMK\n", "mutant\nM1A\n\nK1A\nM9A\n", {}, r"2 bad rows:\n  line 4: .*\n  line 5: "),
        (">a\nMK\n", "mutant\n" + "K1A\n" * 23, {}, "line 21: .*\n  and 3 more"),
        (">a\nMK\n", "mutant\nM1A\n", {"max_tokens": 3}, "it has 2 residues, got 3"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit(tmp_path, fasta, table, options, message):
    fasta = write(tmp_path / "wt.fasta", fasta)
    table = write(tmp_path / "in.csv", table)
    with pytest.raises(ValueError, match=message):
        score_variants_table(tiny(), fasta, table, tmp_path / "out.csv", **options)
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "wt.fasta"]


def test_an_empty_table_and_one_that_is_there(tmp_path):
    fasta = write(tmp_path / "wt.fasta", ">a\nMK\n")
    table = write(tmp_path / "in.csv", "\ufeffmutant\n")
    out = tmp_path / "out.csv"
    score_variants_table(tiny(), fasta, table, out)
    assert out.read_text() == "mutant,score\n"
    with pytest.raises(ValueError, match="exists: overwrite it"):
        score_variants_table(tiny(), fasta, table, out)
    with pytest.raises(ValueError, match=r"out must be a file, .* is a folder"):
        score_variants_table(tiny(), fasta, table, tmp_path, overwrite=True)
    write(table, "mutant\nM1A\n")
    score_variants_table(tiny(), fasta, table, out, overwrite=True)
    assert out.read_text().startswith("mutant,score\nM1A,")
