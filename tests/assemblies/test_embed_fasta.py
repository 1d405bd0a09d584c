from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from support import assert_close

from brickwork.assemblies import LCPLM, LCPLMConfig, embed_records
from brickwork.assemblies.proteins import (
    RESIDUES,
    BadRecord,
    ProteinEmbeddings,
    embed_fasta,
    embed_proteins,
    embed_residues,
    tokenize,
)

HYBRID = {
    "d_intermediate": 128,
    "attn_layer_idx": [1],
    "attn_cfg": {"num_heads": 2},
    "ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 16},
}


def tiny(**options):
    torch.manual_seed(0)
    model = LCPLM(LCPLMConfig(d_model=16, n_layer=2, **options))
    torch.nn.init.normal_(model.embedding.weight)
    return model.eval()


def proteins(count, longest, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choices(RESIDUES, k=draw.randint(1, longest))) for _ in range(count)]


def fasta(folder, sequences, ids=None, name="in.fasta"):
    path = folder / name
    ids = ids or [f"p{i}" for i in range(len(sequences))]
    path.write_text("".join(f">{i} text\n{s}\n" for i, s in zip(ids, sequences)))
    return path


def alone(model, sequence, layer=-1):
    with torch.no_grad():
        output = model(tokenize([sequence]).input_ids, output_hidden_states=True)
    return output.hidden_states[layer][0, 1:-1]


class Forwards:
    """The shape of each batch that a model is given; may stop it in one of them."""

    def __init__(self, model, stop_at=None):
        self.shapes, self.stop_at = [], stop_at
        self.hook = model.register_forward_pre_hook(self.note)

    def note(self, model, arguments):
        if len(self.shapes) == self.stop_at:
            raise KeyboardInterrupt
        self.shapes.append(tuple(arguments[0].shape))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hook.remove()


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["mamba1", "hybrid"])
def test_every_record_has_what_it_has_alone(tmp_path, options):
    """P4: whatever it shares a batch with; equal sequences and equal records have a row each."""
    model = tiny(**options)
    sequences = proteins(30, 60)
    sequences[7] = sequences[3]
    ids = [f"p{i}" for i in range(30)]
    sequences[9], ids[9] = sequences[4], ids[4]
    path, out = fasta(tmp_path, sequences, ids), tmp_path / "out.safetensors"
    with Forwards(model) as batches:
        assert embed_fasta(model, path, out, max_tokens=130, pool="both", layers=[0, 1, -1]) == []
    assert len(batches.shapes) > 5
    assert all(rows * tokens <= 130 for rows, tokens in batches.shapes)
    found = ProteinEmbeddings(out)
    assert found.ids == ids
    assert found.layers == (0, 1, 2)
    assert len(found) == 30
    assert found.lengths.tolist() == [len(s) for s in sequences]
    assert found.records.tolist() == list(range(30))
    for i, sequence in enumerate(sequences):
        for layer in found.layers:
            states = alone(model, sequence, layer)
            assert_close(found.residues(i, layer=layer), states, terms=256)
            assert_close(found.mean(layer=layer)[i], states.mean(0), terms=256)
    assert torch.equal(found.mean(), found.mean(layer=2))
    tensors = load_file(out)
    assert torch.equal(tensors["mean.2"], found.mean())
    assert torch.equal(tensors["residues.1"][: len(sequences[0])], found.residues(0, layer=1))
    assert bytes(tensors["ids"].tolist()).decode().split("\n") == ids


def test_records_alone_in_their_batch_are_equal_to_the_bit(tmp_path):
    model, sequences = tiny(), proteins(8, 40)
    embed_fasta(model, fasta(tmp_path, sequences), tmp_path / "out", max_tokens=42, pool="residues")
    with Forwards(model) as batches:
        found = ProteinEmbeddings(tmp_path / "out")
    for i, sequence in enumerate(sequences):
        if len(sequence) > 20:
            assert torch.equal(found.residues(i), alone(model, sequence))
    assert batches.shapes == []
    with pytest.raises(ValueError, match=r"the file has no mean.2, only"):
        found.mean()
    with pytest.raises(ValueError, match=r"the file has no residues.1, only"):
        found.residues(0, layer=1)
    with pytest.raises(ValueError, match=r"index must be in \[0, 8\), got 8"):
        found.residues(8)


def test_the_same_in_memory():
    model, sequences = tiny(), proteins(12, 40)
    means = embed_proteins(model, sequences, max_tokens=100, layer=1)
    residues = embed_residues(model, sequences, max_tokens=100, layer=1)
    for i, sequence in enumerate(sequences):
        assert_close(residues[i], alone(model, sequence, 1), terms=256)
        assert_close(means[i], alone(model, sequence, 1).mean(0), terms=256)


def test_batches_hold_proteins_of_like_length():
    model = tiny()
    with Forwards(model) as batches:
        embed_proteins(model, ["M"] * 30 + ["MKVLAGSERT" * 10], max_tokens=102)
    assert batches.shapes == [(1, 102), (30, 3)]


def test_one_long_protein(tmp_path):
    model, sequence = tiny(), "".join(proteins(60, 100))
    path = fasta(tmp_path, ["MK", sequence, "ML"])
    with pytest.raises(ValueError, match=f"line 3, 'p1': {len(sequence)} residues are longer than"):
        embed_fasta(model, path, tmp_path / "out", max_tokens=1000)
    embed_fasta(model, path, tmp_path / "out", max_tokens=len(sequence) + 2, pool="residues")
    found = ProteinEmbeddings(tmp_path / "out")
    assert torch.equal(found.residues(1), alone(model, sequence))
    embed_fasta(model, path, tmp_path / "cut", max_tokens=100, max_length=50, truncate=True)
    found = ProteinEmbeddings(tmp_path / "cut")
    assert found.lengths.tolist() == [2, 50, 2]
    assert_close(found.mean()[1], alone(model, sequence[:50]).mean(0), terms=256)


def test_input_may_be_zipped(tmp_path):
    model, path = tiny(), fasta(tmp_path, proteins(5, 20))
    embed_fasta(model, path, tmp_path / "plain")
    (tmp_path / "in.gz").write_bytes(gzip.compress(path.read_bytes()))
    embed_fasta(model, tmp_path / "in.gz", tmp_path / "zipped")
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "zipped").read_bytes()


def test_bad_records_stop_it_before_anything_is_computed_or_are_left_out(tmp_path):
    path = tmp_path / "in.fasta"
    path.write_text(
        ">good\nMKV\n>\nMK\n>empty\n>letter\nMKJ\n>long\nMKVLAGSERT\n>good\nMKV\n>good\nMMM\n>x\nM\n"
    )
    model, out = tiny(), tmp_path / "out"
    expected = [
        (3, "", "the header names no id"),
        (5, "empty", "the sequence is empty"),
        (6, "letter", f"residue 3 is 'J', not one of '{RESIDUES}.-'"),
        (
            8,
            "long",
            "10 residues are longer than the 9 allowed (max_length; by default max_tokens - 2)",
        ),
        (12, "good", "the id of line 1 again, with another sequence"),
    ]
    with Forwards(model) as batches, pytest.raises(ValueError) as error:
        embed_fasta(model, path, out, max_length=9)
    assert batches.shapes == []
    assert "in.fasta has 5 bad records:" in str(error.value)
    for line, id_, reason in expected:
        assert f"line {line}, {id_!r}: {reason}" in str(error.value)
    assert os.listdir(tmp_path) == ["in.fasta"]
    bad = embed_fasta(model, path, out, max_length=9, skip_bad=True)
    assert bad == [BadRecord(*record) for record in expected]
    found = ProteinEmbeddings(out)
    assert found.ids == ["good", "good", "x"]
    assert found.records.tolist() == [0, 5, 7]
    embed_fasta(
        model, path, out, max_length=9, skip_bad=True, keep_duplicate_ids=True, overwrite=True
    )
    found = ProteinEmbeddings(out)
    assert found.ids == ["good", "good", "good", "x"]
    assert_close(found.mean()[2], alone(model, "MMM").mean(0), terms=256)


@pytest.mark.parametrize("content", ["", "\n\n", ">only\nBAD*\n"])
def test_nothing_to_embed(tmp_path, content):
    path = tmp_path / "in.fasta"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"in\.fasta holds no record to embed"):
        embed_fasta(tiny(), path, tmp_path / "out", skip_bad=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 2}, "max_tokens must be an integer of at least 3, got 2"),
        ({"max_length": 0}, "max_length must be an integer of at least 1, got 0"),
        ({"max_tokens": 9, "max_length": 8}, "at most max_tokens - 2 = 7, got 8"),
        ({"pool": "max"}, "pool must be one of .*, got 'max'"),
        ({"saved_dtype": torch.int8}, "saved_dtype must be one of .*, got torch.int8"),
        ({"layers": []}, "layers must be at least one"),
        ({"layers": [2, -1]}, "layers must be at least one, and each once"),
        ({"layers": [3]}, r"layers must be in \[-3, 3\), got 3"),
        ({"layers": [True]}, "got True"),
        ({"resume": True, "overwrite": True}, "resume and overwrite must not both be True"),
    ],
)
def test_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        embed_fasta(tiny(), fasta(tmp_path, ["MK"]), tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["in.fasta"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_of_the_model_and_of_the_file(tmp_path, dtype):
    path, sequences = fasta(tmp_path, ["MKV", "MKVLAGS"]), ["MKV", "MKVLAGS"]
    exact = embed_proteins(tiny(), sequences)
    embed_fasta(tiny(), path, tmp_path / "saved", saved_dtype=dtype)
    found = ProteinEmbeddings(tmp_path / "saved").mean()
    assert found.dtype == dtype
    assert torch.equal(found, exact.to(dtype))
    embed_fasta(tiny().to(dtype), path, tmp_path / "of")
    found = ProteinEmbeddings(tmp_path / "of").mean()
    assert found.dtype == torch.float32
    narrow = torch.float32 if dtype == torch.float64 else dtype
    assert_close(found, exact, terms=256, compute=narrow)
    assert embed_proteins(tiny().to(dtype), sequences).dtype == torch.promote_types(
        dtype, torch.float32
    )


def test_an_embedding_that_is_not_finite_is_an_error(tmp_path):
    model = tiny()
    model.embedding.weight.data[4, 0] = float("nan")
    path = fasta(tmp_path, ["MK", "L", "MKV"])
    with pytest.raises(ValueError, match=r"layer 2 is not finite in torch.float32.*\(p1\)"):
        embed_fasta(model, path, tmp_path / "out", max_tokens=5)


def test_resumed_it_computes_what_is_missing_and_no_more(tmp_path):
    model, path = tiny(), fasta(tmp_path, proteins(200, 30))
    options = {"max_tokens": 64, "pool": "both"}
    with Forwards(model) as whole:
        embed_fasta(model, path, tmp_path / "whole", **options)
    assert len(whole.shapes) > 40
    out = tmp_path / "out"
    done = 0
    for stop_at in (0, 1, 17, 5):
        with Forwards(model, stop_at) as batches, pytest.raises(KeyboardInterrupt):
            embed_fasta(model, path, out, resume=True, **options)
        done += len(batches.shapes)
        assert not out.exists()
    assert done == 23
    with Forwards(model) as batches:
        embed_fasta(model, path, out, resume=True, **options)
    assert batches.shapes == whole.shapes[23:]
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    with Forwards(model) as batches:
        embed_fasta(model, path, out, resume=True, **options)
    assert batches.shapes == []


def test_it_is_resumed_with_the_same_only(tmp_path):
    model, path, out = tiny(), fasta(tmp_path, proteins(20, 30)), tmp_path / "out"

    def resume(model=model, path=path, **options):
        embed_fasta(model, path, out, **{"max_tokens": 64, "resume": True, **options})

    def refuses():
        other = tiny()
        other.layers[0].norm.weight.data[3] *= 1.0001
        with pytest.raises(ValueError, match="begun with model_sha256 = "):
            resume(other)
        with pytest.raises(ValueError, match="begun with model_sha256 = "):
            resume(tiny().bfloat16())
        with pytest.raises(ValueError, match="begun with model_sha256 = "):
            resume(tiny(norm_epsilon=1e-6))
        changed = fasta(tmp_path, [*proteins(19, 30), "M"], name="other.fasta")
        with pytest.raises(ValueError, match="begun with records_sha256 = "):
            resume(path=changed)
        for name, value, was in [
            ("max_tokens", 65, "64"),
            ("layers", [1], r"\[2\]"),
            ("pool", "both", "'mean'"),
            ("max_length", 40, "62"),
            ("truncate", True, "False"),
            ("keep_duplicate_ids", True, "False"),
            ("saved_dtype", torch.float16, "'float32'"),
        ]:
            with pytest.raises(ValueError, match=f"was begun with {name} = {was}, not"):
                resume(**{"max_length": 62, name: value})

    with Forwards(model, 3), pytest.raises(KeyboardInterrupt):
        resume()
    refuses()
    same = path.read_text().replace("\n", "\r\n")  # the same records in another spelling
    (tmp_path / "same.fasta").write_bytes(gzip.compress(same.encode()))
    resume(path=tmp_path / "same.fasta")
    refuses()


def test_killed_it_goes_on_and_nobody_else_writes_meanwhile(tmp_path):
    model, path, out = tiny(), fasta(tmp_path, proteins(200, 30)), tmp_path / "out"
    model.save_pretrained(tmp_path / "model")
    code = """
import sys, time
from brickwork.assemblies import lc_plm_cli, resumable_file
from brickwork.assemblies.lc_plm import LCPLM
resumable_file._SECONDS = 0.0
forward = LCPLM.forward
def slow(self, *args, **options):
    time.sleep(0.05)
    return forward(self, *args, **options)
LCPLM.forward = slow
lc_plm_cli.main(sys.argv[1:])
"""
    options = ["--model", str(tmp_path / "model"), "--max-tokens", "64", "--resume", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "embed", str(path), str(out), *options],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    journal = tmp_path / "out.partial.done"
    try:
        deadline = time.monotonic() + 120
        while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(ValueError, match="another program is writing"):
            embed_fasta(model, path, out, max_tokens=64, resume=True)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    done = journal.read_bytes().count(b"\n") - 1
    assert not out.exists()
    with Forwards(model) as batches:
        embed_fasta(model, path, out, max_tokens=64, resume=True)
    with Forwards(model) as whole:
        embed_fasta(model, path, tmp_path / "whole", max_tokens=64)
    assert 3 <= done < len(whole.shapes)
    assert batches.shapes == whole.shapes[done:]
    assert_close(
        ProteinEmbeddings(out).mean(), ProteinEmbeddings(tmp_path / "whole").mean(), terms=256
    )
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out"]


def test_the_fasta_file_is_not_overwritten(tmp_path):
    path = fasta(tmp_path, ["MK"])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="out must not be the FASTA file"):
        embed_fasta(tiny(), path, path, overwrite=True)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match=r"out must be a file, .* is a folder"):
        embed_fasta(tiny(), path, tmp_path, overwrite=True)


def test_windows_are_short_and_their_borders_show_nowhere(tmp_path, monkeypatch):
    model, sequences = tiny(), proteins(60, 20)
    path = fasta(tmp_path, sequences)
    monkeypatch.setattr(embed_records, "_WINDOW", 1)
    embed_fasta(model, path, tmp_path / "out", max_tokens=50, pool="both")
    found = ProteinEmbeddings(tmp_path / "out")
    assert found.ids == [f"p{i}" for i in range(60)]
    for i, sequence in enumerate(sequences):
        assert_close(found.residues(i), alone(model, sequence), terms=256)


def test_progress_goes_to_standard_error(tmp_path, capsys):
    model, path = tiny(), fasta(tmp_path, ["MK", "MKV"])
    embed_fasta(model, path, tmp_path / "out", progress=True)
    assert "5.00/5.00" in capsys.readouterr().err
    embed_fasta(model, path, tmp_path / "other")
    assert capsys.readouterr().err == ""
    embed_fasta(model, path, tmp_path / "other", resume=True, progress=True)
    assert "other is there already" in capsys.readouterr().err


def test_without_safetensors_or_tqdm_it_says_what_to_install(tmp_path, monkeypatch):
    model, path = tiny(), fasta(tmp_path, ["MK"])
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"pip install 'brickwork\[train\]'"):
        embed_fasta(model, path, tmp_path / "out", progress=True)
    embed_fasta(model, path, tmp_path / "out", resume=True)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'brickwork\[train\]'"):
        ProteinEmbeddings(tmp_path / "out")


def test_a_file_of_something_else_is_not_read(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.safetensors is not a file of embeddings"):
        ProteinEmbeddings(tmp_path / "model.safetensors")
