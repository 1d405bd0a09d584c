"""What bench/gpu.py measures with and writes to: the device and the report."""

from __future__ import annotations

import contextlib
import csv
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Case

FIELDS = ("step", "op", "size", "direction", "implementation", "result")
FIELDS += ("microseconds", "rate", "share", "ratio")
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "quack-kernels")
PACKAGES += ("flash-linear-attention", "mamba-ssm", "causal-conv1d")
FLUSH = 2**28  # bytes, more than any second-level cache


class Device:
    """The GPU, or in a dry run the CPU behind the same calls."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.name = platform.machine() if dry else torch.cuda.get_device_name()
        self.flush = torch.empty(1 if dry else FLUSH, dtype=torch.uint8, device=self.device)
        self.stream = None if dry else torch.cuda.Stream()
        if dry:
            _round_as_a_gpu()

    def working(self) -> contextlib.AbstractContextManager[object]:
        """A context in which all work is put on the stream that graphs are captured on: a backward
        pass runs where its forward pass ran, and the default stream cannot be captured."""
        if self.stream is None:
            from interpreter import language_patched_once

            return language_patched_once()
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """A replay of `run`'s CUDA graph that returns the tensors it was captured with."""
        for _ in range(1 if self.dry else 3):
            run()
        if self.dry:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            results = run()

        def replay() -> Any:
            graph.replay()
            return results

        return replay

    def seconds(self, run: Callable[[], Any], rounds: int) -> float:
        """Median time of `run` on the device."""
        times = []
        for _ in range(rounds):
            self.flush.zero_()
            if self.dry:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
                continue
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
        return statistics.median(times)

    def heading(self) -> str:
        found = []
        for package in PACKAGES:
            try:
                found.append(f"{package} {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                found.append(f"{package} not here")
        kind = "A dry run: nothing here is a measurement. " if self.dry else ""
        return f"{kind}{self.name}, {datetime.now(timezone.utc):%Y-%m-%d}, {', '.join(found)}."


def _round_as_a_gpu() -> None:
    """Make Triton's interpreter round to bfloat16, as the tests do; gpu.sh has them on the path."""
    import pytest
    from interpreter import round_to_nearest

    round_to_nearest(pytest.MonkeyPatch())


class Report:
    """Rows, printed and written to a CSV and a table as they come: a run cut off keeps them."""

    def __init__(self, heading: str, stem: Path) -> None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        self.heading, self.stem = heading, stem
        self.rows: list[dict[str, str]] = []

    def add(self, step: str, case: Case | None, result: str, **fields: str) -> None:
        row = dict.fromkeys(FIELDS, "") | {"step": step, "result": result} | fields
        if case is not None:
            row |= {"op": case.op, "size": case.size}
        self.rows.append(row)
        print("  ".join(value for value in row.values() if value), flush=True)
        self.save()

    @property
    def failed(self) -> bool:
        return any(row["result"].startswith("FAILED") for row in self.rows)

    def save(self) -> None:
        with self.stem.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(self.rows)
        lines = [self.heading, "", f"| {' | '.join(FIELDS)} |", "|" + "---|" * len(FIELDS)]
        lines += [f"| {' | '.join(row.values())} |" for row in self.rows]
        self.stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
