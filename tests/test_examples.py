"""The examples: they run, they learn, and a run that is stopped goes on exactly where it was."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
TINY = {
    "train_mini_llada": "--dim 16 --layers 1 --heads 2 --mlp-dim 16",
    "train_rish": "--dim 16 --layers 1 --heads 2 --kv-heads 1 --expert-dim 8 --experts 4",
    "train_lc_plm": "--dim 16 --layers 1 --state 4",
}
SHORT = "--steps 8 --batch 2 --length 24 --eval-every 3 --warmup 2"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Import a module of the examples, as a script beside it would."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    """A small text and a few proteins, enough to hold some out."""
    generator = torch.Generator().manual_seed(0)
    words = ["the", "a", "wit", "salt", "of", "fool", "truth", "law", "and", "is", "to"]
    entries = []
    for i in range(12):
        drawn = [words[w] for w in torch.randint(11, (20,), generator=generator).tolist()]
        entries.append(f"WORD{i}, n.  {' '.join(drawn)}.\n\n    A verse.")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(entries))
    residues = "LAGVSERTIDPKQNFYMHWC"
    proteins = []
    for i in range(9):
        draws = torch.randint(20, (20 + 3 * i,), generator=generator).tolist()
        proteins.append(f">x|{i}| protein {i} [here]\n" + "".join(residues[d] for d in draws))
    fasta = tmp_path / "proteins.fasta"
    fasta.write_text("\n".join(proteins))
    return {"train_mini_llada": text, "train_rish": text, "train_lc_plm": fasta}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a run lives."""
    return tmp_path / "run"


def options(name: str, data: dict[str, Path], out: Path, *more: str) -> list[str]:
    words = f"{SHORT} {TINY[name]}".split()
    return ["--data", str(data[name]), "--out", str(out), *words, *more]


def start(script: str, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{script}.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


def run(script: str, arguments: list[str], code: int = 0) -> tuple[str, str]:
    return finish(start(script, arguments), code)


def state_of(folder: Path) -> dict:
    (checkpoint,) = folder.glob("step-*")
    return torch.load(checkpoint / "training.pt", weights_only=True)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (checkpoint,) = folder.glob("step-*")
    return load_file(checkpoint / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Equal to the bit: the losses, what was evaluated, the weights, the optimiser's moments."""
    first, second = state_of(one), state_of(other)
    assert first["losses"] == second["losses"]
    assert first["held_out"] == second["held_out"]
    assert torch.equal(first["generator"], second["generator"])
    assert torch.equal(first["global_generator"], second["global_generator"])
    moments = [state["optimizer"]["state"] for state in (first, second)]
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    torch.testing.assert_close(weights_of(one), weights_of(other), rtol=0, atol=0)


def test_the_quickstart_learns():
    out, _ = run("quickstart", [])
    losses = [float(found) for found in re.findall(r": (\d+\.\d+) nats", out)]
    assert len(losses) == 6
    assert losses[0] > 5  # knows nothing: ln 256 = 5.5
    assert losses[-1] < 2.4  # the text's unigram entropy is 3.1
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) < 40


@pytest.mark.parametrize("name", TINY)
def test_an_interrupted_run_ends_as_one_left_alone(name, example, data, tmp_path, monkeypatch):
    script, training = example(name), example("training")
    script.main(options(name, data, tmp_path / "whole"))

    rate = training.learning_rate

    def interrupt(step, args):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return rate(step, args)

    monkeypatch.setattr(training, "learning_rate", interrupt)
    with pytest.raises(SystemExit, match="130"):
        script.main(options(name, data, tmp_path / "parts"))
    monkeypatch.setattr(training, "learning_rate", rate)
    assert len(state_of(tmp_path / "parts")["losses"]) == 5
    torch.manual_seed(123)  # a resumed run starts from another state of everything
    resumed = script.main(["--out", str(tmp_path / "parts"), "--resume"])
    assert resumed.run.finished
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_script_stopped_by_ctrl_c_resumes_exactly(data, tmp_path):
    name = "train_rish"
    long = ["--steps", "400", "--eval-every", "50"]
    whole = start(name, options(name, data, tmp_path / "whole", *long))
    parts = start(name, options(name, data, tmp_path / "parts", *long))
    deadline = time.monotonic() + 300
    while not list((tmp_path / "parts").glob("step-*")):
        assert parts.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parts.send_signal(signal.SIGINT)
    out, err = finish(parts, 130)
    steps = int(re.search(r"Stopped at step (\d+) of 400", out)[1])
    assert 50 <= steps < 400
    assert "Ctrl-C again quits at once" in out + err
    assert len(state_of(tmp_path / "parts")["losses"]) == steps

    out, err = run(name, ["--out", str(tmp_path / "parts"), "--resume"])
    assert "held-out bits per byte" in out
    for shown in ("Rish loss ", "tokens/s", "held-out", "100%"):
        assert shown in err
    assert out == finish(whole)[0]
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_the_minutes_end_a_run_with_a_checkpoint(example, data, folder):
    script = example("train_rish")
    stopped = script.main(options("train_rish", data, folder, "--minutes", "1e-9"))
    assert (stopped.run.step, stopped.run.finished) == (0, False)
    assert script.main(["--out", str(folder), "--resume"]).run.finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--data", "nowhere.txt"], "--data: nowhere.txt is not a file"),
        (["--resume"], "--resume: there is no checkpoint in "),
        (["--steps", "0"], "--steps must be above 0, got 0"),
        (["--lr", "-1"], "--lr must be above 0, got -1.0"),
        (["--dim", "15"], "hidden_size must be an even multiple of"),
        (["--top-k", "9"], "num_experts_per_tok must be at most num_experts"),
        (["--length", "9999"], "length must be at most the "),
        (["--data", os.devnull], "--data: /dev/null is not a file"),
    ],
)
def test_wrong_arguments_end_with_their_reason(change, message, example, data, folder, capsys):
    script, training = example("train_rish"), example("training")
    arguments = options("train_rish", data, folder, *change)
    with pytest.raises(SystemExit) as ended:
        training.run_script(lambda: script.main(arguments))
    assert ended.value.code not in (0, None)
    assert message in f"{ended.value.code} {capsys.readouterr().err}"
    assert not folder.exists()


def test_a_resumed_run_keeps_its_settings_and_its_data(example, data, folder, capsys):
    script = example("train_rish")
    script.main(options("train_rish", data, folder))
    with pytest.raises(SystemExit):
        script.main(options("train_rish", data, folder))
    assert "holds a run already; continue it with --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["--out", str(folder), "--resume", "--lr", "0.5"])
    assert "--lr was 0.003 when the run" in capsys.readouterr().err
    data["train_rish"].write_text(data["train_rish"].read_text() + "\n\nMORE, n.")
    with pytest.raises(ValueError, match=r"is not the file that the run in .* began with"):
        script.main(["--out", str(folder), "--resume"])


@pytest.mark.parametrize("file", ["training.pt", "model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_named(file, damage, example, data, folder):
    script = example("train_rish")
    script.main(options("train_rish", data, folder))
    (checkpoint,) = folder.glob("step-*")
    if damage == "cut":
        (checkpoint / file).write_bytes((checkpoint / file).read_bytes()[:-50])
    else:
        (checkpoint / file).unlink()
    with pytest.raises(ValueError, match=f"the checkpoint {checkpoint} is damaged: .*{file}"):
        script.main(["--out", str(folder), "--resume"])


def test_a_checkpoint_that_cannot_be_written_loses_nothing(example, data, folder, monkeypatch):
    training, script = example("training"), example("train_rish")
    script.main(options("train_rish", data, folder))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    model = example("brickwork.assemblies").Rish.from_pretrained(next(folder.glob("step-*")))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        training.save_checkpoint(folder, 9, model, {"losses": []})
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_training_goes_on_when_a_checkpoint_cannot_be_written(
    example, data, folder, monkeypatch, capsys
):
    training, script = example("training"), example("train_rish")
    save, failed = training.save_checkpoint, []

    def full_once(folder, step, *rest):
        if not failed:
            failed.append(step)
            raise OSError(28, "No space left on device")
        save(folder, step, *rest)

    monkeypatch.setattr(training, "save_checkpoint", full_once)
    assert script.main(options("train_rish", data, folder)).run.finished
    assert failed == [3]
    assert "Going on without a checkpoint of step 3" in "".join(capsys.readouterr())


def test_ctrl_c_while_saving_waits_for_the_checkpoint(example, data, folder, monkeypatch):
    training, script = example("training"), example("train_rish")
    sync = os.fsync

    def interrupted(descriptor):
        signal.raise_signal(signal.SIGINT)
        sync(descriptor)

    monkeypatch.setattr(training.os, "fsync", interrupted)
    with pytest.raises(SystemExit, match="130"):
        script.main(options("train_rish", data, folder))
    assert len(state_of(folder)["losses"]) == 3  # the first checkpoint, and whole
    assert [path.name for path in folder.iterdir()] == ["step-000003"]


def test_a_second_ctrl_c_quits_at_once_and_leaves_the_last_checkpoint(
    example, data, folder, monkeypatch
):
    training, script = example("training"), example("train_rish")
    rate = training.learning_rate

    def twice(step, args):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return rate(step, args)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(training, "learning_rate", twice)
    with pytest.raises(KeyboardInterrupt):
        script.main(options("train_rish", data, folder))
    assert len(state_of(folder)["losses"]) == 3
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_a_killed_save_left_behind_is_passed_over_and_removed(example, data, folder):
    training, script = example("training"), example("train_rish")
    (folder / ".step-000003.partial").mkdir(parents=True)
    (folder / ".step-000003.partial" / "training.pt").write_bytes(b"half")
    assert training.latest_checkpoint(folder) is None
    script.main(options("train_rish", data, folder))
    assert [path.name for path in folder.iterdir()] == ["step-000008"]


def test_a_loss_that_is_not_finite_is_an_error(example, data, folder):
    script = example("train_rish")
    with pytest.raises(ValueError, match=r"the loss of step \d+ is nan: try a lower --lr"):
        script.main(options("train_rish", data, folder, "--lr", "1e30", "--clip", "1e30"))


def test_held_out_text_is_whole_documents_that_training_never_sees(example):
    corpora = example("corpora")
    kept, held_out = corpora.read_text()
    assert len(kept) > 800
    assert len(held_out) > 90

    def runs(documents):
        flat = [" ".join(document.split()) for document in documents]
        return {text[i : i + 40] for text in flat for i in range(len(text) - 39)}

    assert not runs(kept) & runs(held_out)
    text = corpora.DICTIONARY.read_text()
    assert all(document in text for document in held_out)
    assert sum(document.startswith("STORY, n.") for document in kept + held_out) == 1
    assert kept == corpora.read_text()[0]


def test_no_held_out_protein_has_a_close_relative_in_training(example):
    corpora = example("corpora")
    kept, held_out = corpora.read_proteins()
    assert len(kept) + len(held_out) == 79  # the copies in the inverted repeat are gone
    assert len(held_out) >= 8

    def runs(proteins):
        return {p.sequence[i : i + 8] for p in proteins for i in range(len(p.sequence) - 7)}

    assert not runs(kept) & runs(held_out)
    assert kept == corpora.read_proteins()[0]


def test_streams_and_the_unigram_baseline(example):
    corpora = example("corpora")
    stream = corpora.text_stream(["ab", "c"])
    assert stream.ids.tolist() == [97, 98, corpora.END, 99, corpora.END]
    assert stream.seq_ids.tolist() == [0, 0, 0, 1, 1]
    assert stream.rows(2).tolist() == [[97, 98], [corpora.END, 99]]
    ids, seq_ids = stream.windows(50, 3, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in ids.tolist()} == {(97, 98, 256), (98, 256, 99), (256, 99, 256)}
    assert ids.shape == seq_ids.shape
    assert corpora.to_text(torch.tensor([97, 10, 200, corpora.MASK, corpora.END])) == "a\n\ufffd_¶"
    probabilities = corpora.unigram(torch.tensor([0, 0, 1]), 3).exp()
    torch.testing.assert_close(probabilities, torch.tensor([3.0, 2.0, 1.0]) / 6)


class Page(HTMLParser):
    """Collects the text of a page, its tags, and every attribute that could fetch something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]

    def handle_startendtag(self, tag, attributes):
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_demo_writes_one_page_that_needs_nothing_else(example, data, tmp_path):
    demo = example("demo")
    trained = [
        example(name).main(options(name, data, tmp_path / name)) for name in TINY
    ]  # fmt: skip
    html = demo.write_page(*trained)
    page = Page(html)
    assert not page.open
    assert all(link.startswith("#") for link in page.links)
    assert "url(http" not in html
    assert "@import" not in html
    assert page.tags.count("svg") == 3
    for t in trained:
        assert f"{t.bits.mean():.3f}" in page.words
        assert f"{t.baseline.mean():.3f}" in page.words
    assert len(set(re.findall(r' id="([^"]+)"', html))) == len(re.findall(r' id="', html))


def test_the_demo_shows_entries_that_no_model_has_seen(example):
    demo, corpora = example("demo"), example("corpora")
    held_out = corpora.read_text()[1]
    assert demo.SENTENCE in held_out
    for prompt in demo.PROMPTS:
        assert any(document.startswith(prompt) for document in held_out)
    given = example("train_mini_llada").EXAMPLE.split("com__t")[0]
    assert any(document.startswith(given) for document in held_out)


def test_the_demo_stops_and_resumes(example, tmp_path, monkeypatch, capsys):
    demo = example("demo")
    calls: list[list[str]] = []

    def script(stop: bool) -> ModuleType:
        module = ModuleType("script", "A script.")

        def main(arguments):
            calls.append(arguments)
            (Path(arguments[1]) / "step-000001").mkdir(parents=True, exist_ok=True)
            if stop:
                raise SystemExit(130)

        module.main = main
        return module

    for name in TINY:
        monkeypatch.setattr(demo, name, script(stop=name == "train_lc_plm"))
    (tmp_path / "runs").mkdir()  # the training scripts' own, not the demo's to clear away
    with pytest.raises(SystemExit, match="130"):
        demo.main(["--out", str(tmp_path)])
    assert (tmp_path / "runs").exists()
    assert not (tmp_path / "index.html").exists()
    assert len(calls) == 3
    assert not any("--resume" in arguments for arguments in calls)
    monkeypatch.setattr(demo, "train_lc_plm", script(stop=False))
    monkeypatch.setattr(demo, "write_page", lambda *_: "page")
    demo.main(["--out", str(tmp_path), "--resume"])
    assert all("--resume" in arguments for arguments in calls[3:])
    assert (tmp_path / "index.html").read_text() == "page"
