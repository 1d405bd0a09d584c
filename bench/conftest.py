"""Options and the report of the benchmarks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=2, help="threads of every side (default: 2)")
    parser.addoption("--report", type=Path, help="write the table of ratios here, as Markdown")


TABLES = pytest.StashKey[dict[str, list[tuple[object, ...]]]]()


@pytest.fixture
def tables(pytestconfig: pytest.Config) -> dict[str, list[tuple[object, ...]]]:
    """Further tables of the report: by title a heading and rows."""
    return pytestconfig.stash[TABLES]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLES] = {}
    torch.set_num_threads(config.getoption("--threads"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows: list[tuple[object, ...]] = [
        (f"{Path(bench.fullname).name.split('::')[0]} {bench.name}", key[2:], value)
        for bench in (session.benchmarks if session else [])
        for key, value in bench.extra_info.items()
        if key.startswith("x ")
    ]
    tables = dict(config.stash[TABLES])
    if rows:
        title = "Time of each peer over brickwork's"
        tables = {title: [("case", "peer", "peer / brickwork"), *rows]} | tables
    if not tables:
        return
    text = "\n".join([*_setting(config), *(_table(*table) for table in tables.items())])
    terminalreporter.write_sep("=", "report")
    terminalreporter.write_line(text)
    if config.getoption("--report"):
        config.getoption("--report").write_text(text + "\n", encoding="utf-8")


def _setting(config: pytest.Config) -> Iterator[str]:
    versions = {name: _version(name) for name in ("torch", "transformers", "mamba-ssm", "mambapy")}
    yield (
        "Medians of interleaved rounds; before anything is timed, values (and "
        "gradients, where there are any) are held against the float64 reference: within 1e-4 of "
        "their largest, of LCPLM 1e-3."
    )
    yield ""
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    machine = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    threads = config.getoption("--threads")
    yield (
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {machine}, {threads} threads, "
        f"Python {platform.python_version()}, {known}; "
        f"allocator: {os.environ.get('GLIBC_TUNABLES') or 'default'}."
    )


def _table(title: str, rows: list[tuple[object, ...]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(["", f"## {title}", "", *lines])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
