"""bench/gpu.sh goes through all its lines without a GPU, and says where there is none."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return subprocess.run(
        [ROOT / "bench" / "gpu.sh", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_dry_run(tmp_path):
    done = run("--dry", "--out", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (table,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    ours = {(row["step"], row["op"]) for row in rows if row["implementation"].endswith("triton")}
    for op in ("rms_norm", "add_norm", "rope_qk", "swiglu", "experts"):
        assert {("values", op), ("graph", op), ("time", op)} <= ours
    for op in ("causal_conv1d", "selective_scan", "ssd_scan"):
        assert {("values", op), ("graph", op), ("time", op)} <= ours
    assert ("values", "rope") in ours  # among the cases with every option
    assert not [row for row in rows if row["result"].startswith("FAILED")]
    assert "nothing here is a measurement" in table.with_suffix(".md").read_text()


def test_time_that_is_over_is_said(tmp_path):
    done = run("--dry", "--minutes", "0", "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("skipped: 0.0 minutes are over") == 5


def test_without_a_gpu():
    if not torch.cuda.is_available():
        done = run()
        assert done.returncode == 2
        assert "There is no GPU here" in done.stderr
