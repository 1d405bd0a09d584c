"""Triton's interpreter as the tests use it: rounding like a GPU, counting bytes, vast tensors.

It is patched in private places; each patch has a self-test in
`tests/triton/interpreted/test_interpreter.py`, which says so if a new Triton moved them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
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


class Bytes:
    """What kernels moved: `loaded` and `stored` count every access; `read` and `written` count
    every address once, as when nothing is fetched from memory twice."""

    def __init__(self) -> None:
        self.loaded = 0
        self.stored = 0
        self._addresses: dict[str, list[Any]] = {"read": [], "written": []}

    @property
    def read(self) -> int:
        return self._distinct("read")

    @property
    def written(self) -> int:
        return self._distinct("written")

    def _distinct(self, kind: str) -> int:
        pieces = self._addresses[kind]
        return len(np.unique(np.concatenate(pieces))) if pieces else 0

    def _note(self, kind: str, pointers: Any, mask: Any) -> int:
        width = _element_bytes(pointers)
        addresses, used = np.broadcast_arrays(pointers.data, mask.data)
        wanted = addresses[used.astype(bool)].astype(np.uint64).ravel()
        every = (wanted[:, None] + np.arange(width, dtype=np.uint64)).ravel()
        self._addresses[kind].append(every)
        return len(every)


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
