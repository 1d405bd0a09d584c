"""Embeddings of proteins by LCPLM.

N proteins, L residues of one, C width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from brickwork.assemblies.lc_plm import LCPLM
from brickwork.assemblies.protein_tokens import pad_rows, token_rows
from brickwork.kernels.checks import check_integer

MAX_TOKENS = 16384


def embed_proteins(
    model: LCPLM, sequences: Sequence[str], *, layer: int = -1, max_tokens: int = MAX_TOKENS
) -> Tensor:
    """The mean of a hidden state over each protein's residues, without `<cls>` and `<eos>`.

    Arguments:
        sequences: N proteins, one-letter codes in upper case.
        layer: whose output: 0 is the embedding of the tokens, `n_layer` the last after the final
            norm; -1 is the last.
        max_tokens: of a batch, padding included. Proteins of like length share a batch.

    Returns:
        (N, C), float32 (float64 of a float64 model), in the order given. What a protein gets does
        not depend on the others, but for the rounding of matrix products of different sizes.

    Raises:
        ValueError: as `tokenize`; a protein without residues, or with more than `max_tokens` - 2;
            no such layer.

    >>> from brickwork.assemblies import LCPLMConfig
    >>> model = LCPLM(LCPLMConfig(d_model=16, n_layer=1)).eval()
    >>> embed_proteins(model, ["MKTAYIAK", "MLV"]).shape
    torch.Size([2, 16])
    """
    found = {i: mean_of(rows) for i, rows in _each(model, sequences, layer, max_tokens)}
    return torch.stack([found[i] for i in range(len(found))])


def embed_residues(
    model: LCPLM, sequences: Sequence[str], *, layer: int = -1, max_tokens: int = MAX_TOKENS
) -> list[Tensor]:
    """The hidden state of every residue, N tensors (L, C); otherwise as `embed_proteins`.

    >>> from brickwork.assemblies import LCPLMConfig
    >>> model = LCPLM(LCPLMConfig(d_model=16, n_layer=1)).eval()
    >>> first, second = embed_residues(model, ["MKTAYIAK", "MLV"])
    >>> first.shape, second.shape
    (torch.Size([8, 16]), torch.Size([3, 16]))
    """
    found = {i: rows.clone() for i, rows in _each(model, sequences, layer, max_tokens)}
    return [found[i] for i in range(len(found))]


def layer_numbers(model: LCPLM, layers: Sequence[int]) -> tuple[int, ...]:
    """The layers counted from 0, each once, or ValueError."""
    count = model.config.n_layer + 1
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
            raise ValueError(f"layers must be in [{-count}, {count}), got {layer!r}")
    numbers = tuple(layer % count for layer in layers)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"layers must be at least one, and each once, got {layers!r}")
    return numbers


def mean_of(states: Tensor) -> Tensor:
    """The mean (C,) of (L, C), in float32 or wider: of a tensor that no batch has a part in."""
    return states.mean(0, dtype=torch.promote_types(states.dtype, torch.float32))


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Which of rows of these lengths share a batch of `max_tokens`, padding included; the longest
    come first, and one alone whatever its length."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        end = start + max(1, max_tokens // lengths[order[start]])
        yield order[start:end]
        start = end


@torch.no_grad()
def residue_states(
    model: LCPLM, rows: Sequence[Sequence[int]], layers: tuple[int, ...]
) -> list[tuple[Tensor, ...]]:
    """For each row of token ids in one batch its residues' states (L, C) at each of the layers."""
    ids, mask = (tensor.to(model.embedding.weight.device) for tensor in pad_rows(rows))
    last = model.config.n_layer
    output = model(ids, attention_mask=mask, output_hidden_states=layers != (last,))
    states = output.hidden_states or {last: output.last_hidden_state}
    return [tuple(states[k][i, 1 : len(row) - 1] for k in layers) for i, row in enumerate(rows)]


def _each(
    model: LCPLM, sequences: Sequence[str], layer: int, max_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """The index of each protein and its (L, C), in the order in which they are computed."""
    check_integer("max_tokens", max_tokens, least=3)
    layers = layer_numbers(model, [layer])
    rows = token_rows(sequences)
    for i, row in enumerate(rows):
        if len(row) == 2:
            raise ValueError(f"sequence {i} is empty: nothing to embed")
        if len(row) > max_tokens:
            raise ValueError(
                f"max_tokens must hold every protein with two tokens more: sequence {i} has "
                f"{len(row) - 2} residues, got {max_tokens}"
            )
    for batch in batches_by_length([len(row) for row in rows], max_tokens):
        for i, (states,) in zip(batch, residue_states(model, [rows[i] for i in batch], layers)):
            yield i, states
