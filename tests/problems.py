"""Random arguments of the ops whose faster backends are tested alike, compiled or interpreted."""

from __future__ import annotations

import torch

from brickwork.kernels.causal_conv1d import causal_conv1d
from brickwork.kernels.selective_scan import selective_scan

SCAN_OPTIONS = ("D", "z", "delta_bias", "initial_state", "mask", "seq_ids")
CONV_OPTIONS = ("bias", "initial_state", "mask", "seq_ids")


class ScanProblem:
    """Random arguments of a scan; `scan(backend)` is it as a function of `floats`.

    `starts`: how often a packed sequence starts.
    """

    starts = 0.2

    def __init__(self, B, T, E, N, G=1, options=SCAN_OPTIONS, *, softplus=True, reverse=False):
        self.terms = max(T, N)  # the memory of a state, and the states behind a result
        self.flags = {"softplus": softplus, "reverse": reverse}
        if "mask" in options:
            self.flags["mask"] = torch.rand(B, T) > 0.2
        if "seq_ids" in options:
            self.flags["seq_ids"] = (torch.rand(B, T) > 1 - self.starts).cumsum(1)
        delta = torch.randn(B, T, E)
        self.floats = [
            torch.randn(B, T, E),
            delta if softplus else delta.abs(),
            -torch.rand(E, N) * 3,
            torch.randn(B, T, G, N) if G > 1 else torch.randn(B, T, N),
            torch.randn(B, T, G, N) if G > 1 else torch.randn(B, T, N),
        ]
        shapes = {"D": (E,), "z": (B, T, E), "delta_bias": (E,), "initial_state": (B, E, N)}
        self.names = [name for name in shapes if name in options]
        options = {name: torch.randn(shapes[name]) for name in self.names}
        if "delta_bias" in options and not softplus:  # a negative step makes the states grow
            options["delta_bias"].abs_()
        self.floats += options.values()

    def scan(self, backend):
        def run(*floats):
            named = dict(zip(self.names, floats[5:]))
            return selective_scan(*floats[:5], **named, **self.flags, backend=backend)

        return run


class ConvProblem:
    """Random arguments of a convolution; `run(backend)` is it as a function of `floats`."""

    def __init__(self, B, T, C, W, options=CONV_OPTIONS, *, activation="silu", reverse=False):
        self.terms = B * T + W  # the gradient of a weight is the longest sum
        self.flags = {"activation": activation, "reverse": reverse}
        if "mask" in options:
            self.flags["mask"] = torch.rand(B, T) > 0.2
        if "seq_ids" in options:
            self.flags["seq_ids"] = (torch.rand(B, T) > 0.8).cumsum(1)
        shapes = {"bias": (C,), "initial_state": (B, C, W - 1)}
        self.names = [name for name in shapes if name in options]
        self.floats = [torch.randn(B, T, C), torch.randn(C, W)]
        self.floats += [torch.randn(shapes[name]) for name in self.names]

    def run(self, backend):
        def run(x, weight, *others):
            named = dict(zip(self.names, others))
            return causal_conv1d(x, weight, **named, **self.flags, backend=backend)

        return run


def experts_problem(
    tokens=7, width=6, hidden=5, num_experts=4, top_k=2, *, dtype=torch.float32, used=None
):
    """Random arguments of `experts`; only the first `used` experts are chosen, and one may occur
    twice in a row."""
    x = torch.randn(tokens, width)
    gate_up = torch.randn(num_experts, 2 * hidden, width) / width**0.5
    down = torch.randn(num_experts, width, hidden) / max(hidden, 1) ** 0.5
    indices = torch.randint(0, used or num_experts, (tokens, top_k))
    weights = torch.rand(tokens, top_k)
    return [
        t if t.dtype == torch.int64 else t.to(dtype) for t in (x, gate_up, down, indices, weights)
    ]
