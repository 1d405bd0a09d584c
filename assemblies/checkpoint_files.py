"""The files of a checkpoint, read and written whole.

`config.json` with `model.safetensors`, or with shards and `model.safetensors.index.json`.
Everything is written under temporary names first; then the earlier files are moved aside (`.old`)
and the new ones into place. Whatever fails on the way, the earlier checkpoint is put back; a crash
of the machine between two renames leaves it under the `.old` names. All files of a save carry its
id, so that a mixture of two saves is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json"
)
_LEFTOVER_SECONDS = 3600


def save_checkpoint(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json` and the tensors, in one file or in shards of at most `max_shard_bytes`.

    All files are first written and synced under temporary names and only then moved into place. On
    any error what stood in `folder` before is there again, and nothing else.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: `max_shard_bytes` below 1.
        OSError: the disk is full, or `folder` cannot be written.
    """
    safetensors = import_safetensors()
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_id = secrets.token_hex(8)
    shards = _shards(state, max_shard_bytes)
    written: dict[str, Path] = {}
    try:
        _write_json(written, folder, CONFIG_FILE, {**config, "_save_id": save_id}, save_id)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            name = WEIGHTS_FILE if len(shards) == 1 else name
            written[name] = folder / f".{name}.{save_id}.tmp"
            tensors = {key: state[key].detach().contiguous() for key in names}
            metadata = {"format": "pt", "save_id": save_id}
            try:
                safetensors.torch.save_file(tensors, written[name], metadata=metadata)
            except safetensors.SafetensorError as error:
                raise OSError(f"could not write {folder / name}: {error}") from error
            written[name].chmod(written[CONFIG_FILE].stat().st_mode)  # not safetensors' 0600
            weight_map.update(dict.fromkeys(names, name))
        if len(shards) > 1:
            size = sum(t.numel() * t.element_size() for t in state.values())
            index = {"metadata": {"total_size": size, "save_id": save_id}, "weight_map": weight_map}
            _write_json(written, folder, INDEX_FILE, index, save_id)
        for path in written.values():
            _sync(path)
        with _only_saver(folder):
            _move_into_place(folder, written, save_id)
    except BaseException:
        for path in written.values():
            path.unlink(missing_ok=True)
        raise


def _move_into_place(folder: Path, written: Mapping[str, Path], save_id: str) -> None:
    """Replace the checkpoint in `folder` by the files `written`, or on any error put it back."""
    earlier = {p.name for p in folder.iterdir() if _OURS.fullmatch(p.name)}
    kept = {name: folder / f".{name}.{save_id}.old" for name in sorted(earlier)}
    try:
        for name, path in kept.items():
            (folder / name).replace(path)
        for name, path in written.items():
            path.replace(folder / name)
    except BaseException:
        for name in written:
            if name not in earlier or kept[name].exists():
                with contextlib.suppress(OSError):
                    (folder / name).unlink(missing_ok=True)
        for name, path in kept.items():
            if path.exists():
                path.replace(folder / name)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        _sync(folder)
    long_ago = time.time() - _LEFTOVER_SECONDS
    for path in [*kept.values(), *folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        inner = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.(tmp|old)", path.name)
        if inner and _OURS.fullmatch(inner[1]):
            with contextlib.suppress(OSError):
                if path in kept.values() or path.stat().st_mtime < long_ago:
                    path.unlink()


@contextlib.contextmanager
def _only_saver(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder` while files are moved, where the platform has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _shards(state: Mapping[str, Tensor], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if shards[-1] and size + bytes_ > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    return shards


def _write_json(
    written: dict[str, Path], folder: Path, name: str, content: Mapping[str, Any], save_id: str
) -> None:
    written[name] = folder / f".{name}.{save_id}.tmp"
    written[name].write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of `config.json` in `folder`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object.
    """
    fields = _read_json(Path(folder) / CONFIG_FILE)
    return {name: value for name, value in fields.items() if name != "_save_id"}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        inside = sorted(p.parent.name for p in path.parent.glob(f"*/{path.name}"))
        hint = f"; one of its folders may be meant: {inside[-1]}" if inside else ""
        raise FileNotFoundError(f"{path} does not exist (a local folder is read){hint}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


@contextlib.contextmanager
def open_checkpoint(folder: str | os.PathLike[str]) -> Iterator[Mapping[str, Tensor]]:
    """The tensors in `folder` as a mapping that reads each one when it is asked for.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: neither `model.safetensors` nor an index is there, or a shard is missing.
        ValueError: a file is corrupt, or index and shards do not belong together.
    """
    folder = Path(folder)
    config = folder / CONFIG_FILE
    save_id = _read_json(config).get("_save_id") if config.is_file() else None
    layouts = [name for name in (WEIGHTS_FILE, INDEX_FILE) if (folder / name).is_file()]
    if not layouts:
        raise FileNotFoundError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    for layout in layouts:
        with contextlib.ExitStack() as stack:
            files = _Files(stack, folder, layout, save_id)
            if files.of_this_save or layout == layouts[-1]:
                if not files.of_this_save:
                    raise ValueError(f"the files in {folder} come from different saves")
                yield files
                return


class _Files(Mapping[str, Tensor]):
    """Opened safetensors files as one read-only mapping."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, layout: str, save_id: str | None
    ) -> None:
        safetensors = import_safetensors()
        listed: Any = {}
        ids: set[str | None] = set() if save_id is None else {save_id}
        if layout == INDEX_FILE:
            index = _read_json(folder / INDEX_FILE)
            listed, metadata = index.get("weight_map"), index.get("metadata") or {}
            if not isinstance(listed, dict) or not isinstance(metadata, dict):
                raise ValueError(f"{folder / INDEX_FILE} has no weight_map of names to files")
            ids.add(metadata.get("save_id"))
        self._home: dict[str, Any] = {}
        found: dict[str, str] = {}
        for name in sorted(set(map(str, listed.values()))) if listed else [WEIGHTS_FILE]:
            path = folder / name
            if Path(name).name != name or not path.is_file():
                raise FileNotFoundError(f"{path}, named by {INDEX_FILE}, does not exist")
            try:
                file = stack.enter_context(safetensors.safe_open(str(path), framework="pt"))
                keys = list(file.keys())
                ids.add((file.metadata() or {}).get("save_id"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{path} is corrupt: {error}") from error
            self._home.update(dict.fromkeys(keys, file))
            found.update(dict.fromkeys(keys, name))
        self.of_this_save = len(ids) == 1
        if self.of_this_save and layout == INDEX_FILE and found != listed:
            wrong = sorted(dict(found.items() ^ listed.items()))
            raise ValueError(f"{INDEX_FILE} and the shards in {folder} differ in {wrong[:20]}")

    def __getitem__(self, name: str) -> Tensor:
        return self._home[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "reading and writing checkpoints needs safetensors: pip install 'brickwork[train]'"
        ) from error
    return safetensors
