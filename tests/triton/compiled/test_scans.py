"""How the convolution and the scan are dispatched for tensors on a GPU, which here are fake: shapes
without data, so that a value that is looked at would raise.

PyTorch without CUDA cannot index or negate such tensors: what does, outside of the ops, is left
out: the convolution's final state and its mask, and the starts of packed sequences.
"""

from __future__ import annotations

import sys

import pytest
import torch
from resources import configurations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brickwork.kernels import (
    bidirectional_scan_triton,
    causal_conv1d_triton,
    selective_scan_triton,
    selective_scan_triton_launch,
)
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.bidirectional_scan import bidirectional_scan
from brickwork.kernels.causal_conv1d import causal_conv1d
from brickwork.kernels.selective_scan import selective_scan

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(2, 12, 16), (0, 12, 16), (2, 0, 16), (2, 12, 7)]


class Ops(TorchDispatchMode):
    """The names of the library's own ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "brickwork":
            self.names.append(function.name().removeprefix("brickwork::"))
        return function(*args, **(kwargs or {}))


def on_gpu(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def conv_problem(B, T, C, *, dtype=torch.float32, W=4):
    options = {
        "bias": on_gpu(C),
        "mask": on_gpu(B, T, dtype=torch.bool),
        "initial_state": on_gpu(B, C, W - 1, dtype=dtype),
    }
    return [on_gpu(B, T, 2 * C, dtype=dtype).narrow(2, C, C), on_gpu(C, W)], options


def scan_problem(B, T, E, *, dtype=torch.float32, N=5):
    tokens, numbers = on_gpu(B, T, E, dtype=dtype), on_gpu(B, T, 1, N, dtype=dtype)
    options = {
        "D": on_gpu(E),
        "z": on_gpu(B, T, 2 * E, dtype=dtype).narrow(2, E, E),
        "delta_bias": on_gpu(E),
        "mask": on_gpu(B, T, dtype=torch.bool),
        "initial_state": on_gpu(B, E, N),
    }
    return [tokens, torch.empty_like(tokens), on_gpu(E, N), numbers, torch.empty_like(numbers)], (
        options
    )


@pytest.fixture(autouse=True)
def _no_final_state(monkeypatch):
    module = sys.modules["brickwork.kernels.causal_conv1d"]
    monkeypatch.setattr(module, "last_tokens", lambda x, *_, **__: x)


PROBLEMS = {"causal_conv1d": conv_problem, "selective_scan": scan_problem}
FUNCTIONS = {"causal_conv1d": causal_conv1d, "selective_scan": selective_scan}


@pytest.mark.parametrize("op", PROBLEMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_auto_takes_triton_on_a_gpu(op, dtype, size):
    with FakeTensorMode():
        inputs, options = PROBLEMS[op](*size, dtype=dtype)
        if op == "causal_conv1d":
            options.pop("mask")
        for given in ({}, options, options | {"mask": None}):
            with Ops() as ops:
                y, state = FUNCTIONS[op](*inputs, **given)
            assert ops.names == [f"{op}_triton"]
            assert (y.shape, y.dtype, y.device.type) == (inputs[0].shape, dtype, "cuda")
            assert y.is_contiguous()
            assert state.dtype == (dtype if op == "causal_conv1d" else torch.float32)


@pytest.mark.parametrize("op", PROBLEMS)
def test_gradients_have_their_tensors_shapes_and_dtypes(op):
    """The backward op by itself: PyTorch without CUDA aborts where autograd meets a fake GPU."""
    with FakeTensorMode():
        inputs, options = PROBLEMS[op](2, 12, 16, dtype=torch.bfloat16)
        if op == "causal_conv1d":
            floats = [*inputs, options["bias"], options["initial_state"]]
            rest = (None, None, None, True, False)
            grads = causal_conv1d_triton._backward_op(inputs[0], *floats, *rest)
        else:
            floats = [*inputs, *(options[k] for k in ("D", "z", "delta_bias", "initial_state"))]
            rest = (None, True, False)
            y, final, states = selective_scan_triton._forward_op(*floats, *rest, True)
            assert states.shape == (2, 1 * 5, 16)
            grads = selective_scan_triton._backward_op(y, final, states, *floats, *rest)
        for grad, t in zip(grads, floats):
            assert (grad.shape, grad.dtype, grad.device) == (t.shape, t.dtype, t.device)


def test_what_triton_does_not_take():
    with FakeTensorMode():
        for op, problem in PROBLEMS.items():
            inputs, _ = problem(2, 12, 16)
            wide = [t.double() for t in inputs]
            with pytest.raises(BackendUnavailable, match="float64"):
                FUNCTIONS[op](*wide, backend="triton")
            with pytest.raises(BackendUnavailable, match="must be on one device"):
                FUNCTIONS[op](inputs[0], *(t.cpu() for t in inputs[1:]), backend="triton")
    with pytest.raises(BackendUnavailable, match="it takes tensors on a GPU, got cpu"):
        causal_conv1d(torch.zeros(1, 3, 2), torch.zeros(2, 2), backend="triton")


def test_both_directions():
    with FakeTensorMode():
        inputs, options = scan_problem(2, 12, 16)
        side = (*inputs, options["D"], options["delta_bias"])
        with Ops() as ops:
            y = bidirectional_scan(side, side, z=options["z"], softplus=True)
        assert ops.names == ["bidirectional_scan_triton"]
        assert y.shape == inputs[0].shape
        pairs = [*side, *side, options["z"], None, True]
        y, states = bidirectional_scan_triton._forward_op(*pairs, True)
        *grads, dz = bidirectional_scan_triton._backward_op(y, states, *pairs)
        for grad, t in zip([*grads, dz], [*side, options["z"]]):
            shape = t.shape if grad is dz else (2, *t.shape)
            assert (grad.shape, grad.dtype, grad.device) == (shape, t.dtype, t.device)


class Launched:
    """Stands for a kernel: notes the grids and options of its launches."""

    def __init__(self, launches, kernel):
        self.launches, self.kernel = launches, kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            given = dict(zip(self.kernel.arg_names, args)) | options
            self.launches.append((self.kernel, grid, given))

        return launch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size", [(2, 700, 96, 4), (1, 3, 2048, 4), (64, 65, 5000, 4), (1, 9, 64, 8)]
)
@pytest.mark.parametrize("padded", [False, True])
def test_every_launch_is_in_the_table(monkeypatch, dtype, size, padded):
    """Tiles and warps that a launch chooses are compiled in `test_resources.py`; all programs are
    on the first axis of a grid (D1 13), no constant depends on batch or length (D1 21)."""
    *size, width = size
    table = {
        module: list(configurations(module))
        for module in ("causal_conv1d_triton", "selective_scan_triton")
    }
    launches = []
    for module in (causal_conv1d_triton, selective_scan_triton_launch):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Launched(launches, getattr(module, name)))
    monkeypatch.setattr(
        selective_scan_triton_launch.triton_support, "multiprocessors", lambda x: 132, raising=True
    )
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", "meta")
    inputs, options = conv_problem(*size, dtype=dtype, W=width)
    floats = [*inputs, options["bias"], options["initial_state"]]
    index = on_gpu(*size[:2], dtype=torch.int64) if padded else None
    count = on_gpu(size[0], dtype=torch.int64) if padded else None
    rest = (index, count, options["mask"] if padded else None, True, False)
    y = causal_conv1d_triton._forward(*floats, *rest)
    causal_conv1d_triton._backward(y, *floats, *rest)
    inputs, options = scan_problem(*size, dtype=dtype, N=16)
    floats = [*inputs, *(options[k] for k in ("D", "z", "delta_bias", "initial_state"))]
    rest = (on_gpu(*size[:2], dtype=torch.uint8) if padded else None, True, padded)
    y, final, states = selective_scan_triton._forward(*floats, *rest, True)
    selective_scan_triton._backward(y, final, states, *floats, *rest)
    pairs = [*inputs, *(options[k] for k in ("D", "delta_bias"))] * 2
    flags = on_gpu(2 * size[0], size[1], dtype=torch.uint8) if padded else None
    y, states = bidirectional_scan_triton._forward(*pairs, options["z"], flags, True, True)
    bidirectional_scan_triton._backward(y, states, *pairs, options["z"], flags, True)
    assert len(launches) >= 10
    for kernel, grid, given in launches:
        assert len(grid) == 1
        wanted = {
            k: v
            for k, v in given.items()
            if k in ("BLOCK", "Q", "COLUMNS", "WIDTH", "UNROLL", "TILED")
        }
        alike = [
            c
            for configurations_of in table.values()
            for c in configurations_of
            if c.kernel is kernel
            and c.num_warps == given["num_warps"]
            and wanted.items() <= c.constants.items()
        ]
        assert alike, (kernel.__name__, wanted, given["num_warps"])
        if "FLAGS" in given and given["FLAGS"] is not None and "Q" in given:
            assert any(c.constants.get("FLAGS", ...) is ... for c in alike), kernel.__name__
        sizes = {"tokens", "batch", "per_program", "segments", "segment"} & set(given)
        assert sizes <= {p.name for p in kernel.params if p.do_not_specialize}


def test_programs_on_amd_fill_their_warps(monkeypatch):
    """Of 64 threads: with 32 channels every second one would do nothing."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    launch = selective_scan_triton_launch
    assert launch.block_of_forward(16, 1, torch.empty(0)) == 64
    assert launch.block_of_backward(16) == 64


def test_b_and_c_are_prepared_for_whole_loads():
    launch = selective_scan_triton_launch
    for state in (1, 16, 100, 1025, 5000):
        columns, rows = launch.shape_of_preparation(state)
        assert columns >= state
        assert rows % launch.together() == 0
