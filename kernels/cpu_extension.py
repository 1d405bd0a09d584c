"""The compiled CPU kernels: built once per machine, found again, loaded.

Each `<op>_cpu.cpp` beside this file is one shared library with a plain C interface (pointers,
sizes, strides). The compiler is called directly, without `torch.utils.cpp_extension`: no ninja, no
header of PyTorch, so a build takes seconds and can be replaced atomically. A library is kept in a
cache folder under a name made of PyTorch's version, the CPU, the flags and the source.

The first use builds. `python -m brickwork.kernels.cpu_extension` (`make ext`) builds ahead of time.
Environment: `BRICKWORK_BUILD=0` forbids building (a library in the cache is still used),
`BRICKWORK_CACHE` names the cache folder, `CXX` the compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
_TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
_COMPILERS = ("c++", "g++", "clang++")
_LARGEST = 2**25 - 2**13  # bytes, with what malloc adds below glibc's largest limit
_SECONDS = 600  # after which a compiler that hangs is given up

_library = torch.library.Library("brickwork", "FRAGMENT")
_loaded: dict[str, ctypes.CDLL] = {}
_failed: dict[str, str] = {}
_lock = threading.RLock()


class ExtensionUnavailable(RuntimeError):
    """A compiled kernel cannot be used here; the message says why."""


class Array(ctypes.Structure):
    """The twin of `struct Array` in cpu_vector.h; without data it stands for an absent tensor."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4))


def array(tensor: Tensor | None) -> Array:
    """Where a tensor's elements lie; the tensor must outlive it."""
    if tensor is None:
        return Array()
    return Array(tensor.data_ptr(), (ctypes.c_int64 * 4)(*tensor.stride()))


def load(name: str) -> ctypes.CDLL:
    """The library of `<name>.cpp`, built first if it is not in the cache.

    Success and failure are remembered for the process.

    Raises:
        ExtensionUnavailable: no library and none can be built; the message says why.
    """
    with _lock:
        if name in _failed:
            raise ExtensionUnavailable(_failed[name])
        if name not in _loaded:
            try:
                library = _open(name)
                if not _loaded:
                    _keep_freed_memory()
                _loaded[name] = library
            except ExtensionUnavailable as error:
                _failed[name] = str(error)
                raise
            except OSError as error:
                _failed[name] = f"the compiled library cannot be kept or opened: {error}"
                raise ExtensionUnavailable(_failed[name]) from error
        return _loaded[name]


def unavailable(name: str) -> str | None:
    """Why the library of `<name>.cpp` cannot be used here, or None; found by loading it."""
    try:
        load(name)
    except ExtensionUnavailable as error:
        return str(error)
    return None


# What torch.compiler.assume_constant_result sets; calling that imports the whole of torch._dynamo.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register(
    op: str,
    forward: Callable[..., Any],
    fake_forward: Callable[..., Any],
    backward: Callable[..., Any],
    fake_backward: Callable[..., Any],
    setup_context: Callable[..., None],
    gradients: Callable[..., Any],
) -> None:
    """Make `torch.ops.brickwork.<op>_cpu` of `forward`, and `<op>_cpu_backward` of `backward`;
    `gradients` calls the latter, which raises where it is to be differentiated itself.

    Without `torch.library.custom_op`, whose first call imports the whole of torch._dynamo.
    """

    def refuse(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            f"{op}: backend 'cpu' is differentiable once; take backend='torch', or "
            "brickwork.kernels.backend.prefer('torch'), for second derivatives"
        )

    name = f"{op}_cpu"
    for op_name, run, fake in (
        (name, forward, fake_forward),
        (f"{name}_backward", backward, fake_backward),
    ):
        schema = op_name + torch.library.infer_schema(run, mutates_args=())
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(op_name, run, "CPU")
        torch.library.register_fake(f"brickwork::{op_name}", fake, lib=_library)
    torch.library.register_autograd(
        f"brickwork::{name}", gradients, setup_context=setup_context, lib=_library
    )
    torch.library.register_autograd(f"brickwork::{name}_backward", refuse, lib=_library)


def run(
    name: str,
    kind: str,
    direction: str,
    dtype: torch.dtype,
    tasks: list[Any],
    *arguments: Any,
    returns: Any = None,
) -> Any:
    """Call `brickwork_<kind>_<direction>_<dtype>` of the library of `<name>.cpp` with the structs
    `tasks`, beside each other in memory and with the scratch that the first of them needs.

    `returns` is the C type of its result, None for none.
    """
    library = load(name)
    scratch_size = getattr(library, f"brickwork_{kind}_scratch")
    scratch_size.restype = ctypes.c_int64
    size = scratch_size(ctypes.byref(tasks[0]))
    scratch = torch.empty(tasks[0].threads, size, dtype=torch.uint8, device="cpu")
    together = (type(tasks[0]) * len(tasks))(*tasks)
    for task in together:
        task.scratch = array(scratch)
    suffix = {torch.float32: "float32", torch.float64: "float64"}[dtype]
    function = getattr(library, f"brickwork_{kind}_{direction}_{suffix}")
    function.restype = returns
    return function(together, *arguments)


def add_rows(sums: Tensor) -> Tensor:
    """The sum of the rows of `sums`, which is used up: by halves, in an order that does not depend
    on threads."""
    rows = len(sums)
    while rows > 1:
        half = rows // 2
        sums[:half] += sums[rows - half : rows]
        rows -= half
    return sums[0]


def library_path(name: str, folder: Path) -> Path:
    """Where `folder` holds the library of `<name>.cpp` for this PyTorch, CPU and source."""
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), _cpu(), *_FLAGS):
        digest.update(part.encode() + b"\0")
    for source in (_HERE / f"{name}.cpp", *sorted(_HERE.glob("*.h"))):
        digest.update(source.read_bytes() + b"\0")
    return folder / f"{name}-{digest.hexdigest()[:20]}.so"


def cache_folders() -> list[Path]:
    """Where built libraries may lie, the first first: the user's cache, a private temporary one."""
    named = os.environ.get("BRICKWORK_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    temporary = Path(tempfile.gettempdir()) / f"brickwork-{owner}"
    return [Path(named) if named else Path(base) / "brickwork", temporary]


def main() -> None:
    """Build what is not built yet and say where it lies; the exit status is 1 if one fails."""
    failed = False
    for source in sorted(_HERE.glob("*_cpu.cpp")):
        reason = unavailable(source.stem)
        failed = failed or reason is not None
        print(f"{source.stem}: {reason or _loaded[source.stem]._name}")
    sys.exit(failed)


def _open(name: str) -> ctypes.CDLL:
    if sys.platform == "win32":
        raise ExtensionUnavailable("compiled kernels are not written for Windows")
    home, temporary = cache_folders()
    for folder in (home, temporary):
        path = library_path(name, folder)
        if path.exists() and (folder == home or _private(folder)):
            with contextlib.suppress(OSError):  # cut short, or of another C library: built again
                return _ready(path)
    if os.environ.get("BRICKWORK_BUILD") == "0":
        raise ExtensionUnavailable("not built yet, and BRICKWORK_BUILD=0 forbids building")
    path = library_path(name, _writable(home, temporary))
    before = _identity(path)
    with _only_builder(path.with_suffix(".lock")):
        if _identity(path) == before:  # else another process built it while this one waited
            _build(name, path)
    return _ready(path)


def _writable(home: Path, temporary: Path) -> Path:
    for folder in (home, temporary):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            if folder == home or _private(folder):
                return folder
    return Path(tempfile.mkdtemp(prefix="brickwork-"))


def _private(folder: Path) -> bool:
    """Whether nobody else can put a library there for us to load."""
    found = folder.stat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not others)


def _build(name: str, path: Path) -> None:
    compiler = _compiler()
    print(
        "compiling brickwork's CPU kernels (some seconds, once per machine)",
        file=sys.stderr,
        flush=True,
    )
    descriptor, made = tempfile.mkstemp(prefix=f"{name}-", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    said = ""
    try:
        for tuning in _TUNING:
            command = [*compiler, *_FLAGS, *tuning, str(_HERE / f"{name}.cpp"), "-o", made]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ExtensionUnavailable(f"{shlex.join(command)} failed: {error}") from error
            if done.returncode == 0:
                os.replace(made, path)
                return
            said = said or (done.stderr.strip() or f"exit status {done.returncode}")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
    raise ExtensionUnavailable(f"{shlex.join(compiler)} cannot compile {name}.cpp: {said[:2000]}")


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    for candidate in [named] if named else _COMPILERS:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    wanted = f"CXX={named}" if named else ", ".join(_COMPILERS)
    raise ExtensionUnavailable(f"no C++ compiler found (looked for {wanted})")


def _ready(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.brickwork_team_start.argtypes = [ctypes.c_void_p]
    library.brickwork_team_start.restype = None
    library.brickwork_team_start(_team_start())
    return library


def _keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB that a pass frees for the next one.

    It gives what is free at the end of its memory back to the system once that is twice the largest
    block that was mapped and freed, and the system fills it with zeros, page by page, when it is
    wanted again: a fifth of LCPLM's time for 1024 tokens without gradients. So one block as large
    as it counts, 32 MiB, is mapped and freed, untouched. Where the environment sets these limits it
    changes nothing.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        library = ctypes.CDLL(None)
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
        library.free(library.malloc(_LARGEST))


def _team_start() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that PyTorch uses, if it has one."""
    for where in (
        None,
        torch._C.__file__,
    ):  # None: what the process preloads goes first, as for PyTorch
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(where).GOMP_parallel, ctypes.c_void_p).value
    return None


def _cpu() -> str:
    """What tells this CPU's instructions from another's: a cache may lie on a shared disk."""
    with contextlib.suppress(OSError):
        wanted = ("flags", "Features", "model name", "CPU part")
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(wanted))
    return platform.processor()


@contextlib.contextmanager
def _only_builder(lock: Path) -> Iterator[None]:
    import fcntl

    with lock.open("w") as file:
        with contextlib.suppress(OSError):  # a disk without locks: the rename still is atomic
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


if __name__ == "__main__":
    main()
