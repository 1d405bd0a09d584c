"""Every op on one GPU: equal to its reference, captured in a CUDA graph, on a second GPU, timed.

Run by gpu.sh. Writes one CSV and one Markdown table. Time is a CUDA graph's between two events, the
second-level cache overwritten before, median of the rounds; the share is of what a copy of the same
device moves, or of its matrix product. `--dry` goes through the same lines on a CPU and times
nothing worth reading.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from gpu_cases import CHECKED, HALF, TIMED, TINY, Case, cases, outputs
from gpu_device import Device, Report
from gpu_options import option_cases
from torch import Tensor

from brickwork.kernels.backend import BackendUnavailable

WARM_SECONDS = 120
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny and interpreted")
    parser.add_argument("--minutes", type=float, default=7.5, help="then stop (default: 7.5)")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print(
            "There is no GPU here; --dry goes through the same lines on the CPU.", file=sys.stderr
        )
        return 2
    end = time.monotonic() + 60 * options.minutes
    device = Device(options.dry)
    if options.warm:
        warm_share(device, *map(int, options.warm.split("/")))
        return 0
    name = "dry" if options.dry else device.name.replace(" ", "_")
    stem = options.out / f"gpu_{name}_{datetime.now(timezone.utc):%Y-%m-%d}"
    report = Report(device.heading(), stem)
    torch.manual_seed(0)
    steps = (warm, check_values, check_capture, check_second_gpu, time_all)
    with device.working():
        for step in steps:
            size = TINY if options.dry else TIMED if step is time_all else CHECKED
            compared = [] if step in (time_all, check_second_gpu) else option_cases(size)
            for task in step(device, report, cases(size) + compared):
                if time.monotonic() > end:
                    report.add(step.__name__, None, f"skipped: {options.minutes} minutes are over")
                    break
                task()
                if not options.dry:
                    torch.cuda.empty_cache()
    print("FAILED" if report.failed else "all right")
    return int(report.failed)


def warm(device: Device, report: Report, _: list[Case]) -> Iterator[Callable[[], None]]:
    """Fill the caches of Triton and of torch.compile, by processes that each run a share of the
    cases: compiling one after the other takes longer than all there is to measure."""
    processes = 1 if device.dry else min(12, os.cpu_count() or 1)

    def task() -> None:
        start = time.monotonic()
        dry = ["--dry"] if device.dry else []
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--warm", f"{share}/{processes}", *dry],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for share in range(processes)
        ]
        late = 0
        for process in running:
            try:
                process.wait(max(0.0, start + WARM_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                late += 1
                process.kill()
                process.wait()
        seconds = time.monotonic() - start
        report.add("warm", None, f"{processes} processes, {seconds:.0f} s, {late} cut off")

    yield task


def warm_share(device: Device, share: int, shares: int) -> None:
    """Compile what every `shares`-th piece of work needs."""
    work: list[Callable[[], object]] = []
    sizes = (TINY,) if device.dry else (TIMED, CHECKED)
    for size in sizes:
        compared = option_cases(size) if size != TIMED else []
        for case in cases(size) + compared:
            runs = [(case.ours(backend), HALF) for backend in case.backends]
            if size != CHECKED and not case.loops:
                runs.append((torch.compile(case.reference, dynamic=False), HALF))
            if size == CHECKED:
                runs += [(case.ours(b), d) for b in case.backends for d in TOLERANCE if d != HALF]
            for run, dtype in runs:

                def piece(case: Case = case, run: Any = run, dtype: Any = dtype) -> object:
                    tensors = case.make(device.device)
                    given = [t.to(dtype) if t.dtype == HALF else t for t in tensors]
                    return value_and_gradients(run, given, case)

                work.append(piece)
    for piece in work[: 1 if device.dry else None][share::shares]:
        with contextlib.suppress(Exception):  # what is wrong will be reported when it is its turn
            piece()


def leaves(tensors: list[Tensor], floats: int) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(i < floats) for i, t in enumerate(tensors)]


def value_and_gradients(run: Callable[..., Any], tensors: list[Tensor], case: Case) -> list[Tensor]:
    given = leaves(tensors, case.floats)
    found = outputs(run(*given))
    generator = torch.Generator(found[0].device).manual_seed(1)
    upstream = [
        torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype) for t in found
    ]
    grads = torch.autograd.grad(found, given[: case.floats], upstream)
    return [*(t.detach() for t in found), *grads]


def guarded(step: str, case: Case, report: Report, task: Callable[[], None], **fields: str) -> None:
    """A step of one case; whatever it raises is a result too."""
    try:
        task()
    except (BackendUnavailable, ImportError) as error:
        report.add(step, case, f"not here: {type(error).__name__}: {error}"[:160], **fields)
    except Exception as error:
        report.add(step, case, f"FAILED: {type(error).__name__}: {error}"[:300], **fields)


def check_values(device: Device, report: Report, all_cases: list[Case]) -> Iterator[Callable]:
    """Value and every gradient of each backend and dtype against the float64 reference."""
    for case in all_cases:
        for backend in case.backends:
            for dtype in TOLERANCE:
                if backend == "grouped" and device.dry:
                    continue  # not what a GPU would run
                yield lambda case=case, backend=backend, dtype=dtype: guarded(
                    "values",
                    case,
                    report,
                    lambda: check_one(device, report, case, backend, dtype),
                    implementation=backend,
                )


def check_one(device: Device, report: Report, case: Case, backend: str, dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) if t.dtype == HALF else t for t in case.make(device.device)]
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    expected = value_and_gradients(case.reference, wide, case)
    found = value_and_gradients(case.ours(backend), tensors, case)
    worst = 0.0
    for a, e in zip(found, expected):
        if not a.isfinite().all():
            raise ArithmeticError("a result is not finite")
        worst = max(worst, ((a.double() - e).abs().max() / e.abs().max()).item())
    name = str(dtype).removeprefix("torch.")
    verdict = "equal" if worst <= TOLERANCE[dtype] else "FAILED: off"
    report.add("values", case, f"{verdict} to {worst:.1e} in {name}", implementation=backend)


def check_capture(device: Device, report: Report, all_cases: list[Case]) -> Iterator[Callable]:
    """A replayed CUDA graph of forward and backward gives what plain calls give."""
    for case in all_cases:
        for backend in case.backends:

            def task(case: Case = case, backend: str = backend) -> None:
                tensors = case.make(device.device)
                run = case.ours(backend)
                given = leaves(tensors, case.floats)
                upstream = [torch.ones_like(t) for t in outputs(run(*given))]

                def both() -> list[Tensor]:
                    found = outputs(run(*given))
                    grads = torch.autograd.grad(found, given[: case.floats], upstream)
                    return [*(t.detach() for t in found), *grads]

                plain = [t.clone() for t in both()]
                again = device.captured(both)()
                device.synchronize()
                same = all(torch.equal(a, b) for a, b in zip(again, plain))
                result = "captured, equal to the bit" if same else "FAILED: the replay differs"
                report.add("graph", case, result, implementation=backend)

            yield lambda task=task, case=case, backend=backend: guarded(
                "graph", case, report, task, implementation=backend
            )


def check_second_gpu(device: Device, report: Report, all_cases: list[Case]) -> Iterator[Callable]:
    """Tensors on another GPU than the current one."""
    count = 0 if device.dry else torch.cuda.device_count()
    if count < 2:
        yield lambda: report.add("second GPU", None, f"skipped: there is {count or 'no'} GPU")
        return
    for case in all_cases:

        def task(case: Case = case) -> None:
            tensors = case.make(torch.device("cuda:1"))
            found = value_and_gradients(case.ours(case.backends[0]), tensors, case)
            good = all(t.isfinite().all() and t.device.index == 1 for t in found)
            report.add("second GPU", case, "runs" if good else "FAILED: wrong device or value")

        yield lambda task=task, case=case: guarded("second GPU", case, report, task)


def time_all(device: Device, report: Report, all_cases: list[Case]) -> Iterator[Callable]:
    """Ours, the reference, the compiled reference and the peers, in turn for every case."""
    limits: dict[str, float] = {}
    yield lambda: limits.update(measure_limits(device, report))
    for case in all_cases:
        runs: dict[str, Callable[[], Any]] = {
            f"brickwork {backend}": (lambda b=backend: case.ours(b))  # noqa: B023
            for backend in case.backends
        }
        if not case.loops:
            runs["eager"] = lambda case=case: case.reference
            runs["torch.compile"] = lambda case=case: torch.compile(
                case.reference, backend="eager" if device.dry else "inductor", dynamic=False
            )
        runs |= case.peers
        own: dict[str, float] = {}
        for name, load in runs.items():

            def task(case: Case = case, name: str = name, load: Any = load, own: Any = own) -> None:
                time_one(device, report, case, name, load(), limits, own)

            yield lambda task=task, case=case, name=name: guarded(
                "time", case, report, task, implementation=name
            )


def measure_limits(device: Device, report: Report) -> dict[str, float]:
    """What a copy moves (bytes a second) and a matrix product does (operations a second)."""
    size, side = (2**10, 16) if device.dry else (2**30, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=device.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device.device).to(HALF) for _ in range(2))
    limits = {
        "copy": 2 * size / device.seconds(lambda: target.copy_(source), 10),
        "product": 2 * side**3 / device.seconds(lambda: a @ b, 10),
    }
    report.add("limits", None, "copy", rate=f"{limits['copy'] / 1e9:.0f} GB/s")
    report.add("limits", None, "matrix product", rate=f"{limits['product'] / 1e12:.1f} TFLOP/s")
    return limits


def time_one(
    device: Device,
    report: Report,
    case: Case,
    name: str,
    run: Callable[..., Any],
    limits: dict[str, float],
    own: dict[str, float],
) -> None:
    tensors = leaves(case.make(device.device), case.floats)
    wanted = tensors[: case.floats]

    def forward() -> Any:
        with torch.no_grad():
            return run(*tensors)

    found = outputs(run(*tensors))
    upstream = [torch.ones_like(t) for t in found]

    def backward() -> Any:
        return torch.autograd.grad(found, wanted, upstream, retain_graph=True)

    def both() -> Any:
        return torch.autograd.grad(outputs(run(*tensors)), wanted, upstream)

    second = ("forward and backward", both) if case.whole else ("backward", backward)
    for i, (direction, function) in enumerate((("forward", forward), second)):
        result = "timed in a graph"
        try:
            replay = device.captured(function)
        except Exception as error:  # a peer that cannot be captured is timed as it is called
            device.synchronize()
            replay, result = function, f"timed without a graph ({type(error).__name__})"
        seconds = device.seconds(replay, 3 if device.dry else 20)
        first_time = own.setdefault(direction, seconds)
        if case.moved:
            rate, unit, limit = case.moved[i] / seconds, "GB/s", limits["copy"]
            shown = f"{rate / 1e9:.0f} {unit}"
        else:
            assert case.operations is not None
            rate, unit, limit = case.operations[i] / seconds, "TFLOP/s", limits["product"]
            shown = f"{rate / 1e12:.1f} {unit}"
        report.add(
            "time",
            case,
            result,
            direction=direction,
            implementation=name,
            microseconds=f"{seconds * 1e6:.1f}",
            rate=shown,
            share=f"{100 * rate / limit:.0f} %",
            ratio=f"{seconds / first_time:.2f}",
        )


if __name__ == "__main__":
    sys.exit(main())
