"""The adapter, on a stand-in for the package; `make test-vendor` runs it on the real one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from support import assert_close, gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from brickwork.kernels import backend
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.causal_conv1d import causal_conv1d, causal_conv1d_reference
from brickwork.kernels.causal_conv1d_causal_conv1d import causal_conv1d_causal_conv1d
from brickwork.kernels.sequences import sequence_starts


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(backend._availability, "causal_conv1d", None)


def why(x, width=4, **options):
    weight = torch.empty(x.shape[2], width, device="cuda")
    with pytest.raises(BackendUnavailable) as error:
        causal_conv1d(x, weight, **options, backend="causal_conv1d")
    return str(error.value).partition("cannot run here: ")[2]


@pytest.mark.usefixtures("installed")
def test_limits_of_the_package():
    """mamba#345, mamba#413, mamba#643: channels and strides that are no multiples of 8."""
    with FakeTensorMode():
        x = torch.empty(2, 5, 16, device="cuda")
        assert why(x, width=1) == "it takes widths of 2 to 4, got 1"
        assert why(x, width=5) == "it takes widths of 2 to 4, got 5"
        assert why(x, mask=torch.ones(2, 5, dtype=torch.bool, device="cuda")) == "it knows no mask"
        assert "dtypes" in why(x.double())
        # torch.empty_strided: indexing a fake CUDA tensor asks for a real device
        for shape, strides in [
            ((2, 5, 12), (80, 16, 1)),
            ((2, 5, 16), (100, 20, 1)),
            ((2, 5, 16), (84, 16, 1)),
            ((2, 8, 16), (128, 1, 8)),
        ]:
            other = torch.empty_strided(shape, strides, device="cuda")
            assert "multiples of 8" in why(other)
        assert "2^31" in why(torch.empty(2, 2**27, 8, device="cuda"))
        assert why(torch.empty(2, 0, 16, device="cuda")) == "it takes no empty tensors"
    with pytest.raises(BackendUnavailable, match="it takes CUDA tensors, got cpu"):
        causal_conv1d(torch.ones(1, 2, 8), torch.ones(8, 4), backend="causal_conv1d")


def test_not_installed_is_the_reason(monkeypatch):
    monkeypatch.setitem(backend._availability, "causal_conv1d", "import failed: why ever")
    with FakeTensorMode():
        x = torch.empty(2, 5, 16, device="cuda")
        assert why(x) == "import failed: why ever"


@pytest.fixture
def package(monkeypatch):
    """A causal-conv1d made of our reference; it checks what the package demands."""

    def causal_conv1d_fn(x, weight, bias, seq_idx=None, initial_states=None, activation=None):
        assert x.stride(1) == 1
        assert weight.dtype == torch.float32
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32
        if initial_states is not None:
            assert initial_states.stride(1) == 1
        return causal_conv1d_reference(
            x.mT, weight, bias, activation=activation, seq_ids=seq_idx, initial_state=initial_states
        ).y.mT

    module = ModuleType("causal_conv1d")
    module.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_equals_the_reference(reverse, packed, activation):
    ids = torch.tensor([[0, 1, 0, 0, 1, 1, 1]]).expand(2, 7) if packed else None
    tensors = [torch.randn(2, 7, 8), torch.randn(8, 4), torch.randn(8), torch.randn(2, 8, 3)]
    starts = sequence_starts(ids, reverse=reverse)

    def ours(x, weight, bias, initial_state):
        return (
            causal_conv1d_causal_conv1d(
                x, weight, bias, initial_state, starts, activation, reverse
            ),
        )

    def reference(x, weight, bias, initial_state):
        return (
            causal_conv1d_reference(
                x,
                weight,
                bias,
                activation=activation,
                reverse=reverse,
                seq_ids=ids,
                initial_state=initial_state,
            ).y,
        )

    (y,), grads = gradients(ours, tensors)
    (expected,), expected_grads = gradients(reference, tensors)
    for a, e in zip([y, *grads], [expected, *expected_grads]):
        assert_close(a, e, terms=14)
