"""Checks of arguments that several ops share; each error names the argument, value and rule."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_shapes(**arguments: tuple[Tensor | None, str]) -> dict[str, int]:
    """Match shapes against patterns of axis names and return the size of each name.

    A name stands for one size wherever it occurs, a leading `...` for any axes in front (not
    matched between arguments). Arguments that are None are passed over.

    >>> check_shapes(x=(torch.zeros(2, 3), "B C"), weight=(torch.zeros(3), "C"))
    {'B': 2, 'C': 3}
    >>> check_shapes(x=(torch.zeros(2, 3), "B C"), weight=(torch.zeros(4), "C"))
    Traceback (most recent call last):
    ValueError: weight must have shape (C,) with C = 3 as in x, got (4,)
    """
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for argument, (tensor, pattern) in arguments.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{argument} must be a Tensor, got {type(tensor).__name__}")
        names = pattern.split()
        leading = names[0] == "..."
        names = names[1:] if leading else names
        shape = tuple(tensor.shape)
        wrong = len(shape) < len(names) if leading else len(shape) != len(names)
        if wrong:
            raise ValueError(f"{argument} must have shape {_spell(pattern)}, got {shape}")
        for name, size in zip(names, shape[len(shape) - len(names) :]):
            if name not in sizes:
                sizes[name] = size
                first[name] = argument
            elif sizes[name] != size:
                raise ValueError(
                    f"{argument} must have shape {_spell(pattern)} with {name} = {sizes[name]} "
                    f"as in {first[name]}, got {shape}"
                )
    return sizes


def _spell(pattern: str) -> str:
    names = pattern.split()
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def check_floating(**arguments: Tensor | None) -> None:
    """Raise unless every tensor given is of a floating-point dtype."""
    for argument, tensor in arguments.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{argument} must be a Tensor, got {type(tensor).__name__}")
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{argument} must be floating point, got {tensor.dtype}")


def check_one_of(argument: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{argument} must be one of {allowed}, got {value!r}")


def check_integer(argument: str, value: object, *, least: int) -> None:
    """Raise unless `value` is an int (not a bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < least:
        raise ValueError(f"{argument} must be an integer of at least {least}, got {value!r}")


def check_flag(argument: str, value: object) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{argument} must be True or False, got {value!r}")


def values_readable(tensor: Tensor) -> bool:
    """Whether a check may read `tensor`'s values: not while tracing, compiling or exporting, nor on
    meta, fake or batched tensors, nor while a CUDA graph is captured."""
    return (
        type(tensor) is Tensor  # fake and distributed tensors are subclasses
        and not tensor.is_meta
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def memory_is_all(*tensors: Tensor | None) -> bool:
    """Whether what an op makes of these tensors may be computed from their memory on the CPU with
    PyTorch not looking on: they are plain, and nothing traces, transforms, differentiates forwards,
    counts or records."""
    return (
        not torch.compiler.is_compiling()
        and all(
            type(t) in (Tensor, torch.nn.Parameter)
            and t.device.type == "cpu"
            and t.layout == torch.strided
            and not t.is_neg()
            and not t.is_conj()
            for t in tensors
            if t is not None
        )
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0
    )


def claim(argument: str, kept: Any, module: object) -> None:
    """Make `kept` (a cache, a state) `module`'s own, or raise if it belongs to another one.

    A module's name as an owner goes with it, and with what it fills, into copies and pickles.
    """
    if torch.compiler.is_compiling():
        return
    owner = vars(module).get("_owner")
    if owner is None:
        owner = vars(module)["_owner"] = uuid.uuid4().hex
    if kept.owner not in (None, owner):
        raise ValueError(
            f"{argument} must be this {type(module).__name__}'s own, got one that another module "
            f"fills; give every layer its own, or reset() it"
        )
    kept.owner = owner
