"""How much memory a call takes at its peak, as the operating system counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest

_PROCESS = Path("/proc/self")


def peak_extra(run: Callable[[], object]) -> int:
    """Bytes by which `run` raises the resident memory at its peak, results included."""
    if not (_PROCESS / "clear_refs").exists():
        pytest.skip("the peak of resident memory is read from Linux's /proc")
    run()  # what is made once: thread pools, code
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (_PROCESS / "clear_refs").write_text("5")  # the peak starts from here
    before = _resident("VmRSS")
    run()
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")
