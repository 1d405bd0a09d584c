"""Which implementation of an op runs, and why not another.

An op's name is its meaning; `backend=` only says how it is computed:

| backend         | what it is                                                          |
|-----------------|---------------------------------------------------------------------|
| `auto`          | the fastest that supports these tensors (the default)               |
| `torch`         | the reference: plain PyTorch, the specification                     |
| `chunked`       | PyTorch with a hand-written backward (scans, cross_entropy)         |
| `grouped`       | PyTorch's grouped matrix product over sorted tokens (experts)       |
| `cpu`           | compiled C++, built at first use (see `cpu_extension`)              |
| `triton`        | Triton kernels                                                      |
| `mamba_ssm`     | the mamba-ssm package                                               |
| `causal_conv1d` | the causal-conv1d package                                           |

A named backend never falls back: it runs or raises `BackendUnavailable` with the reason.
`python -m brickwork.kernels.backend` (`--json`) is the doctor: versions, devices, and for every op
and backend whether it is usable here or why not.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

BACKENDS = ("torch", "chunked", "grouped", "cpu", "triton", "mamba_ssm", "causal_conv1d")
OPS = (
    "rms_norm",
    "add_norm",
    "rope",
    "swiglu",
    "experts",
    "causal_conv1d",
    "bidirectional_conv1d",
    "selective_scan",
    "bidirectional_scan",
    "ssd_scan",
    "cross_entropy",
)

_preferred: str | None = None  # plain global: torch.compile guards it, a ContextVar it cannot trace
_choices: list[tuple[str, str]] | None = None  # of the innermost `record_choices`
_availability: dict[str, str | None] = {}


class BackendUnavailable(RuntimeError):
    """A backend that was asked for by name cannot run these tensors here; the message says why."""


@contextlib.contextmanager
def prefer(backend: str) -> Iterator[None]:
    """Within the block, `backend="auto"` first tries `backend`, in every op that has it.

    The choice holds for the process, from entry to exit.
    An op without that backend, or with tensors it does not support, goes on as `auto` would.

    >>> import torch
    >>> from brickwork.kernels.rms_norm import rms_norm
    >>> with prefer("torch"):
    ...     rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0).round(decimals=4)
    tensor([[0.8485, 1.1314]])
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    global _preferred
    before = _preferred
    _preferred = backend
    try:
        yield
    finally:
        _preferred = before


def preferred() -> str | None:
    """The backend named by the innermost `prefer`, or None."""
    return _preferred


@contextlib.contextmanager
def record_choices() -> Iterator[list[tuple[str, str]]]:
    """Within the block, a list of (op, backend) for every call of an op, in their order.

    A program of `torch.compile` chooses when it is compiled, not when it runs. An op that is made
    of others stands in front of them.

    >>> import torch
    >>> from brickwork.kernels.rms_norm import rms_norm
    >>> with record_choices() as choices:
    ...     y = rms_norm(torch.ones(1, 2), torch.ones(2))
    >>> choices
    [('rms_norm', 'torch')]
    """
    global _choices
    before = _choices
    choices: list[tuple[str, str]] = []
    _choices = choices
    try:
        yield choices
    finally:
        _choices = before


def choose(op: str, backend: str, **reasons: Callable[[], str | None]) -> str:
    """The backend that runs `op`.

    `reasons` names the op's faster backends, the fastest first; each value is called to learn why
    that backend cannot run these tensors (`None`: it can). `torch` always can; where it is the
    fastest for some tensors it may be named too. `auto` does not take a `triton` that is
    interpreted.
    """
    chosen = _chosen(op, backend, reasons)
    _note(op, chosen)
    return chosen


def _note(op: str, chosen: str) -> None:
    if _choices is not None:
        _choices.append((op, chosen))


_note._dynamo_marked_constant = True  # type: ignore[attr-defined]  # no guard on the list


def _chosen(op: str, backend: str, reasons: dict[str, Callable[[], str | None]]) -> str:
    if backend == "torch":
        return backend
    if backend == "auto":
        if _preferred == "torch":
            return "torch"
        if _preferred in reasons and reasons[_preferred]() is None:
            return _preferred
        for name, reason in reasons.items():
            if reason() is None and not (name == "triton" and triton_interprets()):
                return name
        return "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {BACKENDS}, got {backend!r}")
    if backend not in reasons:
        others = tuple(dict.fromkeys(("torch", *reasons)))
        raise BackendUnavailable(f"{op} has no backend {backend!r}; it has {others}")
    why = reasons[backend]()
    if why is not None:
        raise BackendUnavailable(f"{op}: backend {backend!r} cannot run here: {why}")
    return backend


def unavailable(package: str) -> str | None:
    """Why `package` cannot be imported here, or None if it can; found by importing it, once."""
    if package not in _availability:
        try:
            importlib.import_module(package)
            _availability[package] = None
        except Exception as error:  # a broken binary package raises anything, ImportError or not
            _availability[package] = f"import {package} failed: {type(error).__name__}: {error}"
    return _availability[package]


# What torch.compiler.assume_constant_result sets; calling that imports the whole of torch._dynamo.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def triton_interprets() -> bool:
    """Whether the environment tells Triton to interpret its kernels: for tests, not for speed."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


triton_interprets._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not_opaque() -> str | None:
    """Why an op that PyTorch cannot look into may not run now, or None: in an exported or recorded
    program it would need brickwork, or hold one batch's choices; `torch.func` differentiates and
    batches plain operators only."""
    if torch.jit.is_tracing():
        return "torch.jit.trace would record what depends on the data of one batch"
    if torch.compiler.is_exporting():
        return "an exported program must run where brickwork is not installed"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation knows plain operators only"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms differentiate and batch plain operators only"
    return None


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What a reference computes in: float64 if any input is float64, else float32.

    >>> compute_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def autocast_off(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context with autocast off on `tensor`'s device; does nothing where there is no autocast."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


if __name__ == "__main__":
    from brickwork.kernels.doctor import main

    main()
