"""How the scan of Mamba-2 is dispatched on a GPU, whose tensors here are fake; and its grids."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brickwork.kernels import ssd_scan_triton as ops
from brickwork.kernels import ssd_scan_triton_launch as launches
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.ssd_scan import ssd_scan


class Recorder(TorchDispatchMode):
    """The ops of ours that were called."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "brickwork":
            self.ops.append(op._opname)
        return op(*args, **(kwargs or {}))


def make(B=2, T=70, H=8, P=64, N=128, G=2, *, dtype=torch.bfloat16, device="cuda"):
    sizes = [(B, T, H, P), (B, T, H), (H,), (B, T, G, N), (B, T, G, N)]
    return [torch.empty(s, dtype=dtype, device=device) for s in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [0, 2, 70])
def test_auto_takes_triton_on_a_gpu(dtype, T):
    """A mask asks for no value, which would raise here. (A PyTorch without CUDA cannot index or
    differentiate fake tensors of a GPU.)"""
    with FakeTensorMode(), Recorder() as recorder:
        inputs = make(T=T, dtype=dtype)
        mask = torch.zeros(2, T, dtype=torch.int32, device="cuda")
        y, state = ssd_scan(*inputs, mask=mask, reverse=True, z=inputs[0])
        assert recorder.ops == ["ssd_scan_triton"]
        assert (y.shape, y.dtype, y.device.type) == (inputs[0].shape, dtype, "cuda")
        assert y.is_contiguous()
        assert (tuple(state.shape), state.dtype) == ((2, 8, 64, 128), torch.float32)
        grads = ops._backward_op(y, state, *inputs, *[None] * 6, True, False, 256)
        for t, grad in zip(inputs, grads):
            assert (grad.shape, grad.dtype, grad.device) == (t.shape, t.dtype, t.device)


def test_named_backends_insist():
    with FakeTensorMode():
        with pytest.raises(BackendUnavailable, match="it takes float32, bfloat16, float16, got"):
            ssd_scan(*make(dtype=torch.float64), backend="triton")
        with pytest.raises(BackendUnavailable, match="it takes tensors on a GPU, got cpu"):
            ssd_scan(*make(device="cpu"), backend="triton")
        x, *others = make()
        with pytest.raises(BackendUnavailable, match="must be on one device, got cuda:0 and cpu"):
            ssd_scan(x, *(t.cpu() for t in others), backend="triton")


def test_precision_of_products():
    """float16 never goes through bfloat16; float32 only through TF32 where PyTorch may."""
    assert launches.precision(*[torch.bfloat16] * 3) == "bf16"
    assert launches.precision(torch.float16, torch.bfloat16) == "tf32"
    assert launches.precision(torch.bfloat16, torch.float32) == "ieee"
    torch.set_float32_matmul_precision("high")
    try:
        assert launches.precision(torch.bfloat16, torch.float32) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_token_counts_are_on_the_first_axis_of_a_grid(monkeypatch):
    """D1 13: the others end at 65,535."""
    grids = []
    for name in [n for n in vars(launches) if n.startswith("ssd_")]:
        kernel = getattr(launches, name)

        class Kernel:
            __name__, arg_names = name, kernel.arg_names

            def __getitem__(self, grid):
                grids.append(grid)
                return lambda **_: None

        monkeypatch.setattr(launches, name, Kernel())
    T = 2**19
    x, delta, A, B, C = make(1, T, 2, 1, 1, 1, device="meta")
    ops._forward(x, delta, A, B, C, *[None] * 6, True, False, 4)
    ops._backward(x, None, x, delta, A, B, C, *[None] * 6, True, False, 4)
    assert len(grids) >= 12
    assert all(max(grid[1:]) < 100 for grid in grids)
