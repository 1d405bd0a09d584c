"""Parameter groups for an optimiser with weight decay."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def decay_parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split a model's parameters into those that weight decay may shrink and those it must not.

    No decay for parameters with fewer than two axes (norms, biases, a scan's D) and for those
    that a Mamba mixer keeps in float32 (A_log, D, the bias of the step sizes): decay would pull
    its time scales towards one value. All others decay. It goes by the modules' classes and
    names, so reloading or copying a model changes nothing; a tied parameter appears once.

    Arguments:
        module: a model or block.
        weight_decay: of the first group, finite and not negative.

    Returns:
        Two groups for a `torch.optim` optimiser, decayed and not, each with `params`,
        `param_names` and `weight_decay`.

    Raises:
        ValueError: for another `weight_decay`.

    >>> from brickwork.blocks import Mamba1
    >>> decayed, kept = decay_parameter_groups(Mamba1(8), weight_decay=0.1)
    >>> print(*kept["param_names"])
    A_log D conv1d.bias dt_proj.bias
    """
    if isinstance(weight_decay, bool) or not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be finite and at least 0, got {weight_decay!r}")
    kept = {
        id(part.get_parameter(name))
        for part in module.modules()
        for name in getattr(part, "float32_parameters", ())
    }
    groups: list[dict[str, Any]] = [
        {"params": [], "param_names": [], "weight_decay": decay} for decay in (weight_decay, 0.0)
    ]
    for name, parameter in module.named_parameters():
        group = groups[parameter.dim() < 2 or id(parameter) in kept]
        group["params"].append(parameter)
        group["param_names"].append(name)
    return groups
