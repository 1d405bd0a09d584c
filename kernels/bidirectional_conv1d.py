"""Two short convolutions of one sequence, one in each direction, as one: what a bidirectional mixer
puts in front of its scans.

B batch, T tokens, C channels, W width of the filters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from brickwork.kernels.backend import choose, compute_dtype, preferred
from brickwork.kernels.causal_conv1d import (
    Activation,
    causal_conv1d,
    causal_conv1d_reference,
    check_conv,
)
from brickwork.kernels.sequences import check_mask, check_seq_ids, sequence_starts, why_not_plain

ONLY_OF_ONE = ("triton", "chunked", "causal_conv1d")  # backends that causal_conv1d has alone


class Filter(NamedTuple):
    """What each direction of `bidirectional_conv1d` has for itself: weight (C, W) and bias (C,)."""

    weight: Tensor
    bias: Tensor | None = None


def bidirectional_conv1d(
    x: Tensor,
    forward: Filter,
    backward: Filter,
    *,
    activation: Activation = None,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """x convolved from the left with one filter per channel, and from the right with another.

    `causal_conv1d(x, *forward).y` and `causal_conv1d(x, *backward, reverse=True).y`; the compiled
    backend reads x once for both and writes its gradient once.

    Paper: Wang et al., *Long-context Protein Language Modeling Using Bidirectional Mamba with
    Shared Projection Layers*, 2024.

    Arguments:
        x: (B, T, C), floating point.
        forward, backward: weight (C, W) and bias (C,) of each direction.
        activation, mask, seq_ids: of both, as in `causal_conv1d`.
        backend: "torch" or "cpu"; "auto" without the latter calls `causal_conv1d` twice.

    Returns:
        Both results, (B, T, C), in x's dtype.

    Raises:
        ValueError: a wrong shape, dtype or activation.
        BackendUnavailable: a backend was named that cannot run here.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    >>> taps = Filter(torch.tensor([[10.0, 1.0]]))
    >>> [y.flatten() for y in bidirectional_conv1d(x, taps, taps)]
    [tensor([ 1., 12., 23.]), tensor([21., 32.,  3.])]
    """
    forward, backward = Filter(*forward), Filter(*backward)
    size = _check(x, "forward", forward, activation)
    _check(x, "backward", backward, activation)
    mask = check_mask(mask, size)
    check_seq_ids(seq_ids, size)
    if backend == "auto" and preferred() in ONLY_OF_ONE:
        return _two(x, forward, backward, activation=activation, mask=mask, seq_ids=seq_ids)
    chosen = choose(
        "bidirectional_conv1d",
        backend,
        torch=lambda: why_not_plain(x),
        cpu=lambda: _why_not_cpu(x, forward, backward),
    )
    if chosen == "cpu":
        from brickwork.kernels.bidirectional_conv1d_cpu import bidirectional_conv1d_cpu

        starts = sequence_starts(seq_ids, mask), sequence_starts(seq_ids, mask, reverse=True)
        return bidirectional_conv1d_cpu(x, forward, backward, activation, mask, starts)
    conv = bidirectional_conv1d_reference if backend == "torch" else _two
    return conv(x, forward, backward, activation=activation, mask=mask, seq_ids=seq_ids)


def bidirectional_conv1d_reference(
    x: Tensor,
    forward: Filter,
    backward: Filter,
    *,
    activation: Activation = None,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The specification of `bidirectional_conv1d`."""
    options: dict[str, Any] = {"activation": activation, "mask": mask, "seq_ids": seq_ids}
    y = causal_conv1d_reference(x, *forward, **options).y
    return y, causal_conv1d_reference(x, *backward, reverse=True, **options).y


def _two(x: Tensor, forward: Filter, backward: Filter, **options: Any) -> tuple[Tensor, Tensor]:
    y = causal_conv1d(x, *forward, **options).y
    return y, causal_conv1d(x, *backward, reverse=True, **options).y


def _check(x: Tensor, name: str, side: Filter, activation: Activation) -> tuple[int, int]:
    try:
        return check_conv(x, *side, activation, False, None)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _why_not_cpu(x: Tensor, forward: Filter, backward: Filter) -> str | None:
    from brickwork.kernels.causal_conv1d_cpu import why_not

    if forward.weight.shape != backward.weight.shape:
        return "it takes two filters of one width"
    if compute_dtype(x, *forward) != compute_dtype(x, *backward):
        return "it takes two filters of one compute type"
    return why_not(x)
