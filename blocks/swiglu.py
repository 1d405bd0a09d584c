"""The SwiGLU feed-forward block.

C width, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from brickwork.blocks.linear import Linear
from brickwork.kernels.checks import check_flag, check_integer
from brickwork.kernels.swiglu import swiglu

_SPLIT = (("gate", "up"), ("gate_proj", "up_proj"))


class SwiGLU(nn.Module):
    """Gated feed-forward layer with SiLU.

    `y = down(silu(gate(x)) · up(x))`; gate and up are one matrix, gate rows first.

    Paper: Shazeer, *GLU Variants Improve Transformer*, 2020.

    Arguments:
        dim: width C of input and output.
        hidden_dim: width F between the two products.
        bias: give both products a bias.

    Called with x (..., C); returns (..., C). Raises ValueError for another width.

    Parameters: `gate_up.weight` (2F, C) - row i of the gate is row i, row i of up is row F + i -
    and `down.weight` (C, F); both are `nn.Linear` modules, as adapters expect. A state dict loads
    with the fused `gate_up.*`, or with `gate.*` and `up.*` apart, or under Llama's names
    `gate_proj.*`, `up_proj.*` and `down_proj.*`; one that has more than one of these, or half of
    one, is an error of `load_state_dict`.

    >>> block = SwiGLU(4, hidden_dim=8)
    >>> block(torch.zeros(2, 4)).abs().max().item()
    0.0
    >>> gate, up = split_gate_up(block.gate_up.weight)
    >>> apart = {"gate.weight": gate, "up.weight": up, "down.weight": block.down.weight}
    >>> block.load_state_dict(apart)
    <All keys matched successfully>
    """

    def __init__(self, dim: int, *, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        check_integer("dim", dim, least=1)
        check_integer("hidden_dim", hidden_dim, least=1)
        check_flag("bias", bias)
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.gate_up = Linear(dim, 2 * hidden_dim, bias=bias)
        self.down = Linear(hidden_dim, dim, bias=bias)
        self.register_load_state_dict_pre_hook(_fuse_in_state_dict)

    def reset_parameters(self) -> None:
        """Reset both products, each by `nn.Linear`'s rule."""
        self.gate_up.reset_parameters()
        self.down.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have shape (..., {self.dim}), got {tuple(x.shape)}")
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(swiglu(gate, up))

    def extra_repr(self) -> str:
        return f"{self.dim}, hidden_dim={self.hidden_dim}"


def fuse_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Stack the rows of a gate and an up projection, gate first.

    Arguments:
        gate, up: weights (..., F, C), of one expert or of several, or biases (F,).

    Returns:
        (..., 2F, C) or (2F,). `split_gate_up` takes it apart again.

    Raises:
        ValueError: shapes that differ.

    >>> fuse_gate_up(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1., 2.])
    """
    if gate.ndim == 0 or gate.shape != up.shape:
        raise ValueError(
            "gate and up must have one shape (..., F, C) or (F,), "
            f"got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    return torch.cat((gate, up), _row_axis(gate))


def split_gate_up(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the gate and of the up projection, as views.

    Arguments:
        gate_up: a weight (..., 2F, C), gate rows first, or a bias (2F,).

    Returns:
        gate and up, each (..., F, C) or (F,).

    Raises:
        ValueError: an odd number of rows.

    >>> split_gate_up(torch.tensor([1.0, 2.0]))
    (tensor([1.]), tensor([2.]))
    """
    if gate_up.ndim == 0 or gate_up.shape[_row_axis(gate_up)] % 2:
        raise ValueError(
            f"gate_up must have an even number of rows, (..., 2F, C) or (2F,), "
            f"got shape {tuple(gate_up.shape)}"
        )
    gate, up = gate_up.chunk(2, _row_axis(gate_up))
    return gate, up


def _row_axis(weight_or_bias: Tensor) -> int:
    return max(weight_or_bias.ndim - 2, 0)


def _fuse_in_state_dict(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Bring the entries under our names, gate and up fused; note what does not fit together."""
    for kind in ("weight", "bias"):
        fused = f"{prefix}gate_up.{kind}"
        pairs = [(f"{prefix}{gate}.{kind}", f"{prefix}{up}.{kind}") for gate, up in _SPLIT]
        given = [pair for pair in pairs if pair[0] in state_dict or pair[1] in state_dict]
        names = [key for key in (fused, *sum(pairs, ())) if key in state_dict]
        down = [f"{prefix}{name}.{kind}" for name in ("down_proj", "down")]
        if down[0] in state_dict:
            if down[1] in state_dict:
                error_msgs.append(f"{kind} of down is given more than once: {down}")
            state_dict[down[1]] = state_dict.pop(down[0])
        if not given:
            continue
        if len(given) > 1 or fused in state_dict:
            error_msgs.append(f"{kind} of gate and up is given more than once: {names}")
        elif len(names) == 1:
            missing = (set(given[0]) - set(names)).pop()
            error_msgs.append(f"{names[0]} is given without {missing}")
        else:
            gate, up = (state_dict.pop(key) for key in given[0])
            if gate.shape == up.shape:
                state_dict[fused] = fuse_gate_up(gate, up)
                continue
            error_msgs.append(
                f"{given[0][0]} and {given[0][1]} must have one shape, "
                f"got {tuple(gate.shape)} and {tuple(up.shape)}"
            )
        for key in names:  # named above, so not once more as unexpected
            state_dict.pop(key, None)
