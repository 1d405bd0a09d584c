"""What the tests of the scans and of the convolution in front of them share: inputs and oracles.

The oracles share no code with the references: each row's real tokens are taken out, put in scan
order and cut at the sequence boundaries, and every sequence is summed up in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

# Lengths at the borders: empty, one, around the chunk of 4 that the tests set, more chunks.
LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 13])
PADDINGS = st.sampled_from([None, "left", "right", "both", "interior", "all"])

OPTIONS = st.fixed_dictionaries(
    {
        name: st.booleans()
        for name in ("D", "z", "delta_bias", "initial_state", "softplus", "reverse")
    }
)
# Everything at once, and each option that changes the course of the computation.
CHOICES = [
    {},
    {"reverse": True, "softplus": True, "delta_bias": True},
    {"D": True, "z": True, "initial_state": True},
    {"mask": True, "seq_ids": True, "z": True, "D": True},
    dict.fromkeys(
        ("D", "z", "delta_bias", "initial_state", "softplus", "reverse", "mask", "seq_ids"), True
    ),
]


def call(
    function: Callable[..., Any], given: Mapping[str, bool], **fixed: Any
) -> Callable[..., Any]:
    """`function` of a scan's nine tensors, the last four only where `given` names them."""

    def run(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *optional: Tensor) -> Any:
        names = ("D", "z", "delta_bias", "initial_state")
        tensors = {n: t for n, t in zip(names, optional) if given.get(n)}
        flags = {n: given[n] for n in ("softplus", "reverse") if n in given}
        return function(x, delta, A, B, C, **tensors, **flags, **fixed)

    return run


def padding_mask(kind: str | None, batch: int, T: int) -> Tensor | None:
    """(B, T) masks, another in each row but for "all"."""
    if kind is None:
        return None
    at = torch.arange(T).expand(batch, T)
    low, high = torch.randint(0, T + 1, (2, batch, 1)).sort(0).values
    return {
        "left": at >= low,
        "right": at < high,
        "both": (at >= low) & (at < high),
        "interior": torch.rand(batch, T) < 0.6,
        "all": torch.zeros(batch, T, dtype=torch.bool),
    }[kind]


def packing_ids(packed: bool, batch: int, T: int) -> Tensor | None:
    """(B, T) sequence ids: neither sorted nor unique, the first one not 0."""
    if not packed:
        return None
    return (torch.rand(batch, T) < 0.4).long().cumsum(1) % 2 + 7


def sequences(
    mask: Tensor | None, seq_ids: Tensor | None, row: int, T: int, reverse: bool
) -> list[list[int]]:
    """The tokens of each sequence of a row, in scan order."""
    order = [t for t in range(T) if mask is None or mask[row, t]]
    order = order[::-1] if reverse else order
    found: list[list[int]] = []
    for before, t in zip([None, *order], order):
        same = before is not None and (seq_ids is None or seq_ids[row, before] == seq_ids[row, t])
        if not same:
            found.append([])
        found[-1].append(t)
    return found


def selective_scan_oracle(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    softplus: bool = False,
    reverse: bool = False,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`y_t = Σ_{s ≤ t} C_t · exp(A Σ_{s < k ≤ t} Δ_k) Δ_s x_s B_s`, term by term."""
    batch, T, E = x.shape
    if B.dim() == 3:
        B, C = B[:, :, None], C[:, :, None]
    B, C = (t.repeat_interleave(E // t.shape[2], 2) for t in (B, C))
    step = delta if delta_bias is None else delta + delta_bias
    step = torch.logaddexp(step, torch.zeros_like(step)) if softplus else step
    y = [[x.new_zeros(E) for _ in range(T)] for _ in range(batch)]
    final = []
    for row in range(batch):
        state = x.new_zeros(E, A.shape[1]) if initial_state is None else initial_state[row]
        for number, tokens in enumerate(sequences(mask, seq_ids, row, T, reverse)):
            before = state if number == 0 else torch.zeros_like(state)
            for i, t in enumerate(tokens):
                passed = tokens[: i + 1]
                state = before * torch.exp(A * sum(step[row, k] for k in passed)[:, None])
                for j, s in enumerate(passed):
                    gone = sum((step[row, k] for k in passed[j + 1 :]), torch.zeros(E))[:, None]
                    state = state + torch.exp(A * gone) * (step * x)[row, s, :, None] * B[row, s]
                out = (state * C[row, t]).sum(-1)
                out = out if D is None else out + D * x[row, t]
                y[row][t] = out if z is None else out * z[row, t] * torch.sigmoid(z[row, t])
        final.append(state)
    rows = [torch.stack(r) if T else x.new_zeros(0, E) for r in y]
    # every input has a gradient, 0 where padding leaves nothing
    tensors = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    nothing = sum((0 * t).sum() for t in tensors if t is not None)
    return torch.stack(rows) + nothing, torch.stack(final) + nothing


def ssd_scan_oracle(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A head is P channels that share their step size and their decay."""
    P, N = x.shape[3], B.shape[3]

    def spread(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(P, -1)

    y, final = selective_scan_oracle(
        x.flatten(2),
        delta.repeat_interleave(P, -1),
        A.repeat_interleave(P)[:, None].expand(-1, N),
        B,
        C,
        D=D.flatten() if D is not None and D.dim() == 2 else spread(D),
        z=None if z is None else z.flatten(2),
        delta_bias=spread(delta_bias),
        initial_state=None if initial_state is None else initial_state.flatten(1, 2),
        **options,
    )
    return y.view_as(x), final.unflatten(1, x.shape[2:])


class _Called(nn.Module):
    def __init__(self, mixer: nn.Module, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.mixer = mixer
        self.function = [function]

    def forward(self, x: Tensor) -> Any:
        return self.function[0](x)


def with_parameters(
    mixer: nn.Module, function: Callable[[Tensor], Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """`function(x)` as one of x and the mixer's parameters, to compare their gradients too."""
    called = _Called(mixer, function)
    names = [name for name, _ in called.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(called, dict(zip(names, values)), (x,))

    return run, [p.detach() for p in mixer.parameters()]
