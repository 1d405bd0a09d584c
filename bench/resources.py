"""What compiled Triton kernels need on chips that are not here: registers, spills, shared memory,
the width of their loads, their matrix instructions.

`python bench/resources.py` compiles every configuration that a dispatch can choose
(`configurations()` of each `kernels/<op>_triton.py`) for every chip and prints the table; `--write`
also writes it to `bench/results/triton_resources.md`. No GPU and no driver are needed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from brickwork.kernels.backend import OPS
from brickwork.kernels.triton_support import Configuration

KERNELS = Path(__file__).parent.parent / "kernels"
REPORT = Path(__file__).parent / "results" / "triton_resources.md"
CHIPS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
REGISTERS = {"sm_80": 65_536, "sm_90": 65_536, "sm_100": 65_536, "gfx942": 131_072}
MATRIX = {
    "sm_80": r"\bmma\.sync",
    "sm_90": r"\bwgmma\.mma_async",
    "sm_100": r"\btcgen05\.mma",
    "gfx942": r"\bv_mfma_",
}


class Resources(NamedTuple):
    """Of one kernel on one chip; `spills` in bytes (NVIDIA) or registers (AMD)."""

    registers: int
    spills: int
    shared: int
    wide_loads: int
    loads: int
    wide_stores: int
    stores: int
    matrix: int
    wide_floats: int  # float64 instructions


def modules() -> list[str]:
    """The Triton backends with kernels, by the names of their files."""
    files = {op: KERNELS / f"{op}_triton.py" for op in OPS}
    return [
        path.stem
        for path in files.values()
        if path.exists() and "configurations" in path.read_text(encoding="utf-8")
    ]


def configurations(module: str) -> Iterator[Configuration]:
    """Every configuration of one of `modules()`."""
    yield from importlib.import_module(f"brickwork.kernels.{module}").configurations()


def warps(configuration: Configuration, chip: str) -> int:
    """As many as a launch on this chip takes."""
    halved = configuration.launch_warps and CHIPS[chip].backend == "hip"
    return max(configuration.num_warps // 2, 1) if halved else configuration.num_warps


def measure(configuration: Configuration, chip: str) -> Resources:
    """Compile and look at the result."""
    target = CHIPS[chip]
    kernel = configuration.kernel
    constants = dict(configuration.constants)
    if target.warp_size == 64:
        constants |= configuration.of_64_lanes
    known = {*configuration.signature, *configuration.constants}
    assert set(kernel.arg_names) == known, f"{configuration.name}: {set(kernel.arg_names) ^ known}"
    signature = {
        name: "constexpr" if name in configuration.constants else configuration.signature[name]
        for name in kernel.arg_names
    }
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in configuration.aligned
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps(configuration, chip), "num_stages": configuration.num_stages}
    if configuration.registers and target.backend == "cuda":
        options["maxnreg"] = configuration.registers
    with _on(target):
        compiled = triton.compile(source, target=target, options=options)
    of_chip = _amd if target.backend == "hip" else _nvidia
    return of_chip(compiled, re.compile(MATRIX[chip]))


@contextlib.contextmanager
def _on(target: GPUTarget) -> Iterator[None]:
    """Kernels that ask which chip they are compiled for are told this one."""
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        driver.set_active(None)  # as it was: found when it is asked for


def faults(configuration: Configuration, chip: str, found: Resources) -> list[str]:
    """What a configuration may not do; empty if all is well."""
    wrong = []
    if found.spills:
        wrong.append(f"spills {found.spills}")
    if found.wide_floats:
        wrong.append(f"{found.wide_floats} float64 instructions")
    if found.shared > SHARED_LIMIT[chip]:
        wrong.append(f"{found.shared} bytes of shared memory, the limit is {SHARED_LIMIT[chip]}")
    threads = warps(configuration, chip) * CHIPS[chip].warp_size
    if found.registers * threads > REGISTERS[chip]:
        wrong.append(f"{found.registers} registers for each of {threads} threads")
    narrow, allowed = found.loads - found.wide_loads, configuration.narrow_loads
    if CHIPS[chip].warp_size == 64 and configuration.narrow_loads_of_64 is not None:
        allowed = configuration.narrow_loads_of_64
    if configuration.wide_loads and narrow > allowed:
        wrong.append(f"{narrow} of {found.loads} loads are narrower than 128 bits")
    if configuration.matrix and not found.matrix:
        wrong.append(f"no instruction like {MATRIX[chip]}")
    return wrong


def _nvidia(compiled: triton.compiler.CompiledKernel, matrix: re.Pattern[str]) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        shown = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown.splitlines()[-1]))
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"\bld\.global\S*|\bcp\.async\.c[ag]\S* \[[^]]*\], \[[^]]*\], 0x\w+", ptx)
    stores = re.findall(r"\bst\.global\S*", ptx)
    return Resources(
        registers=int(usage["REG"]),
        spills=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared=compiled.metadata.shared,
        wide_loads=sum(map(_is_wide, loads)),
        loads=len(loads),
        wide_stores=sum(map(_is_wide, stores)),
        stores=len(stores),
        matrix=len(matrix.findall(ptx)),
        wide_floats=len(re.findall(r"^\s+(?:@\S+ )?(?!mov|ld|st)\S*\.f64\b", ptx, re.M)),
    )


def _is_wide(instruction: str) -> bool:
    """Whether a PTX access is of 128 bits or more."""
    if instruction.startswith("cp.async"):
        return int(instruction.split()[-1], 16) == 16
    count = re.search(r"\.v(\d)\b", instruction)
    bits = re.search(r"\.[bfsu](\d+)\b", instruction)
    assert bits, instruction
    return int(bits[1]) * (int(count[1]) if count else 1) >= 128


def _amd(compiled: triton.compiler.CompiledKernel, matrix: re.Pattern[str]) -> Resources:
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        return int(found[1])

    loads = re.findall(r"\b(?:global|buffer|flat)_load_\w+", text)
    stores = re.findall(r"\b(?:global|buffer|flat)_store_\w+", text)
    return Resources(
        registers=field("vgpr_count"),
        # scalars spill into lanes of a vector register; only vectors go to memory
        spills=field("vgpr_spill_count") + field("private_segment_fixed_size"),
        shared=compiled.metadata.shared,
        wide_loads=sum("dwordx4" in load for load in loads),
        loads=len(loads),
        wide_stores=sum("dwordx4" in store for store in stores),
        stores=len(stores),
        matrix=len(matrix.findall(text)),
        wide_floats=len(re.findall(r"\bv_\w+_f64\b", text)),
    )


def _rows_of(task: tuple[str, int]) -> list[str]:
    module, index = task
    configuration = list(configurations(module))[index]
    rows = []
    for chip in CHIPS:
        found = measure(configuration, chip)
        wrong = "; ".join(faults(configuration, chip, found)) or "none"
        rows.append(
            f"| {configuration.name} | {warps(configuration, chip)} | {chip} | {found.registers} "
            f"| {found.spills} | {found.shared} | {found.wide_loads}/{found.loads} "
            f"| {found.wide_stores}/{found.stores} | {found.matrix} | {wrong} |"
        )
    return rows


def report(jobs: int) -> str:
    """The whole table, in Markdown."""
    tasks = [(m, i) for m in modules() for i, _ in enumerate(configurations(m))]
    lines = [
        "# Resources of the Triton kernels",
        "",
        "Every configuration that a dispatch can choose, compiled ahead of time for chips that",
        f"were not there, with triton {triton.__version__}, by `bench/resources.py`; nothing ran.",
        "Spills are bytes of stack and local memory (NVIDIA) or registers (AMD), shared memory is",
        "in bytes. Loads and stores: those of 128 bits or more / all, as instructions in the",
        "program. Matrix: `mma`, `wgmma`, `tcgen05.mma` or `mfma` instructions.",
        "",
        "Narrower loads are of what a row, a token, a head or a warp has one of, of rows too",
        "narrow for their threads, and of what a channel has one of where there are fewer than",
        "four a thread (`selective_scan`, and the bias of `causal_conv1d`, backward, in 16 bits):",
        "the docstrings beside the kernels say where. A warp of gfx942 has 64 threads, and where",
        "that asks for other tiles those are what was compiled.",
        "",
        "| kernel | warps | chip | registers | spills | shared | wide loads | wide stores | matrix "
        "| faults |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    with ProcessPoolExecutor(jobs) as pool:
        for rows in pool.map(_rows_of, tasks):
            lines += rows
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"also write results/{REPORT.name}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    text = report(options.jobs)
    print(text)
    if options.write:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
