"""Options and the report of the benchmarks."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=2, help="threads of every side (default: 2)")
    parser.addoption("--report", type=Path, help="write the table of ratios here, as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--threads"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [
        (bench.name, {k: v for k, v in bench.extra_info.items() if k.startswith("x ")}, bench)
        for bench in (session.benchmarks if session else [])
        if bench.extra_info
    ]
    if not rows:
        return
    versions = {name: _version(name) for name in ("torch", "transformers", "mamba-ssm", "mambapy")}
    known = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    lines = [
        "Time of each peer over brickwork's, of medians of interleaved rounds in one process; "
        "values were checked equal first.",
        "",
        f"{platform.machine()}, {config.getoption('--threads')} threads, Python "
        f"{platform.python_version()}, {known}.",
        "",
        "| case | peer | peer / brickwork |",
        "|---|---|---|",
    ]
    for name, ratios, _ in rows:
        lines += [f"| {name} | {peer[2:]} | {ratio} |" for peer, ratio in ratios.items()]
    text = "\n".join(lines)
    terminalreporter.write_sep("=", "ratios")
    terminalreporter.write_line(text)
    if config.getoption("--report"):
        config.getoption("--report").write_text(text + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
