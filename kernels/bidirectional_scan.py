"""Two selective scans, one in each direction, as one: what a bidirectional mixer adds up.

B batch, T tokens, E channels, N state, G groups of B and C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from brickwork.kernels.backend import choose, compute_dtype, preferred
from brickwork.kernels.checks import check_shapes
from brickwork.kernels.selective_scan import (
    check_scan,
    choose_scan,
    selective_scan,
    selective_scan_reference,
)
from brickwork.kernels.sequences import check_mask, check_seq_ids, sequence_starts, why_not_plain

ONLY_OF_ONE = ("chunked", "mamba_ssm")  # backends that selective_scan has alone


class ScanInputs(NamedTuple):
    """The tensors of `selective_scan` that each direction has for itself."""

    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    delta_bias: Tensor | None = None


def bidirectional_scan(
    forward: ScanInputs,
    backward: ScanInputs,
    *,
    z: Tensor | None = None,
    softplus: bool = False,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The sum of a scan from the left and a scan from the right.

    `y = selective_scan(*forward, z).y + selective_scan(*backward, z, reverse=True).y`; the compiled
    backend runs both over a tile of channels at once and adds them there, Triton both in one
    launch.

    Paper: Wang et al., *Long-context Protein Language Modeling Using Bidirectional Mamba with
    Shared Projection Layers*, 2024.

    Arguments:
        forward, backward: x, delta (B, T, E), A (E, N), B, C (B, T, N) or (B, T, G, N), D and
            delta_bias (E,) of each direction, as `selective_scan` takes them; y has
            `forward.x`'s dtype.
        z: (B, T, E), the gate of both.
        softplus, mask, seq_ids: of both, as in `selective_scan`.
        backend: "torch", "cpu" or "triton"; "auto" takes "triton" where `selective_scan` would, and
            without either calls that twice.

    Returns:
        (B, T, E).

    Raises:
        ValueError: a wrong shape, dtype or flag.
        BackendUnavailable: a backend was named that cannot run here.

    >>> import torch
    >>> one = torch.ones(1, 3, 1)
    >>> inputs = ScanInputs(one, one, torch.zeros(1, 1), one, one)
    >>> bidirectional_scan(inputs, inputs).flatten()
    tensor([4., 4., 4.])
    """
    sides = {"forward": ScanInputs(*forward), "backward": ScanInputs(*backward)}
    size = None
    for name, (x, delta, A, B, C, D, bias) in sides.items():
        try:
            size = check_scan(x, delta, A, B, C, D, z, bias, softplus, False, None)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    assert size is not None
    check_shapes(
        **{"forward.x": (sides["forward"].x, "B T E"), "backward.x": (sides["backward"].x, "B T E")}
    )
    mask = check_mask(mask, size)
    check_seq_ids(seq_ids, size)
    options: dict[str, Any] = {"z": z, "softplus": softplus, "mask": mask}
    if backend == "auto" and preferred() in ONLY_OF_ONE:
        return _two(*sides.values(), seq_ids=seq_ids, **options)
    chosen = choose(
        "bidirectional_scan",
        backend,
        torch=lambda: why_not_plain(sides["forward"].x),
        cpu=lambda: _why_not_cpu(*sides.values(), z=z),
        triton=lambda: _why_not_triton(*sides["forward"], *sides["backward"], z),
    )
    if chosen == "cpu":
        from brickwork.kernels.bidirectional_scan_cpu import bidirectional_scan_cpu

        starts = sequence_starts(seq_ids, mask), sequence_starts(seq_ids, mask, reverse=True)
        return bidirectional_scan_cpu(*sides.values(), starts=starts, **options)
    if backend == "torch":
        return bidirectional_scan_reference(*sides.values(), seq_ids=seq_ids, **options)
    options["seq_ids"] = seq_ids
    if chosen == "triton" and (
        backend == "triton" or _scans_in_triton(sides["forward"], **options)
    ):
        from brickwork.kernels.bidirectional_scan_triton import bidirectional_scan_triton

        return bidirectional_scan_triton(*sides.values(), **options)
    return _two(*sides.values(), **options)


def bidirectional_scan_reference(
    forward: ScanInputs,
    backward: ScanInputs,
    *,
    z: Tensor | None = None,
    softplus: bool = False,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
) -> Tensor:
    """The specification of `bidirectional_scan`."""
    options: dict[str, Any] = {"z": z, "softplus": softplus, "mask": mask, "seq_ids": seq_ids}
    sides = ScanInputs(*forward), ScanInputs(*backward)
    return _two(*sides, scan=selective_scan_reference, **options)


def _two(
    forward: ScanInputs, backward: ScanInputs, scan: Any = selective_scan, **options: Any
) -> Tensor:
    y = _one_way(scan, forward, reverse=False, **options)
    return y + _one_way(scan, backward, reverse=True, **options).to(y.dtype)


def _one_way(scan: Any, inputs: ScanInputs, **options: Any) -> Tensor:
    return scan(*inputs[:5], D=inputs.D, delta_bias=inputs.delta_bias, **options).y


def _scans_in_triton(side: ScanInputs, *, softplus: bool, **options: Tensor | None) -> bool:
    """Whether `selective_scan` would, maybe because nothing else that it prefers can."""
    given: dict[str, Any] = {"D": side.D, "delta_bias": side.delta_bias, **options}
    return choose_scan("auto", *side[:5], **given) == "triton"


def _why_not_triton(*tensors: Tensor | None) -> str | None:
    from brickwork.kernels.triton_support import why_not

    return why_not(*tensors)


def _why_not_cpu(forward: ScanInputs, backward: ScanInputs, *, z: Tensor | None) -> str | None:
    from brickwork.kernels.selective_scan_cpu import why_not

    for ours, theirs in zip(forward, backward):
        if (ours is None) != (theirs is None) or (
            ours is not None and theirs is not None and ours.shape != theirs.shape
        ):
            return "it takes two directions of the same shapes"
    if compute_dtype(*forward, z) != compute_dtype(*backward, z):
        return "it takes two directions of one compute type"
    return why_not(forward.x)
