"""Both directions of a bidirectional scan by the Triton scan, one launch after the other.

Each launch fills a GPU at training sizes, and what they share, the gate, is a tenth of what they
read; one launch for both was not written.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from brickwork.kernels.bidirectional_scan import ScanInputs
from brickwork.kernels.selective_scan import selective_scan
from brickwork.kernels.triton_support import unavailable_here

__all__ = ["bidirectional_scan_triton", "unavailable_here"]


def bidirectional_scan_triton(forward: ScanInputs, backward: ScanInputs, **options: Any) -> Tensor:
    """`bidirectional_scan` for checked arguments."""
    ways = []
    for inputs, reverse in ((forward, False), (backward, True)):
        given = {"D": inputs.D, "delta_bias": inputs.delta_bias, "reverse": reverse, **options}
        ways.append(selective_scan(*inputs[:5], **given, backend="triton").y)
    return ways[0] + ways[1].to(ways[0].dtype)
