"""Run the kernels of ops under triton-viz's sanitizer, which proves every load and store inside its
tensor or names the line that is not: `TRITON_INTERPRET=1 python tests/sanitize.py rms_norm`.

The cases are the functions `case_*` of `tests/triton/sanitized/<op>.py`. Nothing is computed:
kernels run on symbols, so results are what `torch.empty` found. A kernel of `configurations()` that
no case launches is an error. Ends with status 1 at the first violation.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton_viz
from interpreter import language_patched_once
from torch import Tensor
from triton.runtime import interpreter
from triton_viz.clients.sanitizer import sanitizer
from triton_viz.core import patch

CASES = Path(__file__).parent / "triton" / "sanitized"


def main(ops: list[str]) -> None:
    _amend()
    with language_patched_once():
        for op in ops:
            _sanitize(op)


def _sanitize(op: str) -> None:
    module = importlib.import_module(f"brickwork.kernels.{op}_triton")
    wanted = {configuration.kernel for configuration in module.configurations()}
    launched: set[str] = set()
    ours = [m for name, m in sys.modules.items() if name.startswith("brickwork.kernels.")]
    places = [  # under its name wherever it is launched from
        (part, name, kernel)
        for kernel in wanted
        for part in ours
        for name, value in vars(part).items()
        if value is kernel
    ]
    for part, name, _ in places:
        _watch(part, name, launched)
    for name, case in _cases(op):
        print(name, flush=True)
        case()
    for place in places:  # norms share kernels
        setattr(*place)
    missing = {kernel.__name__ for kernel in wanted} - launched
    if missing:
        raise SystemExit(f"{op}: no case launches {sorted(missing)}")
    print(f"{op}: {len(launched)} kernels are within their tensors")


def _amend() -> None:
    """Put right what triton-viz 3.0 gets wrong: it adds the offset of a slice twice, refuses
    broadcast axes, forgets the bounds of outer loops in inner ones, cannot loop in a file that has
    no kernel, and does not know `tl.split`, `tl.trans` and scans, whose results are never addresses
    here."""
    vars(builtins)["_triton_viz_loop_patcher"] = patch._loop_patcher
    sanitizer.check_inner_stride_equal_to_one = lambda tensor: True
    sanitizer.get_physical_addr_from_tensor_slice = _segments
    split = interpreter.InterpreterBuilder.create_split

    def symbolic_split(self: Any, value: Any) -> Any:
        known = isinstance(value.data, interpreter.np.ndarray)
        return split(self, value) if known else (value, value)

    interpreter.InterpreterBuilder.create_split = symbolic_split
    trans = interpreter.InterpreterBuilder.create_trans

    def symbolic_trans(self: Any, value: Any, axes: Any) -> Any:
        known = isinstance(value.data, interpreter.np.ndarray)
        return trans(self, value, axes) if known else value

    interpreter.InterpreterBuilder.create_trans = symbolic_trans
    scan = interpreter.ScanOps.apply_impl

    def symbolic_scan(self: Any, values: Any) -> Any:
        known = all(isinstance(v.handle.data, interpreter.np.ndarray) for v in values)
        return scan(self, values) if known else list(values)

    interpreter.ScanOps.apply_impl = symbolic_scan
    register = sanitizer.SymbolicSanitizer.register_for_loop_callback
    sanitizer.SymbolicSanitizer.register_for_loop_callback = lambda self: _nested(
        self, register(self)
    )


def _nested(checker: Any, callbacks: Any) -> Any:
    """The hooks around a loop, such that its bounds hold for what stands in it."""
    before, after = callbacks.before_loop_callback, callbacks.after_loop_callback
    depths: list[int] = []

    def enter(lineno: int, iterable: Any) -> None:
        depth = len(checker.loop_stack)
        before(lineno, iterable)
        if len(checker.loop_stack) > depth:
            loop = checker.loop_stack[-1]
            checker.solver.push()
            checker.solver.add(
                sanitizer._range_to_iterator_constraint(
                    loop.idx_z3, start=loop.start, stop=loop.stop, step=loop.step
                )
            )
            depths.append(depth)

    def leave(lineno: int) -> None:
        stack = checker.loop_stack
        if stack and stack[-1].lineno == lineno and depths and depths[-1] == len(stack) - 1:
            depths.pop()
            checker.solver.pop()
        after(lineno)

    return dataclasses.replace(callbacks, before_loop_callback=enter, after_loop_callback=leave)


def _segments(tensor: Tensor) -> list[tuple[int, int]]:
    """Addresses of the first and the last element of every run of elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride()):
        offsets = (offsets[..., None] + torch.arange(size) * stride).unique()
    starts = torch.cat([torch.tensor([True]), offsets.diff() != 1])
    first, last = offsets[starts], offsets[starts.roll(-1)]
    at, width = tensor.data_ptr(), tensor.element_size()
    return [(at + a * width, at + b * width) for a, b in zip(first.tolist(), last.tolist())]


def _watch(module: ModuleType, name: str, launched: set[str]) -> None:
    kernel = getattr(module, name)
    traced = triton_viz.trace("sanitizer")(kernel)

    class Watched:
        """A kernel that remembers that it was launched."""

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            launched.add(name)
            return traced[grid]

        def __getattr__(self, attribute: str) -> Any:
            return getattr(kernel, attribute)

    setattr(module, name, Watched())


def _cases(op: str) -> list[tuple[str, Callable[[], object]]]:
    spec = importlib.util.spec_from_file_location(f"sanitized_{op}", CASES / f"{op}.py")
    assert spec
    assert spec.loader
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    return [(name, case) for name, case in vars(cases).items() if name.startswith("case_")]


if __name__ == "__main__":
    main(sys.argv[1:])
