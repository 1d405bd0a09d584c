"""Triton's interpreter as the tests use it: rounding like a GPU, counting bytes, vast tensors,
and what every kernel owes.

It is patched in private places; each patch has a self-test in
`tests/triton/interpreted/test_interpreter.py`, which says so if a new Triton moved them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime import interpreter as triton_interpreter

BUILDER = triton_interpreter.InterpreterBuilder


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 becomes bfloat16 by rounding to nearest, ties to even; the interpreter truncates."""
    original = getattr(triton_interpreter, "_convert_float", None)
    if original is None:
        pytest.skip(
            "this Triton's interpreter converts floats elsewhere: adapt tests/interpreter.py"
        )

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _rounded(np.ascontiguousarray(data).view(np.uint32)).reshape(data.shape)
        if source == tl.bfloat16 and target == tl.float32:  # the same as the original, but fast
            return data.view(np.uint16).astype(np.uint32) << 16
        return original(data, source, target, mode)

    monkeypatch.setattr(triton_interpreter, "_convert_float", convert)


def _rounded(bits: Any) -> Any:
    """The upper halves of float32 bit patterns, rounded to nearest, ties to even."""
    wide = bits.astype(np.uint64)
    nan = (wide & 0x7FFFFFFF) > 0x7F800000
    upper = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    upper[nan] = ((wide[nan] >> 16) | 0x40).astype(np.uint16)
    return upper


def leave_tensors_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels work on CPU tensors' own memory; copying it onto itself afterwards would touch all of
    a tensor that is larger than memory."""
    monkeypatch.setattr(
        triton_interpreter.GridExecutor, "_restore_args_dev", lambda *_: None, raising=True
    )


@contextlib.contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter replaces Triton's language anew at every launch and every call of a device
    function, which takes a third of the time of small kernels: here once, for all that runs
    within. So too the table of NumPy's types, which it makes for every value."""

    class Everything:
        __globals__: ClassVar = {"tl": tl, "core": tl.core}

    scope = triton_interpreter._patch_lang(Everything)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_interpreter, "_patch_lang", lambda _: type(scope)())
        patch.setattr(triton_interpreter, "_get_np_dtype", _remembered_dtypes())
        yield
    scope.restore()


def _remembered_dtypes() -> Callable[[tl.dtype], np.dtype[Any]]:
    original = triton_interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def of(dtype: tl.dtype) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return of


class Bytes:
    """What kernels moved: `loaded` and `stored` count every access; `read` and `written` count
    every element once, as when nothing is fetched from memory twice."""

    def __init__(self) -> None:
        self.loaded = 0
        self.stored = 0
        self._addresses: dict[tuple[str, int], list[Any]] = {}

    @property
    def read(self) -> int:
        return self._distinct("read")

    @property
    def written(self) -> int:
        return self._distinct("written")

    def _distinct(self, kind: str) -> int:
        return sum(
            width * len(np.unique(np.concatenate(pieces)))
            for (of, width), pieces in self._addresses.items()
            if of == kind
        )

    def _note(self, kind: str, pointers: Any, mask: Any) -> int:
        width = _element_bytes(pointers)
        addresses, used = np.broadcast_arrays(pointers.data, mask.data)
        wanted = addresses[used.astype(bool)].astype(np.uint64).ravel()
        self._addresses.setdefault((kind, width), []).append(wanted)
        return width * len(wanted)


def _element_bytes(pointers: Any) -> int:
    return pointers.get_element_ty().primitive_bitwidth // 8 or 1


@contextlib.contextmanager
def count_bytes() -> Iterator[Bytes]:
    """Count the bytes that kernels load and store within the block, masked lanes left out.

    >>> with count_bytes() as moved:
    ...     kernel[(1,)](x, y)  # doctest: +SKIP
    >>> assert moved.loaded == moved.read == x.nbytes  # doctest: +SKIP
    """
    moved = Bytes()
    load, store = BUILDER.create_masked_load, BUILDER.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        moved.loaded += moved._note("read", pointers, mask)
        return load(self, pointers, mask, *others)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        moved.stored += moved._note("written", pointers, mask)
        return store(self, pointers, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BUILDER, "create_masked_load", counted_load)
        patch.setattr(BUILDER, "create_masked_store", counted_store)
        yield moved


@contextlib.contextmanager
def only_programs(*wanted: int) -> Iterator[None]:
    """Of every launch within the block, run the programs with these indices on axis 0 only, counted
    from the end if negative: a grid of millions is not for the interpreter."""
    call = triton_interpreter.GridExecutor.__call__

    def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = executor.grid
        assert not callable(sizes), "a grid must be a tuple to be shortened"
        chosen = [i if i >= 0 else sizes[0] + i for i in wanted]
        set_size = BUILDER.set_grid_dim
        set_index = BUILDER.set_grid_idx
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                BUILDER, "set_grid_dim", lambda self, _, *others: set_size(self, sizes[0], *others)
            )
            patch.setattr(
                BUILDER,
                "set_grid_idx",
                lambda self, x, *others: set_index(self, chosen[x], *others),
            )
            executor.grid = (len(chosen), *sizes[1:])
            return call(executor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_interpreter.GridExecutor, "__call__", run)
        yield


def sparse_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of virtual memory that costs nothing until it is touched: slice it, fill the slices,
    and offsets beyond 2^31 elements are real."""
    assert math.prod(shape) * dtype.itemsize > 2**31, "take torch.empty"
    return torch.empty(shape, dtype=dtype)


def assert_well_behaved(
    function: Callable[..., object], inputs: Sequence[Tensor | None], *, compiled: bool = True
) -> None:
    """What every kernel owes its callers, whatever it computes: the same bits at every call and at
    a second backward pass, inputs and incoming gradients as they were, an error for a second
    derivative, the same through a checkpoint and, if `compiled`, through `torch.compile` in one
    graph."""
    leaves = [
        t.detach().clone().requires_grad_(t.is_floating_point()) if isinstance(t, Tensor) else t
        for t in inputs
    ]
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    before = [t.detach().clone() for t in wanted]

    def run(what: Callable[..., object], twice: bool) -> tuple[list[Tensor], list[Tensor]]:
        result = what(*leaves)
        outputs = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
        outputs = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
        kept = [u.clone() for u in upstream]
        values = [o.detach().clone() for o in outputs]
        grads = torch.autograd.grad(outputs, wanted, upstream, retain_graph=twice)
        first = [g.clone() for g in grads]
        if twice:
            again = torch.autograd.grad(outputs, wanted, upstream)
            _assert_equal(again, first, "gradients of a second backward pass")
            _assert_equal(grads, first, "the first gradients after the second backward pass")
        _assert_equal([o.detach() for o in outputs], values, "results after the backward pass")
        _assert_equal(upstream, kept, "incoming gradients")
        _assert_equal([t.detach() for t in wanted], before, "inputs")
        return values, first

    values, grads = run(function, True)
    paths: dict[str, Callable[..., object]] = {
        "another call": function,
        "a checkpoint": lambda *a: checkpoint(function, *a, use_reentrant=False),
    }
    if compiled:
        paths["torch.compile"] = torch.compile(function, fullgraph=True, backend="aot_eager")
    for name, path in paths.items():
        again, again_grads = run(path, path is function)
        _assert_equal(again, values, f"results of {name}")
        _assert_equal(again_grads, grads, f"gradients of {name}")

    result = function(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
    total = sum(o.float().square().sum() for o in outputs if o.requires_grad)
    grads = torch.autograd.grad(total, wanted, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(sum(g.float().square().sum() for g in grads), wanted)


def _assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    assert len(found) == len(expected), what
    for i, (a, b) in enumerate(zip(found, expected)):
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, i=i: f"{what}, {i}: {text}"
        )
