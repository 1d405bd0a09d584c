"""What LCPLM says of a residue that it does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from brickwork.assemblies.lc_plm import LCPLM
from brickwork.assemblies.protein_embeddings import MAX_TOKENS
from brickwork.assemblies.protein_tokens import MASK, token_rows
from brickwork.kernels.checks import check_integer


@torch.no_grad()
def masked_log_probs(
    model: LCPLM,
    sequence: str,
    *,
    positions: Sequence[int] | None = None,
    max_tokens: int = MAX_TOKENS,
    on_progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Log-probabilities of every token at each residue, that residue alone masked.

    Arguments:
        sequence: one protein of L residues.
        positions: which residues, counted from 0 (default: all).
        max_tokens: of a batch of masked copies, each of L + 2 tokens.
        on_progress: called with the number of positions of each batch that is done.

    Returns:
        (len(positions), vocab_size), float32.

    Raises:
        ValueError: as `tokenize`, a position outside [0, L), or L + 2 above `max_tokens`.
    """
    (ids,) = token_rows([sequence])
    length = len(ids) - 2
    check_integer("max_tokens", max_tokens, least=3)
    if len(ids) > max_tokens:
        raise ValueError(
            f"max_tokens must hold the protein with two tokens more: it has {length} residues, "
            f"got {max_tokens}"
        )
    wanted = range(length) if positions is None else positions
    for position in wanted:
        if not 0 <= position < length:
            raise ValueError(f"positions must be in [0, {length}), got {position}")
    row, device = torch.tensor(ids), model.embedding.weight.device
    found = [torch.empty(0, model.config.vocab_size)]
    masked = torch.tensor([p + 1 for p in wanted], dtype=torch.int64)  # behind <cls>
    for chunk in masked.split(max_tokens // len(ids)):
        copies = row.repeat(len(chunk), 1).scatter_(1, chunk[:, None], MASK)
        logits = model(copies.to(device)).logits[torch.arange(len(chunk)), chunk]
        found.append(logits.log_softmax(-1).cpu())
        if on_progress is not None:
            on_progress(len(chunk))
    return torch.cat(found)
