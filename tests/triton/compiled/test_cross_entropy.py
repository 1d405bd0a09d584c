"""The loss on tensors on a GPU, which here are fake: chunks of PyTorch, nothing read on the host.

There are no Triton kernels for it; `cross_entropy_chunked` says why.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brickwork.kernels import cross_entropy_chunked as chunked
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.checks import values_readable
from brickwork.kernels.cross_entropy import cross_entropy, token_cross_entropy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def problem(tokens=12, width=16, vocabulary=40, *, dtype=torch.float32, device="cuda"):
    hidden = torch.empty(tokens, width, dtype=dtype, device=device)
    head = torch.empty(vocabulary, width, dtype=dtype, device=device)
    return hidden, head, torch.zeros(tokens, dtype=torch.int64, device=device)


class Ops(TorchDispatchMode):
    """The names of the library's own ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "brickwork":
            self.names.append(function.name().removeprefix("brickwork::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("preferred", ["triton", "chunked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_public_function_takes_chunks(dtype, preferred):
    with FakeTensorMode(), prefer(preferred):
        for reduction, op in (
            ("mean", "summed_loss"),
            ("sum", "summed_loss"),
            ("none", "token_losses"),
        ):
            with Ops() as ops:
                loss = cross_entropy(*problem(dtype=dtype), reduction=reduction)
            assert ops.names == [op]
            assert loss.shape == (() if reduction != "none" else (12,))
            assert (loss.dtype, loss.device.type) == (torch.float32, "cuda")


def test_there_is_no_triton_backend():
    with FakeTensorMode(), pytest.raises(BackendUnavailable, match="cross_entropy has no backend"):
        cross_entropy(*problem(), backend="triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 12])
@pytest.mark.parametrize("single", [True, False])
def test_nothing_is_read_on_the_host(monkeypatch, dtype, tokens, single):
    """D3 46: within the ops too, over several chunks; capture in a CUDA graph needs it. Tensors
    without data, which take the path of a GPU: what reads a value raises."""
    monkeypatch.setattr(chunked, "CHUNK_ENTRIES", 5 * 40)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # bfloat16 products with float32 sums
    hidden, head, labels = problem(tokens, width=4, dtype=dtype, device="meta")
    for read in (lambda: labels.sum().item(), lambda: (labels != 0).nonzero()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
    share = None if single else torch.empty(tokens, device="meta")
    losses, *grads = chunked._run(hidden, head, labels, share, [not single] * 2)
    assert losses.shape == (tokens,)
    if not single:
        assert [g.shape for g in grads] == [hidden.shape, head.shape]
    assert token_cross_entropy(hidden, labels).shape == ()


def test_values_are_not_read_while_a_graph_is_captured(monkeypatch):
    """D1 26: labels are looked at on the CPU only, and no tensor of the device during capture."""
    with FakeTensorMode():
        hidden, head, labels = problem()
        cross_entropy(hidden, head, labels - 7)  # out of range, and left to the device

    class OnGpu:
        is_meta = False
        is_cuda = True

    monkeypatch.setattr("brickwork.kernels.checks.Tensor", OnGpu)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        assert values_readable(OnGpu()) is not capturing
