"""A safetensors file that is written piece by piece, and goes on where a stopped program left it.

Every piece is written where it belongs, into `<file>.partial`; `<file>.partial.done` lists the
steps that are in it for good. A step is listed only after its data are on the disk, and the whole
file takes its name only when all of it is: whatever stops the program, and when, what is listed is
there, and `<file>` is whole or absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from brickwork.assemblies.safetensors_layout import Layout, read_settings

_SECONDS = 1.0  # between two syncs of the disk: the most that a crash costs, beside a step


class ResumableFile:
    """What `resumable_file` hands out: `done` are the steps whose data are there already."""

    def __init__(self, data: IO[bytes], journal: IO[bytes], layout: Layout, done: set[int]) -> None:
        self.done = done
        self._data, self._journal, self._layout = data, journal, layout
        self._finished: list[int] = []
        self._synced = time.monotonic()

    def write(self, name: str, row: int, rows: Tensor) -> None:
        """Put `rows` at `row` of the tensor `name`."""
        self._layout.put(self._data, name, row, rows)

    def finish_step(self, step: int) -> None:
        """All of a step is written: it is listed within a second, or at the end."""
        self._finished.append(step)
        if time.monotonic() - self._synced >= _SECONDS:
            self.commit()

    def commit(self) -> None:
        """List what is finished, once it is on the disk."""
        finished, self._finished = self._finished, []  # not listed later if this sync fails
        _sync(self._data)
        if finished:
            self._journal.write(b"".join(b"%d\n" % step for step in finished))
            _sync(self._journal)
        self._synced = time.monotonic()


@contextlib.contextmanager
def resumable_file(
    path: str | os.PathLike[str], layout: Layout, *, resume: bool, overwrite: bool
) -> Iterator[ResumableFile | None]:
    """The file at `path`, to be whole at the end of the block; None if it is there already.

    Arguments:
        resume: go on with what a run with the settings of `layout` has left, if any.
        overwrite: replace the file, or what is left of it.

    Raises:
        ValueError: the file or a part of it is there and is not to be replaced, or was made with
            other settings; or another program is writing it.
        OSError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with _locked(path.with_name(path.name + ".partial.done")) as journal:
        steps = _listed(journal) if partial.exists() and not overwrite else []
        if path.exists() and not steps and not overwrite:
            if not resume:
                raise ValueError(f"{path} exists: resume (--resume) or --overwrite it")
            _check_same(read_settings(path), layout, path)
            journal.truncate(0)
            yield None
            return
        if steps and not resume:
            raise ValueError(f"{partial} is unfinished: resume (--resume) or --overwrite it")
        with partial.open("r+b" if steps else "w+b") as data:
            if steps:
                _check_same(json.loads(steps[0]), layout, partial)
                whole = data.read(len(layout.header)) == layout.header
                if not whole or data.seek(0, os.SEEK_END) != layout.size:
                    raise ValueError(f"{partial} is damaged: overwrite it")
            else:
                journal.truncate(0)
                data.write(layout.header)
                data.truncate(layout.size)
                _sync(data)
                journal.write(json.dumps(layout.settings).encode() + b"\n")
                _sync(journal)
            file = ResumableFile(data, journal, layout, {int(step) for step in steps[1:]})
            try:
                yield file
            finally:
                file.commit()
        partial.replace(path)
        journal.truncate(0)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """The file at `path`, opened for appending with no other program in it; removed if empty."""
    while True:
        with path.open("a+b") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another program is writing {path}") from error
            except (ImportError, OSError):  # a platform or a disk without locks
                pass
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue  # the program before has finished, and removed what was opened here
            try:
                yield file
            finally:
                if os.fstat(file.fileno()).st_size == 0:
                    path.unlink()
            return


def _listed(journal: IO[bytes]) -> list[bytes]:
    """The lines of the journal, less a torn last one, which is cut off."""
    journal.seek(0)
    text = journal.read()
    whole = text.rfind(b"\n") + 1
    journal.truncate(whole)
    return text[:whole].splitlines()


def _check_same(before: Mapping[str, Any], layout: Layout, where: Path) -> None:
    for name in {**before, **layout.settings}:
        was, now = before.get(name), layout.settings.get(name)
        if was != now:
            raise ValueError(
                f"{where} was begun with {name} = {was!r}, not {now!r}: a resumed run keeps its "
                f"settings; overwrite it to begin anew"
            )


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
