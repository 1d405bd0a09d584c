"""Checkpoints: rename tables between our parameters and an original's, and safetensors files.

Renaming is a pure function on dicts of tensors, exact both ways. A table is a tuple of `Rename`s,
the first that matches a parameter wins; `{i}` stands for a number, a final `*` for the rest of the
name.

Files are `config.json` with `model.safetensors`, or with shards and `model.safetensors.index.json`.
Everything is written under temporary names first and then moved into place, so that a failure
(a full disk) leaves an earlier checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Rename:
    """Our parameters `ours` hold the rows of the original's tensors `theirs`, in this order.

    `ours` and `theirs` are one name or several. With one on each side it is a new name for the
    same tensor; otherwise the tensors of each side, laid under one another, have the same rows
    (`{e}` in `theirs` runs over the experts that our stacked tensor holds). `swap_halves`: the
    original's rows are ours with the first and second half exchanged.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    swap_halves: bool = False


@dataclass(frozen=True)
class _Entry:
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    swap_halves: bool


def to_original(
    tensors: Mapping[str, Tensor], table: Sequence[Rename], aliases: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Rename our tensors (parameters, or their gradients) to the original's names.

    `aliases` maps further names of the original to the name whose tensor they share.
    """
    result: dict[str, Tensor] = {}
    for entry in _entries({name: t.shape for name, t in tensors.items()}, table):
        parts = [tensors[name] for name in entry.ours]
        if len(entry.ours) == len(entry.theirs) == 1:
            rows = parts[0]
        else:
            rows = torch.cat([_rows(part) for part in parts])
        if entry.swap_halves:
            rows = rows.roll(rows.shape[0] // 2, 0)
        if len(entry.theirs) == 1:
            result[entry.theirs[0]] = rows
        else:
            result.update(zip(entry.theirs, rows.chunk(len(entry.theirs)), strict=True))
    for alias, name in (aliases or {}).items():
        result[alias] = result[name]
    return result


def from_original(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    table: Sequence[Rename],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Rename an original's tensors to ours, of the given `shapes`, with none missing or left over.

    Of a tensor and its `aliases` one is enough; where several are there they must be equal.

    Raises:
        ValueError: naming every missing, unexpected, misshapen or contradictory entry.
    """
    aliases = aliases or {}
    entries = _entries(shapes, table)
    source = {name: name for entry in entries for name in entry.theirs}
    errors: list[str] = []
    for alias, name in aliases.items():
        if alias not in state:
            continue
        if source[name] not in state:
            source[name] = alias
        elif not _equal(state[alias], state[source[name]]):
            errors.append(f"{alias} and {source[name]} must be one tensor, but they differ")
    missing = [name for name, found in source.items() if found not in state]
    unexpected = sorted(set(state) - set(source) - set(aliases))
    errors += [f"missing: {name}" for name in missing]
    errors += [f"unexpected: {name}" for name in unexpected]
    result: dict[str, Tensor] = {}
    for entry in entries:
        if any(source[name] not in state for name in entry.theirs):
            continue
        try:
            result.update(_collect(entry, [state[source[n]] for n in entry.theirs], shapes))
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError(f"the checkpoint does not fit this model:\n  {_listed(errors)}")
    return result


def original_name(name: str, table: Sequence[Rename]) -> str:
    """The original's name of a parameter that stands for one tensor there."""
    (entry,) = _entries({name: (0,)}, table)
    (theirs,) = entry.theirs
    return theirs


def _collect(
    entry: _Entry, parts: list[Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    expected = [shapes[name] for name in entry.ours]
    if len(entry.ours) == len(entry.theirs) == 1:
        wanted = [expected[0]]
    elif len(entry.theirs) == 1:
        wanted = [torch.Size([sum(_row_count(s) for s in expected), *expected[0][1:]])]
    else:
        share = _row_count(expected[0]) // len(entry.theirs)
        wanted = [torch.Size([share, *expected[0][-1:]])] * len(entry.theirs)
    for name, part, shape in zip(entry.theirs, parts, wanted, strict=True):
        if part.shape != shape:
            raise ValueError(f"misshapen: {name} is {tuple(part.shape)}, needs {tuple(shape)}")
        if not part.is_floating_point():
            raise ValueError(f"wrong dtype: {name} is {part.dtype}, needs a floating-point type")
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    if entry.swap_halves:
        rows = rows.roll(rows.shape[0] // 2, 0)
    if len(entry.ours) == 1:
        return {entry.ours[0]: rows.reshape(expected[0])}
    pieces = rows.split([_row_count(shape) for shape in expected])
    return {name: piece.contiguous() for name, piece in zip(entry.ours, pieces, strict=True)}


def _entries(shapes: Mapping[str, Sequence[int]], table: Sequence[Rename]) -> list[_Entry]:
    entries: list[_Entry] = []
    taken: set[str] = set()
    for name, shape in shapes.items():
        if name in taken:
            continue
        for rule in table:
            ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
            theirs = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
            found = _pattern(ours[0]).fullmatch(name)
            if found:
                fields = {"*": "", **found.groupdict()}
                experts = range(shape[0]) if any("{e}" in t for t in theirs) else range(1)
                entry = _Entry(
                    tuple(_fill(o, fields) for o in ours),
                    tuple(_fill(t, {**fields, "e": str(e)}) for e in experts for t in theirs),
                    rule.swap_halves,
                )
                taken.update(entry.ours)
                entries.append(entry)
                break
        else:
            raise ValueError(f"no rule of the rename table names {name}")
    return entries


def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\*", r"(?P<rest>.*)")
    return re.compile(pattern)


def _fill(name: str, fields: Mapping[str, str]) -> str:
    for field in ("i", "e"):
        name = name.replace("{" + field + "}", fields.get(field, ""))
    return name.replace("*", fields.get("rest", ""))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor


def _row_count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape[:-1] if len(shape) > 1 else shape:
        count *= size
    return count


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _listed(errors: Sequence[str], most: int = 20) -> str:
    more = f"\n  and {len(errors) - most} more" if len(errors) > most else ""
    return "\n  ".join(errors[:most]) + more


def save_checkpoint(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json` and the tensors, in one file or in shards of at most `max_shard_bytes`.

    All files are first written and synced under temporary names and only then moved into place;
    on any error they are removed and what stood in `folder` before is untouched.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the disk is full, or `folder` cannot be written.
    """
    safetensors = _safetensors()
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_id = secrets.token_hex(8)
    shards = _shards(state, max_shard_bytes)
    files: dict[str, Path] = {}
    try:
        weight_map: dict[str, str] = {}
        for i, names in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            name = WEIGHTS_FILE if len(shards) == 1 else name
            files[name] = folder / f".{name}.{save_id}.tmp"
            tensors = {key: state[key].detach().contiguous() for key in names}
            metadata = {"format": "pt", "save_id": save_id}
            try:
                safetensors.torch.save_file(tensors, files[name], metadata=metadata)
            except safetensors.SafetensorError as error:
                raise OSError(f"could not write {folder / name}: {error}") from error
            weight_map.update(dict.fromkeys(names, name))
        if len(shards) > 1:
            size = sum(t.numel() * t.element_size() for t in state.values())
            index = {"metadata": {"total_size": size, "save_id": save_id}, "weight_map": weight_map}
            files[INDEX_FILE] = _write_json(folder, INDEX_FILE, index, save_id)
        files[CONFIG_FILE] = _write_json(folder, CONFIG_FILE, config, save_id)
        for path in files.values():
            _sync(path)
    except BaseException:
        for name in {*files, INDEX_FILE, CONFIG_FILE}:
            (folder / f".{name}.{save_id}.tmp").unlink(missing_ok=True)
        raise
    for name, path in files.items():
        path.replace(folder / name)
    for path in folder.glob("model*.safetensors*"):
        if path.name not in files and re.fullmatch(
            r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", path.name
        ):
            path.unlink()
    _sync(folder)


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


def _write_json(folder: Path, name: str, content: Mapping[str, Any], save_id: str) -> Path:
    path = folder / f".{name}.{save_id}.tmp"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


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
    return _read_json(Path(folder) / CONFIG_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
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
    index_path = folder / INDEX_FILE
    with contextlib.ExitStack() as stack:
        if (folder / WEIGHTS_FILE).is_file():
            yield _Files(stack, folder, None)
        elif index_path.is_file():
            yield _Files(stack, folder, _read_json(index_path))
        else:
            raise FileNotFoundError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")


class _Files(Mapping[str, Tensor]):
    """Opened safetensors files as one read-only mapping."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, index: dict[str, Any] | None
    ) -> None:
        safetensors = _safetensors()
        listed = {} if index is None else index.get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
            raise ValueError(f"{folder / INDEX_FILE} has no weight_map of names to files")
        self._home: dict[str, Any] = {}
        found: dict[str, str] = {}
        ids: set[str | None] = (
            set() if index is None else {index.get("metadata", {}).get("save_id")}
        )
        for name in [WEIGHTS_FILE] if index is None else sorted(set(listed.values())):
            path = folder / name
            if path.parent != folder or not path.is_file():
                raise FileNotFoundError(f"{path}, named by {INDEX_FILE}, does not exist")
            try:
                file = stack.enter_context(safetensors.safe_open(str(path), framework="pt"))
                keys = list(file.keys())
                ids.add((file.metadata() or {}).get("save_id"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{path} is corrupt: {error}") from error
            self._home.update(dict.fromkeys(keys, file))
            found.update(dict.fromkeys(keys, name))
        if index is not None and found != listed:
            wrong = sorted(dict(found.items() ^ listed.items()))
            raise ValueError(f"{INDEX_FILE} and the shards in {folder} differ in {wrong[:20]}")
        if index is not None and len(ids) > 1:
            raise ValueError(f"{INDEX_FILE} and the shards in {folder} come from different saves")

    def __getitem__(self, name: str) -> Tensor:
        return self._home[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "reading and writing checkpoints needs safetensors: pip install 'brickwork[train]'"
        ) from error
    return safetensors
