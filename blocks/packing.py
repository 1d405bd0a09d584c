"""Sequences of different lengths in one batch, padded or packed, and back.

R rows of a batch, L tokens of a row, T tokens of one sequence.

Both layouts are one `SequenceBatch`: a padded batch has one sequence a row, a packed one has
several. A model that is given `mask` and `seq_ids` (and `positions`, if it has any) computes for
every sequence what it would compute alone, and `batch.unpack` returns the results per sequence,
in the order in which the sequences came. Gradients flow through both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from brickwork.kernels.checks import check_integer, check_one_of
from brickwork.kernels.sequences import check_mask

Side = Literal["right", "left"]
PADDING = -1  # the sequence id of a token that is not real
_ADDED = ("attention_mask", "seq_ids", "positions")  # what a Collator adds to the fields


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Sequences in rows.

    `values` (R, L, ...); `mask` (R, L), True at real tokens; `seq_ids` (R, L), the number of a
    token's sequence, -1 at padding; `positions` (R, L), a token's place in its sequence, 0 at
    padding; `lengths`, of every sequence.
    """

    values: Tensor
    mask: Tensor
    seq_ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> SequenceBatch:
        """The same batch on another device.

        >>> pad([torch.ones(2)]).to("meta").mask.device
        device(type='meta')
        """
        if not isinstance(device, torch.device | str | int):
            raise ValueError(f"device must be a device, got {device!r}: a batch has several dtypes")
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SequenceBatch:
        """In pinned memory, as a `DataLoader(pin_memory=True)` asks for."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> SequenceBatch:
        return SequenceBatch(
            change(self.values),
            change(self.mask),
            change(self.seq_ids),
            change(self.positions),
            self.lengths,
        )

    def unpack(self, values: Tensor | None = None) -> list[Tensor]:
        """Per sequence its tokens' part (T, ...) of `values` (R, L, ...), the batch's own if None.

        >>> batch = pack([torch.tensor([1, 2]), torch.tensor([3])])
        >>> batch.unpack(batch.values * 10)
        [tensor([10, 20]), tensor([30])]
        """
        values = self.values if values is None else values
        if values.shape[:2] != self.seq_ids.shape:
            raise ValueError(
                f"values must have shape (R, L, ...) with (R, L) = {tuple(self.seq_ids.shape)}, "
                f"got {tuple(values.shape)}"
            )
        ids = self.seq_ids.flatten()
        order = ids.argsort(stable=True)[ids.numel() - sum(self.lengths) :]
        return list(values.flatten(0, 1).index_select(0, order).split(list(self.lengths)))


def pad(
    sequences: Sequence[Tensor], *, side: Side = "right", length: int | None = None, fill: float = 0
) -> SequenceBatch:
    """One sequence a row.

    Arguments:
        sequences: tensors (T, ...), equal but for T.
        side: of the padding.
        length: L, by default that of the longest sequence.
        fill: value of padding.

    Raises:
        ValueError: no sequences, unequal shapes or dtypes, or one longer than `length`.

    >>> pad([torch.tensor([1, 2]), torch.tensor([3])], side="left").values
    tensor([[1, 2],
            [0, 3]])
    """
    check_one_of("side", side, ("right", "left"))
    lengths = _check(sequences)
    length = _check_length("length", length, lengths)
    starts = [0 if side == "right" else length - n for n in lengths]
    return _lay(sequences, list(enumerate(starts)), len(sequences), length, fill)


def pack(
    sequences: Sequence[Tensor] | Tensor,
    *,
    mask: Tensor | None = None,
    row_length: int | None = None,
    fill: float = 0,
) -> SequenceBatch:
    """Several sequences a row.

    Arguments:
        sequences: tensors (T, ...), equal but for T; or a padded batch (R, L, ...), one sequence
            a row.
        mask: (R, L), True or 1 at the real tokens of a padded batch, wherever they stand; None
            for a list.
        row_length: length of the rows; each sequence goes into the first row that has room for
            it. By default all are put into one row without padding.
        fill: value of padding.

    Raises:
        ValueError: no sequences, unequal shapes or dtypes, a sequence longer than `row_length`,
            or a mask for a list.

    >>> ids = torch.arange(1, 7)
    >>> batch = pack(ids.split([3, 2, 1]), row_length=4)
    >>> batch.values
    tensor([[1, 2, 3, 6],
            [4, 5, 0, 0]])
    >>> batch.seq_ids
    tensor([[ 0,  0,  0,  2],
            [ 1,  1, -1, -1]])
    """
    if isinstance(sequences, Tensor):
        if sequences.dim() < 2:
            raise ValueError(
                f"a padded batch must have shape (R, L, ...), got {tuple(sequences.shape)}"
            )
        mask = check_mask(mask, (sequences.shape[0], sequences.shape[1]))
        rows = sequences.unbind(0)
        sequences = rows if mask is None else [row[keep] for row, keep in zip(rows, mask)]
    elif mask is not None:
        raise ValueError("mask must be None for a list of sequences: they have no padding")
    lengths = _check(sequences)
    row_length = _check_length(
        "row_length", sum(lengths) if row_length is None else row_length, lengths
    )
    used: list[int] = []
    places = []
    for n in lengths:
        row = next((r for r, taken in enumerate(used) if taken + n <= row_length), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row]))
        used[row] += n
    return _lay(sequences, places, len(used), row_length, fill)


class Collator:
    """Turns examples, dicts of per-token fields, into one padded or packed batch for a model.

    Arguments:
        fill: the fields, and for each the value of padding, such as
            `{"input_ids": 1, "labels": -100}`.
        packed: several sequences a row instead of one.
        row_length: length of the rows, see `pack`; without `packed` that of `pad`.
        side: of the padding, unless packed.
        per_sequence: further fields, of which an example has one value: a class, a measurement.

    Called with N examples that have exactly these fields: those of `fill` each (T, ...) or a list
    of numbers, in one example equally long; those of `per_sequence` of one shape. Returns a dict of
    the former (R, L, ...), the latter (N, ...) in the order of `unpack`, and `attention_mask`,
    `seq_ids` and `positions`. Raises ValueError for other fields, shapes or lengths.

    >>> collate = Collator(fill={"input_ids": 1}, packed=True, per_sequence=["label"])
    >>> batch = collate([{"input_ids": [5, 6], "label": 0}, {"input_ids": [7], "label": 1}])
    >>> batch["seq_ids"], batch["label"]
    (tensor([[0, 0, 1]]), tensor([0, 1]))
    """

    def __init__(
        self,
        *,
        fill: Mapping[str, float],
        packed: bool = False,
        row_length: int | None = None,
        side: Side = "right",
        per_sequence: Iterable[str] = (),
    ) -> None:
        check_one_of("side", side, ("right", "left"))
        if not fill:
            raise ValueError("fill must name at least one field")
        self.fill = dict(fill)
        self.per_sequence = _names("per_sequence", per_sequence, {*_names("fill", fill), *_ADDED})
        self.packed = packed
        self.row_length = row_length
        self.side: Side = side

    def __call__(self, examples: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = [
            {name: _tensor(name, value, number) for name, value in example.items()}
            for number, example in enumerate(examples)
        ]
        fields = {*self.fill, *self.per_sequence}
        for number, row in enumerate(rows):
            if set(row) != fields:
                raise ValueError(
                    f"example {number} must have the fields {sorted(fields)}, got {sorted(row)}"
                )
            for name in self.per_sequence:
                if row[name].shape != rows[0][name].shape:
                    raise ValueError(
                        f"{name} must have one shape in all examples: {tuple(row[name].shape)} in "
                        f"example {number}, {tuple(rows[0][name].shape)} in example 0"
                    )
            for name in self.fill:
                if row[name].dim() < 1:
                    raise ValueError(
                        f"{name} must have a value for each token, got one in example {number}: "
                        "name such fields in per_sequence"
                    )
            sizes = {name: len(row[name]) for name in self.fill}
            if len(set(sizes.values())) > 1:
                raise ValueError(f"the fields of example {number} must be equally long: {sizes}")
        batches = {
            name: self._lay([row[name] for row in rows], fill) for name, fill in self.fill.items()
        }
        first = next(iter(batches.values()))
        return {
            **{name: batch.values for name, batch in batches.items()},
            **{name: torch.stack([row[name] for row in rows]) for name in self.per_sequence},
            "attention_mask": first.mask,
            "seq_ids": first.seq_ids,
            "positions": first.positions,
        }

    def _lay(self, sequences: list[Tensor], fill: float) -> SequenceBatch:
        if self.packed:
            return pack(sequences, row_length=self.row_length, fill=fill)
        return pad(sequences, side=self.side, length=self.row_length, fill=fill)


def _tensor(name: str, value: Any, number: int) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} of example {number} must be numbers, got {value!r}") from error


def _names(argument: str, fields: Iterable[str], taken: Iterable[str] = _ADDED) -> tuple[str, ...]:
    if isinstance(fields, str):
        raise ValueError(f"{argument} must be names of fields, got one string {fields!r}")
    names = tuple(fields)
    if len({*names}) < len(names):
        raise ValueError(f"{argument} must name a field once, got {names}")
    if both := sorted({*names}.intersection(taken)):
        raise ValueError(f"{argument} must name no field that is there already, got {both}")
    return names


def _lay(
    sequences: Sequence[Tensor],
    places: list[tuple[int, int]],
    rows: int,
    length: int,
    fill: float,
) -> SequenceBatch:
    """Sequences at their (row, first token), in rows of `length`."""
    first = sequences[0]
    lengths = tuple(len(s) for s in sequences)
    device = first.device
    at = torch.cat(
        [
            torch.arange(row * length + t, row * length + t + n, device=device)
            for (row, t), n in zip(places, lengths)
        ]
    )
    seq_ids = torch.full((rows * length,), PADDING, device=device)
    seq_ids[at] = torch.arange(len(lengths), device=device).repeat_interleave(
        torch.tensor(lengths, device=device)
    )
    positions = torch.zeros_like(seq_ids)
    positions[at] = torch.cat([torch.arange(n, device=device) for n in lengths])
    values = first.new_full((rows * length, *first.shape[1:]), fill)
    values = values.index_copy(0, at, torch.cat(list(sequences)))
    shape = (rows, length)
    return SequenceBatch(
        values.unflatten(0, shape),
        (seq_ids != PADDING).view(shape),
        seq_ids.view(shape),
        positions.view(shape),
        lengths,
    )


def _check(sequences: Sequence[Tensor]) -> list[int]:
    if not len(sequences):
        raise ValueError("sequences must hold at least one sequence")
    first = sequences[0]
    for number, sequence in enumerate(sequences):
        if not isinstance(sequence, Tensor):
            raise ValueError(f"sequence {number} must be a tensor, got {type(sequence).__name__}")
        if sequence.dim() < 1:
            raise ValueError(f"sequence {number} must have shape (T, ...), got a single number")
        if sequence.shape[1:] != first.shape[1:] or sequence.dtype != first.dtype:
            raise ValueError(
                "sequences must be equal but for their length: "
                f"sequence {number} is {tuple(sequence.shape)} {sequence.dtype}, "
                f"sequence 0 {tuple(first.shape)} {first.dtype}"
            )
    return [len(s) for s in sequences]


def _check_length(argument: str, length: int | None, lengths: list[int]) -> int:
    longest = max(lengths)
    if length is None:
        return longest
    check_integer(argument, length, least=0)
    if length < longest:
        where = lengths.index(longest)
        raise ValueError(
            f"{argument} must be at least the longest sequence: sequence {where} has {longest} "
            f"tokens, got {argument} = {length}"
        )
    return length
