"""What the Triton backends share: when they can run, where, how their ops are registered, and how a
configuration of a kernel is described to the checks that compile it for GPUs that are not here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brickwork.kernels.backend import triton_interprets, unavailable, why_not_opaque

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
_IN_THE_INTERPRETER = 1  # "multiprocessor": so few that a test's programs have several rows each

# As kernel signatures spell dtypes.
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}


def why_not(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str | None:
    """Why Triton kernels cannot run now on these tensors, or None.

    They take tensors on one GPU (NVIDIA of compute capability 8.0 or newer, or AMD), or on the CPU
    while the environment sets `TRITON_INTERPRET=1`.
    """
    given = [t for t in tensors if t is not None]
    device = given[0].device
    if device.type == "cpu" and not triton_interprets():  # first, as every call on a CPU asks
        return "it takes tensors on a GPU, got cpu (TRITON_INTERPRET=1 runs kernels there, slowly)"
    for tensor in given:
        if tensor.device != device:
            return f"its tensors must be on one device, got {device} and {tensor.device}"
        if tensor.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"it takes {names}, got {str(tensor.dtype).removeprefix('torch.')}"
        if is_traceable_wrapper_subclass(tensor):
            return f"it takes plain tensors, got {type(tensor).__name__}"
    if device.type == "cuda":
        reason = _why_not_gpu(device.index or 0)
    elif device.type != "cpu":
        reason = f"it takes tensors on a GPU, got {device.type}"
    else:
        reason = None
    return reason or unavailable("triton.language") or why_not_opaque()


def unavailable_here() -> str | None:
    """Why Triton kernels cannot run on this machine, or None."""
    if reason := unavailable("triton.language"):
        return reason
    if triton_interprets():
        return None
    if not torch.cuda.is_available():
        return "there is no GPU (TRITON_INTERPRET=1 runs kernels on the CPU, slowly)"
    reasons = [_why_not_gpu(index) for index in range(torch.cuda.device_count())]
    return reasons[0] if None not in reasons else None


_gpus: dict[int, str | None] = {}  # torch.compile warns of functools.cache


def _why_not_gpu(index: int) -> str | None:
    if index not in _gpus:
        _gpus[index] = _why_not_this_gpu(index)
    return _gpus[index]


def _why_not_this_gpu(index: int) -> str | None:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None  # without CUDA only fake tensors can be on such a device
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        return (
            f"it needs compute capability 8.0, device {index} has {capability[0]}.{capability[1]}"
        )
    return None


_why_not_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which `tensor`'s GPU is the current one, where launches go."""
    if tensor.device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def multiprocessors(tensor: Tensor) -> int:
    """How many multiprocessors `tensor`'s GPU has; found without waiting for the GPU."""
    if tensor.device.type != "cuda" or not torch.cuda.is_available():
        return _IN_THE_INTERPRETER
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> cdiv(9, 4)
    3
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, which is at least 1.

    >>> [next_power_of_2(n) for n in (1, 2, 3, 128, 129)]
    [1, 2, 4, 128, 256]
    """
    return 1 << (n - 1).bit_length()


def lanes() -> int:
    """Threads of a warp: AMD's have twice as many."""
    return 32 if torch.version.hip is None else 64


def launch_warps(warps: int) -> int:
    """The `num_warps` that gives as many threads as `warps` of 32: half of it on AMD."""
    return warps if torch.version.hip is None else max(warps // 2, 1)


def launch_options(warps: int, *, stages: int = 1, registers: int | None = None) -> dict[str, int]:
    """Options of a launch with as many threads as `warps` of 32 (AMD's have 64), of at most
    `registers` each (on NVIDIA; its compiler would rather spill a few than have fewer programs)."""
    options = {"num_warps": launch_warps(warps), "num_stages": stages}
    if registers is None or torch.version.hip is not None:
        return options
    return {**options, "maxnreg": registers}


class Configuration(NamedTuple):
    """One way a dispatch can launch a kernel, in the words of an ahead-of-time compilation.

    Every argument of the kernel is in `signature` (a type such as `"*bf16"`, `"i32"`, `"fp32"`) or
    in `constants` (constexpr arguments, and None for a pointer that is not given).
    """

    kernel: Any  # the raw @triton.jit function
    name: str  # for people: "rms_norm forward, 4096 columns, bf16"
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()  # pointers and integers divisible by 16, as a launch finds them
    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None  # a limit, on NVIDIA
    launch_warps: bool = False  # whether a launch takes `launch_warps(num_warps)`
    of_64_lanes: Mapping[str, Any] = {}  # constants that differ where a warp has 64 threads
    wide_loads: bool = False  # all loads but `narrow_loads` of them must be of 128 bits
    narrow_loads: int = 0  # loads of single values, in the text of the compiled program
    narrow_loads_of_64: int | None = None  # if others where a warp has 64 threads
    matrix: bool = False  # the chip's matrix instructions must be used


_library = torch.library.Library("brickwork", "FRAGMENT")


def register(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gradients: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Make `run` the PyTorch op `brickwork::name`, and return the op.

    `run` is called with the GPU of its first tensor as the current one; `fake` gives results
    without data. `gradients` and `setup_context` are its autograd formula; without them the op
    refuses to be differentiated, as a backward pass must: a second derivative would silently miss
    terms.
    """

    def guarded(*arguments: Any) -> Any:
        first = next(a for a in arguments if isinstance(a, Tensor))
        with device_guard(first):
            return run(*arguments)

    # Without torch.library.custom_op, whose first call imports the whole of torch._dynamo.
    schema = name + torch.library.infer_schema(run, mutates_args=())
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CUDA", "CPU"):
        _library.impl(name, guarded, key)
    torch.library.register_fake(f"brickwork::{name}", fake, lib=_library)

    def refuse(ctx: Any, *_: Any) -> None:
        op = name.removesuffix("_backward")
        raise RuntimeError(
            f"autograd: {op} is differentiable once; "
            "within `with prefer('torch'):` it is any number of times"
        )

    torch.library.register_autograd(
        f"brickwork::{name}", gradients or refuse, setup_context=setup_context, lib=_library
    )
    return getattr(torch.ops.brickwork, name).default
