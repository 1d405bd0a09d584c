"""`causal_conv1d` against causal-conv1d's reference functions, values and gradients."""

from __future__ import annotations

import inspect

import causal_conv1d
import pytest
import torch
from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref, causal_conv1d_update_ref
from support import assert_close, gradients

from brickwork.kernels.causal_conv1d import causal_conv1d as ours
from brickwork.kernels.causal_conv1d_causal_conv1d import causal_conv1d_causal_conv1d
from brickwork.kernels.sequences import sequence_starts

DTYPES = [torch.float32, torch.float64]


def same(function, reference, tensors, terms):
    values, grads = gradients(function, tensors)
    expected, expected_grads = gradients(reference, tensors)
    assert len(values) == len(expected)
    for i, (a, e) in enumerate(zip([*values, *grads], [*expected, *expected_grads])):
        assert_close(a, e, terms=terms, name=f"result {i}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["torch", "chunked", "cpu"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("W", [1, 2, 4, 6])
@pytest.mark.parametrize("T", [1, 3, 40])
def test_values_states_and_gradients(T, W, options, activation, backend, dtype):
    """Bias, and a state before and after; any width, where the package has kernels for 2 to 4."""
    tensors = [torch.randn(2, T, 5), torch.randn(5, W)]
    tensors += [torch.randn(5), torch.randn(2, 5, W - 1)] if options else []

    def run(x, weight, bias=None, state=None):
        return ours(x, weight, bias, activation=activation, initial_state=state, backend=backend)

    def reference(x, weight, bias=None, state=None):
        y, final = causal_conv1d_ref(x.mT, weight, bias, state, True, None, activation)
        return y.mT, final[..., final.shape[-1] - (W - 1) :]

    same(run, reference, [t.to(dtype) for t in tensors], T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["torch", "chunked", "cpu"])
@pytest.mark.parametrize("initial", [False, True])
def test_packed_sequences(initial, backend, dtype):
    ids = torch.tensor([[3, 5, 5, 5, 9, 9, 9], [4, 4, 6, 6, 6, 6, 8]])
    tensors = [torch.randn(2, 7, 5), torch.randn(5, 4), torch.randn(5)]
    tensors += [torch.randn(2, 5, 3)] if initial else []

    def run(x, weight, bias, state=None):
        named = {"activation": "silu", "initial_state": state, "seq_ids": ids}
        return (ours(x, weight, bias, **named, backend=backend).y,)

    def reference(x, weight, bias, state=None):
        y = causal_conv1d_ref(x.mT, weight, bias, state, activation="silu", seq_idx=ids)
        return (y.mT,)

    same(run, reference, [t.to(dtype) for t in tensors], 14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 2, 5])
def test_decoding(T, dtype):
    """The update in place of a state of W - 1 tokens: our final state."""
    x, weight, bias = torch.randn(2, T, 5), torch.randn(5, 4), torch.randn(5)
    state = torch.randn(2, 5, 3)
    x, weight, bias, state = (t.to(dtype) for t in (x, weight, bias, state))
    y, final = ours(x, weight, bias, activation="silu", initial_state=state)
    updated = state.clone()
    expected = causal_conv1d_update_ref(x.mT, updated, weight, bias, "silu")
    assert_close(y, expected.mT, terms=4)
    assert torch.equal(final, updated)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_our_backend_on_the_package(monkeypatch, packed, reverse):
    """The arguments that the adapter hands over, with the package's reference as the kernel."""

    def kernel(x, weight, bias=None, **named):
        return causal_conv1d_ref(x, weight, bias, **named)

    parameters = inspect.signature(causal_conv1d.causal_conv1d_fn).parameters
    assert set(parameters) >= {"x", "weight", "bias", "seq_idx", "initial_states", "activation"}
    monkeypatch.setattr(causal_conv1d, "causal_conv1d_fn", kernel)
    ids = torch.tensor([[0, 1, 0, 0, 1, 1, 1]]).expand(2, 7) if packed else None
    starts = sequence_starts(ids, reverse=reverse)
    tensors = [torch.randn(2, 7, 8), torch.randn(8, 4), torch.randn(8), torch.randn(2, 8, 3)]

    def adapted(x, weight, bias, state):
        return (causal_conv1d_causal_conv1d(x, weight, bias, state, starts, "silu", reverse),)

    def plain(x, weight, bias, state):
        named = {"activation": "silu", "reverse": reverse, "seq_ids": ids}
        return (ours(x, weight, bias, **named, initial_state=state, backend="torch").y,)

    same(adapted, plain, tensors, 14)
