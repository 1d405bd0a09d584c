"""Run one op's kernels under triton-viz's sanitizer, which proves every load and store inside its
tensor or names the line that is not: `TRITON_INTERPRET=1 python tests/sanitize.py rms_norm`.

The cases are the functions `case_*` of `tests/triton/sanitized/<op>.py`. Nothing is computed:
kernels run on symbols, so results are what `torch.empty` found. A kernel of `configurations()` that
no case launches is an error. Ends with status 1 at the first violation.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import triton_viz

CASES = Path(__file__).parent / "triton" / "sanitized"


def main(op: str) -> None:
    module = importlib.import_module(f"brickwork.kernels.{op}_triton")
    wanted = {configuration.kernel for configuration in module.configurations()}
    launched: set[str] = set()
    for name in [n for n, value in vars(module).items() if any(value is k for k in wanted)]:
        _watch(module, name, launched)
    for name, case in _cases(op):
        print(name, flush=True)
        case()
    missing = {kernel.__name__ for kernel in wanted} - launched
    if missing:
        raise SystemExit(f"{op}: no case launches {sorted(missing)}")
    print(f"{op}: {len(launched)} kernels are within their tensors")


def _watch(module: ModuleType, name: str, launched: set[str]) -> None:
    traced = triton_viz.trace("sanitizer")(getattr(module, name))

    class Watched:
        """A kernel that remembers that it was launched."""

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            launched.add(name)
            return traced[grid]

    setattr(module, name, Watched())


def _cases(op: str) -> list[tuple[str, Callable[[], object]]]:
    spec = importlib.util.spec_from_file_location(f"sanitized_{op}", CASES / f"{op}.py")
    assert spec
    assert spec.loader
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    return [(name, case) for name, case in vars(cases).items() if name.startswith("case_")]


if __name__ == "__main__":
    main(*sys.argv[1:])
