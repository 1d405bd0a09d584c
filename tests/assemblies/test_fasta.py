from __future__ import annotations

import gzip
import os
import re
import threading

import pytest
import torch

from brickwork.assemblies import fasta_survey
from brickwork.assemblies.fasta import (
    BadRecord,
    FastaRecord,
    bad_records_error,
    problem_of,
    read_fasta,
    rereadable,
)
from brickwork.assemblies.fasta_survey import survey

TEXT = ">a first one\nMKV\nLA\n\n>b\n  ML \n>a again\nMKVLA\n>c\n"
RECORDS = [("a", "MKVLA", 1), ("b", "ML", 5), ("a", "MKVLA", 7), ("c", "", 9)]


def written(folder, content, name="in.fasta"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("zipped", [False, True])
def test_records_of_a_file(tmp_path, newline, start, zipped):
    content = start + TEXT.replace("\n", newline).encode()
    path = written(tmp_path, gzip.compress(content) if zipped else content, "proteins")
    assert [tuple(record) for record in read_fasta(path)] == RECORDS


def test_white_space_in_a_sequence_is_dropped(tmp_path):
    path = written(tmp_path, ">a\nMKV LA\tGS\n>b\nM")
    assert [record.sequence for record in read_fasta(path)] == ["MKVLAGS", "M"]


def test_records_are_read_one_at_a_time(tmp_path):
    records = read_fasta(written(tmp_path, ">a\nM\n>b\nK\nnot read"))
    assert next(records).id == "a"
    records.close()
    assert list(read_fasta(written(tmp_path, "", "empty"))) == []
    assert list(read_fasta(written(tmp_path, gzip.compress(b""), "empty.gz"))) == []


def test_what_is_not_fasta(tmp_path):
    with pytest.raises(
        ValueError, match=r"not FASTA: line 2 stands before the first header.*'MKV'"
    ):
        list(read_fasta(written(tmp_path, "\nMKV\n>a\nM")))
    for damaged in (gzip.compress(TEXT.encode() * 99)[:-20], b"\x1f\x8b\x08nonsense" * 9):
        with pytest.raises(ValueError, match="damaged gzip file"):
            list(read_fasta(written(tmp_path, damaged)))
    with pytest.raises(FileNotFoundError):
        list(read_fasta(tmp_path / "none.fasta"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (">\nMK", "the header names no id"),
        (">a\n", "the sequence is empty"),
        (">a\nMKJ", "residue 3 is 'J', not one of "),
        (">a\nMk", "residue 2 is 'k'"),
        (">a\nMK*", r"residue 3 is '\*'"),
        (">a\nM<mask>", "residue 2 is '<'"),
        (">a\nMKVLAG", "6 residues are longer than the 5 allowed"),
        (b">caf\xe9\nMK", "the id is not printable UTF-8"),
        (b">a\nM\xe9K", r"residue 2 is '\\udce9'"),
        (b">a\x00b\nMK", "the id is not printable UTF-8"),
    ],
)
def test_problems(tmp_path, content, problem):
    (record,) = read_fasta(written(tmp_path, content))
    assert re.search(problem, problem_of(record, 5))


def test_good_records():
    assert problem_of(FastaRecord("é|1", "LAGVSERTIDPKQNFYMHWCXBUZO.-", 1)) is None
    assert problem_of(FastaRecord("a", "MKVLA", 1), 5) is None


def test_a_pipe_is_read_twice(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[TEXT])
    writer.start()
    with rereadable(pipe) as path:
        assert [list(map(tuple, read_fasta(path))) for _ in range(2)] == [RECORDS] * 2
    assert not path.exists()
    writer.join()
    with (
        written(tmp_path, gzip.compress(TEXT.encode())).open("rb") as file,
        monkeypatch.context() as patch,
    ):
        patch.setattr("sys.stdin", type("Text", (), {"buffer": file}))
        with rereadable("-") as path:
            assert list(map(tuple, read_fasta(path))) == RECORDS
    with rereadable(tmp_path / "in.fasta") as path:
        assert path == tmp_path / "in.fasta"


def test_survey_and_windows(tmp_path):
    path = written(tmp_path, TEXT + ">d\nMKVLAGSE\n>e\nM\n")
    found = survey(path, max_length=5)
    assert found.lengths.tolist() == [5, 2, 5, 1]
    assert found.numbers.tolist() == [0, 1, 2, 5]
    assert found.id_bytes == 4
    assert [(r.line, r.id) for r in found.bad] == [(9, "c"), (10, "d")]
    windows = [(row, [r.id for r in records]) for row, records in found.windows(8)]
    assert windows == [(0, ["a", "b"]), (2, ["a", "e"])]
    assert [len(records) for _, records in found.windows(10**9)] == [4]
    cut = survey(path, max_length=5, truncate=True)
    assert cut.lengths.tolist() == [5, 2, 5, 5, 1]
    assert cut.digest == found.digest


def test_an_id_with_two_sequences(tmp_path):
    path = written(tmp_path, ">a\nMK\n>b\nMM\n>a\nMKV\n>b\nMM\n>a\nMK\n>a\nML\n")
    found = survey(path, max_length=9)
    assert found.bad == [
        BadRecord(5, "a", "the id of line 1 again, with another sequence"),
        BadRecord(11, "a", "the id of line 1 again, with another sequence"),
    ]
    assert found.numbers.tolist() == [0, 1, 3, 4]
    assert found.id_bytes == 4
    kept = survey(path, max_length=9, keep_duplicate_ids=True)
    assert kept.bad == []
    assert kept.numbers.tolist() == [0, 1, 2, 3, 4, 5]


def test_two_ids_of_one_hash_are_two_ids(tmp_path, monkeypatch):
    path = written(tmp_path, ">a\nMK\n>b\nMM\n>a\nMM\n")
    monkeypatch.setattr(fasta_survey, "_short_hash", lambda text: len(text))
    assert [r.line for r in survey(path, max_length=9).bad] == []  # the sequences' hashes agree
    monkeypatch.setattr(
        fasta_survey, "_short_hash", lambda text: 0 if len(text) == 1 else ord(text[1])
    )
    assert [r.line for r in survey(path, max_length=9).bad] == [5]


@pytest.mark.parametrize("change", [">a\nMK\n>b\nM\n", ">a\nMK\n", ">a\nMK\n>b\nMKVR\n>c\nM\n"])
def test_a_file_that_changes_is_noticed(tmp_path, change):
    path = written(tmp_path, ">a\nMK\n>b\nMKV\n")
    found = survey(path, max_length=9)
    path.write_text(change)
    with pytest.raises(ValueError, match="has changed since it was first read"):
        list(found.windows(10**9))


def test_many_bad_records_are_counted():
    bad = [BadRecord(i, f"p{i}", "the sequence is empty") for i in range(1, 26)]
    text = str(bad_records_error("in.fasta", bad))
    assert text.startswith("in.fasta has 25 bad records:\n  line 1, 'p1': the sequence is empty\n")
    assert text.endswith("line 20, 'p20': the sequence is empty\n  and 5 more")
    assert "bad record:" in str(bad_records_error("in.fasta", bad[:1]))


def test_a_survey_of_nothing(tmp_path):
    found = survey(written(tmp_path, ""), max_length=9)
    assert found.lengths.dtype == torch.int64
    assert list(found.windows(1)) == []
