"""What runs on this machine, and why not the rest; `python -m brickwork.kernels.backend`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch

from brickwork.kernels.backend import BACKENDS, OPS, unavailable

_DISTRIBUTIONS = (
    "torch",
    "einops",
    "triton",
    "safetensors",
    "transformers",
    "mamba-ssm",
    "causal-conv1d",
)
_PACKAGES = ("triton", "mamba_ssm", "causal_conv1d")  # backends that bear their package's name
_NOT_WRITTEN = "not written for this op"


def diagnose() -> dict[str, Any]:
    """Versions, devices, and for every op and backend why it cannot run here (None: it can).

    A backend of an op is the module `<op>_<backend>` beside the op. It cannot run where its package
    cannot be imported, or where the module's own `unavailable_here()` returns a reason. Whether it
    takes the tensors of one call is decided at that call.

    >>> diagnose()["ops"]["rms_norm"]["mamba_ssm"]
    'not written for this op'
    """
    return {
        "versions": _versions(),
        "devices": _devices(),
        "ops": {op: {name: _why_not(op, name) for name in BACKENDS} for op in OPS},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the diagnosis, for people or (`--json`) for programs."""
    parser = argparse.ArgumentParser(
        prog="python -m brickwork.kernels.backend",
        description="Which implementation of each op runs on this machine, and why not another.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(arguments).json
    found = diagnose()
    try:
        print(json.dumps(found, indent=2) if as_json else _page(found), flush=True)
    except BrokenPipeError:  # the reader, `head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch"] = torch.__version__  # names the build too, which the distribution may not
    return versions


def _devices() -> dict[str, Any]:
    cuda = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        cuda.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return {
        "cpu": {
            "architecture": platform.machine(),
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "compiler": shutil.which(os.environ.get("CXX", "c++")),
        },
        "cuda": cuda,
    }


def _why_not(op: str, backend: str) -> str | None:
    module_name = f"brickwork.kernels.{op}" + ("" if backend == "torch" else f"_{backend}")
    if importlib.util.find_spec(module_name) is None:
        return _NOT_WRITTEN
    if backend in _PACKAGES and (reason := unavailable(backend)):
        return reason
    if reason := unavailable(module_name):
        return reason
    unavailable_here = getattr(importlib.import_module(module_name), "unavailable_here", None)
    return None if unavailable_here is None else unavailable_here()


def _page(found: dict[str, Any]) -> str:
    lines = [
        "   ".join(f"{name} {v or '(not installed)'}" for name, v in found["versions"].items()),
        "",
    ]
    cpu = found["devices"]["cpu"]
    lines.append(
        f"CPU: {cpu['architecture']} with {cpu['vector_instructions']}, {cpu['cores']} cores, "
        f"{cpu['threads']} threads; C++ compiler: {cpu['compiler'] or 'none found'}"
    )
    for index, gpu in enumerate(found["devices"]["cuda"]):
        lines.append(
            f"CUDA {index}: {gpu['name']}, capability {gpu['capability']}, "
            f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        )
    if not found["devices"]["cuda"]:
        lines.append("CUDA: no device")
    notes: list[str] = []
    rows = [["op", *BACKENDS]]
    for op, backends in found["ops"].items():
        rows.append([op, *(_cell(reason, notes) for reason in backends.values())])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines.append("")
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += ["", f"yes  usable here      -  {_NOT_WRITTEN}"]
    lines += [f"no {i}  {note}" for i, note in enumerate(notes, start=1)]
    return "\n".join(lines)


def _cell(reason: str | None, notes: list[str]) -> str:
    if reason is None:
        return "yes"
    if reason == _NOT_WRITTEN:
        return "-"
    if reason not in notes:
        notes.append(reason)
    return f"no {notes.index(reason) + 1}"
