"""How LCPLM scores the residues of a protein, and variants of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brickwork.assemblies.lc_plm import LCPLM
from brickwork.assemblies.masked_residues import masked_log_probs
from brickwork.assemblies.protein_embeddings import MAX_TOKENS
from brickwork.assemblies.protein_tokens import ALPHABET, RESIDUES, token_rows

_MUTATION = re.compile(r"([A-Z])(-?[0-9]+)([A-Z])")


class Mutation(NamedTuple):
    """`wild_type` becomes `mutant` at place `at` of the sequence, counted from 0."""

    wild_type: str
    at: int
    mutant: str


def parse_variant(
    variant: str, sequence: Sequence[str], *, first_position: int = 1
) -> list[Mutation]:
    """The mutations of a variant such as `"A42G"` or `"A42G:L43F"`, checked against `sequence`.

    Arguments:
        first_position: the number that the first residue of `sequence` bears.

    Raises:
        ValueError: naming the variant, what it says and what the sequence has there.

    >>> parse_variant("K2R:V3L", "MKV")
    [Mutation(wild_type='K', at=1, mutant='R'), Mutation(wild_type='V', at=2, mutant='L')]
    >>> parse_variant("K3R", "MKV")
    Traceback (most recent call last):
    ValueError: 'K3R': the sequence has V at position 3, not K
    """
    found: list[Mutation] = []
    for part in variant.split(":"):
        match = _MUTATION.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{variant!r}: {part!r} is not a mutation such as A42G, several joined by ':'"
            )
        wild_type, position, mutant = match[1], int(match[2]), match[3]
        index = position - first_position
        if not 0 <= index < len(sequence):
            last = first_position + len(sequence) - 1
            raise ValueError(
                f"{variant!r}: position {position} is outside the sequence, "
                f"{first_position} to {last}"
            )
        if sequence[index] != wild_type:
            raise ValueError(
                f"{variant!r}: the sequence has {sequence[index]} at position {position}, "
                f"not {wild_type}"
            )
        if mutant not in RESIDUES:
            raise ValueError(f"{variant!r}: {mutant!r} is not one of {RESIDUES!r}")
        if any(index == other.at for other in found):
            raise ValueError(f"{variant!r} changes position {position} twice")
        found.append(Mutation(wild_type, index, mutant))
    return found


def variant_scores(
    model: LCPLM,
    sequence: str,
    variants: Sequence[str],
    *,
    first_position: int = 1,
    max_tokens: int = MAX_TOKENS,
    on_progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Masked-marginal scores: above 0 where the model holds the variant for likelier.

        score = sum over the mutations w i m of  log p(x_i = m | x without i) - log p(x_i = w | ...)

    Paper: Meier et al., *Language models enable zero-shot prediction of the effects of mutations on
    protein function*, 2021. A residue is masked alone, also where a variant has several mutations
    (as in the authors' program; the paper's formula masks these together), so a position is
    computed once whatever the number of variants, and their scores add up.

    Arguments:
        sequence: the wild type, L residues.
        variants: such as `"A42G"`, or `"A42G:L43F"` for two mutations.
        first_position: the number that the first residue of `sequence` bears.
        max_tokens: of a batch of masked copies.
        on_progress: called with the number of positions of each batch that is done.

    Returns:
        (len(variants),) float32, in the order given.

    Raises:
        ValueError: a variant that is misspelt or does not fit the sequence, naming what it says
            and what the sequence has; otherwise as `masked_log_probs`.

    >>> from brickwork.assemblies import LCPLMConfig
    >>> model = LCPLM(LCPLMConfig(d_model=16, n_layer=1)).eval()
    >>> one, other, both = variant_scores(model, "MKTAYIAK", ["K2R", "A4G", "K2R:A4G"])
    >>> bool((one + other - both).abs() < 1e-5)
    True
    """
    if isinstance(variants, str):
        raise ValueError(f"variants must be a list of strings, got {variants!r}")
    tokens = [ALPHABET[i] for i in token_rows([sequence])[0][1:-1]]  # `<mask>` is one of them
    mutations = [parse_variant(v, tokens, first_position=first_position) for v in variants]
    positions = sorted({mutation.at for found in mutations for mutation in found})
    log_probs = masked_log_probs(
        model, sequence, positions=positions, max_tokens=max_tokens, on_progress=on_progress
    )
    if not log_probs.isfinite().all():
        raise ValueError("the model's logits are not finite: load it in float32")
    row = dict(zip(positions, log_probs.tolist()))
    return torch.tensor([sum(_score(m, row[m.at]) for m in found) for found in mutations])


def _score(mutation: Mutation, log_probs: list[float]) -> float:
    return (
        log_probs[ALPHABET.index(mutation.mutant)] - log_probs[ALPHABET.index(mutation.wild_type)]
    )
