"""The linear layer of the blocks."""

from __future__ import annotations

from torch import Tensor, nn

from brickwork.kernels.linear import linear


class Linear(nn.Linear):
    """`nn.Linear`, `y = x Wᵀ + b`, with the faster matrix product (see `brickwork.kernels.linear`).

    >>> import torch
    >>> Linear(3, 4)(torch.zeros(2, 3)).shape
    torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
