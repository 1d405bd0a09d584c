"""Rename tables between our parameters and an original's tensors.

Renaming is a pure function on dicts of tensors, exact both ways. A table is a tuple of `Rename`s,
the first that matches a parameter wins; `{i}` stands for a number, a final `*` for the rest of the
name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    *,
    widen: bool = False,
) -> dict[str, Tensor]:
    """Rename an original's tensors to ours, of the given `shapes`, with none missing or left over.

    Of a tensor and its `aliases` one is enough; where several are there they must be equal. Tensors
    that become one must have one dtype, unless they may `widen` to the widest.

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
            names = [source[name] for name in entry.theirs]
            parts = [state[name] for name in names]
            result.update(_collect(entry, names, parts, shapes, widen))
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
    entry: _Entry,
    names: list[str],
    parts: list[Tensor],
    shapes: Mapping[str, torch.Size],
    widen: bool,
) -> dict[str, Tensor]:
    expected = [shapes[name] for name in entry.ours]
    if len(entry.ours) == len(entry.theirs) == 1:
        wanted = [expected[0]]
    elif len(entry.theirs) == 1:
        wanted = [torch.Size([sum(_row_count(s) for s in expected), *expected[0][1:]])]
    else:
        share = _row_count(expected[0]) // len(entry.theirs)
        wanted = [torch.Size([share, *expected[0][-1:]])] * len(entry.theirs)
    for name, part, shape in zip(names, parts, wanted, strict=True):
        if not isinstance(part, Tensor) or part.is_meta:
            raise ValueError(f"no values: {name} is a {type(part).__name__} without data")
        if part.shape != shape:
            raise ValueError(f"misshapen: {name} is {tuple(part.shape)}, needs {tuple(shape)}")
        if part.dtype not in _DTYPES:
            raise ValueError(f"wrong dtype: {name} is {part.dtype}, needs one of {_DTYPES}")
        if part.dtype != parts[0].dtype and not widen:
            raise ValueError(
                f"mixed dtypes: {name} is {part.dtype}, {names[0]} {parts[0].dtype}, and both are "
                f"in one parameter here: give a dtype"
            )
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
    return a is b or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _listed(errors: Sequence[str], most: int = 20) -> str:
    more = f"\n  and {len(errors) - most} more" if len(errors) > most else ""
    return "\n  ".join(errors[:most]) + more
