"""The canvas a masked-diffusion model fills, and what its functions are given.

A canvas holds every row packed to the left: its real prompt tokens, `gen_length` masks, then filler
that the attention mask hides. An answer thus follows its prompt without a gap wherever the prompt's
padding stood, also for a model that counts positions from the first column.

Shapes: B rows, P columns of the prompts, T columns of the canvas, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels.checks import check_floating, check_one_of, check_shapes, values_readable
from brickwork.kernels.sequences import check_seq_ids, sequence_starts


@dataclass(frozen=True)
class Canvas:
    """`ids` and `real` (B, T), False for the filler, and the prompts (B, P) they are made of.

    `mask` is what the model is given as attention_mask: `real`, or None if there is no filler.
    """

    ids: Tensor
    real: Tensor
    mask: Tensor | None
    prompt_ids: Tensor
    prompt_real: Tensor
    gen_length: int

    def as_given(self, ids: Tensor) -> Tensor:
        """(B, P + gen_length): `ids` where the prompt stood, padding on the side it was on."""
        columns = self.prompt_ids.shape[1]
        lead = (self.prompt_real.cumsum(1) == 0).sum(1, keepdim=True)
        end = lead + self.real.sum(1, keepdim=True)
        column = torch.arange(columns + self.gen_length, device=ids.device)
        behind = torch.nn.functional.pad(true_first(self.prompt_real), (self.gen_length, 0))
        index = torch.where(column < lead, column, behind)
        index = torch.where((column >= lead) & (column < end), columns + column - lead, index)
        return torch.cat([self.prompt_ids, ids], 1).gather(1, index)


def lay_out(
    prompt_ids: Tensor, real: Tensor | None, *, gen_length: int, mask_token_id: int
) -> Canvas:
    """The canvas of `prompt_ids` (B, P), `real` where not padding, and `gen_length` masks a row."""
    if real is None:
        real = torch.ones_like(prompt_ids, dtype=torch.bool)
    ids, packed = left_align(prompt_ids, real, filler=mask_token_id)
    packed = torch.nn.functional.pad(packed, (0, gen_length))
    ids = torch.nn.functional.pad(ids, (0, gen_length), value=mask_token_id)
    column = torch.arange(ids.shape[1], device=ids.device)
    on_canvas = column < packed.sum(1, keepdim=True) + gen_length
    mask = None if bool(on_canvas.all()) else on_canvas
    return Canvas(ids, on_canvas, mask, prompt_ids, real, gen_length)


def left_align(ids: Tensor, real: Tensor, *others: Tensor, filler: int) -> tuple[Tensor, ...]:
    """Pack each row's real entries to the left, in order, cut to the longest row.

    `filler` replaces the padding of `ids`; `real` and `others` (B, T) move along.

    >>> left_align(torch.tensor([[0, 7, 8]]), torch.tensor([[False, True, True]]), filler=4)
    (tensor([[7, 8]]), tensor([[True, True]]))
    """
    longest = int(real.sum(1).max()) if len(real) else 0
    order = true_first(real)[:, :longest]
    ids, real, *others_ = (each.gather(1, order) for each in (ids, real, *others))
    return ids.masked_fill(~real, filler), real, *others_


def model_logits(
    model: Callable[..., Any], ids_BT: Tensor, mask_BT: Tensor | None, vocab_size: int | None
) -> Tensor:
    """The model's logits (B, T, V), without the columns past `vocab_size`."""
    output = model(ids_BT, attention_mask=mask_BT)
    return checked_logits(output, tuple(ids_BT.shape), vocab_size)


def checked_logits(output: Any, size: tuple[int, ...], vocab_size: int | None) -> Tensor:
    """The logits (*size, V) in a model's `output`, without the columns past `vocab_size`."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != size:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model must return logits (B, T, V), as they are or under .logits, with (B, T) = "
            f"{size}, got {got}"
        )
    check_floating(logits=logits)
    return cut_vocabulary(logits, vocab_size)


def cut_vocabulary(logits: Tensor, vocab_size: int | None) -> Tensor:
    """`logits` (..., V) without the columns past `vocab_size`, which pad the head for speed."""
    if vocab_size is None:
        return logits
    if logits.shape[-1] < vocab_size:
        raise ValueError(
            f"logits must have at least vocab_size = {vocab_size} columns, got {logits.shape[-1]}"
        )
    return logits[..., :vocab_size]


class RowDraws:
    """Uniform draws in [0, 1): row r fills its first `sizes[r]` entries from its own generator."""

    def __init__(self, generators: list[torch.Generator], sizes: list[int]) -> None:
        self.generators = generators
        self.sizes = sizes

    def __call__(self, like: Tensor) -> Tensor:
        draws = like.new_full(like.shape, 0.5)  # dense, whatever the strides of `like`
        for row, size, generator in zip(draws, self.sizes, self.generators):
            if size:
                row[:size].uniform_(generator=generator)
        return draws


def row_generators(
    rows: int, generator: torch.Generator | None, device: torch.device
) -> list[torch.Generator]:
    """One generator for each row, seeded with a draw of its own from `generator`, in row order.

    Rows that are handled one by one with the same `generator` get the same seeds as in a batch.
    """
    source = torch.device("cpu") if generator is None else generator.device
    made = []
    for _ in range(rows):
        seed = torch.randint(2**63 - 1, (), generator=generator, device=source).item()
        made.append(torch.Generator(device=device).manual_seed(int(seed)))
    return made


def check_ids(argument: str, ids: Tensor) -> None:
    """Raise unless `ids` is (B, T) of int64 or int32."""
    check_shapes(**{argument: (ids, "B T")})
    check_one_of(f"the dtype of {argument}", ids.dtype, (torch.int64, torch.int32))


def as_mask(argument: str, mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """A mask (B, T) over `ids` as bool: True or 1 is real; None stays None."""
    if mask is None:
        return None
    check_shapes(ids=(ids, "B T"), **{argument: (mask, "B T")})
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{argument} must be bool or integer, got {mask.dtype}")
    if free_to_look_at(mask) and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{argument} must be 0 or 1 everywhere")
    return mask == 1


def sequence_index(
    seq_ids: Tensor | None, ids: Tensor, real: Tensor | None = None
) -> Tensor | None:
    """Which packed sequence of its row each token of `ids` (B, T) is in, (B, T), counted from 0.

    Tokens that are not `real` are in the sequence before them.

    >>> sequence_index(torch.tensor([[7, 7, 9, 7]]), torch.zeros(1, 4))
    tensor([[0, 0, 1, 2]])
    """
    check_seq_ids(seq_ids, (ids.shape[0], ids.shape[1]))
    starts = sequence_starts(seq_ids, real)
    return None if starts is None else starts.long().cumsum(1)


def free_to_look_at(tensor: Tensor) -> bool:
    """Whether values can be checked without stalling a device or breaking a traced graph."""
    return tensor.device.type == "cpu" and values_readable(tensor)


def true_first(mask_BT: Tensor) -> Tensor:
    """Column indices (B, T): those of the True entries from left to right, then the others."""
    return mask_BT.to(torch.uint8).argsort(dim=1, descending=True, stable=True)


def masked_subsets(
    maskable_T: Tensor, num_samples: int, generator: torch.Generator, *, per_stratum: int = 1
) -> tuple[Tensor, Tensor]:
    """Masks (S, T) over k random maskable places each, and their weights l / k (S,).

    k is uniform on 1..l; of equal parts of [0, 1) each gives the k of `per_stratum` samples that
    follow one another.
    """
    where = maskable_T.nonzero()[:, 0]
    device, l = where.device, len(where)
    draws = uniform(num_samples, generator=generator, device=device)
    strata = torch.arange(num_samples, device=device) // per_stratum
    points = (strata + draws) / (num_samples // per_stratum)
    k = (points * l).long().clamp(max=l - 1) + 1
    keys = uniform(num_samples, l, generator=generator, device=device)
    ranks = keys.argsort(dim=1).argsort(dim=1)
    masks = maskable_T.new_zeros(num_samples, len(maskable_T))
    masks[:, where] = ranks < k[:, None]
    return masks, l / k.float()


def uniform(*size: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Float32 draws in [0, 1), whatever the default dtype: bfloat16 has too few values below 1.

    `torch.rand` takes no symbolic size together with a generator argument; vmap knows nothing else.
    """
    if generator is None:
        return torch.rand(size, device=device, dtype=torch.float32)
    return torch.zeros(size, device=device, dtype=torch.float32).uniform_(generator=generator)
