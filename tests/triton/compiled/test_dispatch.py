"""Which backend the public functions choose on GPUs, seen on fake CUDA tensors: shapes, dtypes and
strides without data. A PyTorch built for CPUs cannot differentiate them, nor index them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brickwork.kernels import triton_support
from brickwork.kernels.add_norm import add_norm
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.rms_norm import rms_norm
from brickwork.kernels.rope import rope
from brickwork.kernels.rope_qk import rope_qk
from brickwork.kernels.swiglu import swiglu


class Recorder(TorchDispatchMode):
    """The ops of ours that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "brickwork":
            self.ops.append(op._opname)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def ops() -> Iterator[list[str]]:
    with FakeTensorMode(), Recorder() as recorder:
        yield recorder.ops


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms(ops, dtype):
    """D1 17, D1 19, D1 25."""
    x, w = tensor(2, 3, 64, dtype=dtype), tensor(64, dtype=torch.float32)
    y = rms_norm(x, w)
    out = add_norm(x, x.float(), w, w, kind="layer", residual_dtype=torch.float32)
    assert ops == ["add_norm_triton", "add_norm_triton"]
    assert y.dtype == out.y.dtype == dtype
    assert out.residual.dtype == torch.float32
    for t in (y, *out):
        assert t.shape == x.shape
        assert t.is_contiguous()
        assert t.device == x.device


def test_strided_and_empty_inputs(ops):
    x, w = tensor(4, 128), tensor(64)
    stepped = x.as_strided((4, 64), (128, 2))
    for strided in (stepped, x.narrow(1, 64, 64), tensor(1, 64).expand(4, 64), tensor(64, 4).t()):
        assert rms_norm(strided, w).stride() == (64, 1)
    assert rms_norm(tensor(0, 64), w).shape == (0, 64)
    assert ops == ["add_norm_triton"] * 5


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope(ops, layout):
    q, k = tensor(2, 5, 8, 64), tensor(2, 2, 5, 64).transpose(1, 2)
    inv_freq, positions = tensor(16, dtype=torch.float32), tensor(5, dtype=torch.int64)
    options = {"inv_freq": inv_freq, "layout": layout, "rotary_dim": 32}
    assert rope(q, positions, **options).shape == q.shape
    for weights in ({}, {"q_weight": tensor(64), "k_weight": tensor(64)}):
        out = rope_qk(q, k, positions, **options, **weights)
        assert [t.shape for t in out] == [q.shape, k.shape]
        assert all(t.is_contiguous() and t.dtype == q.dtype for t in out)
    assert ops == ["rope_triton"] * 3


def test_swiglu(ops):
    gate, up = tensor(2, 5, 128).chunk(2, -1)
    y = swiglu(gate, up)
    assert y.shape == gate.shape
    assert y.is_contiguous()
    assert ops == ["swiglu_triton"]


def test_what_goes_elsewhere(ops):
    """float64, other devices and a preference are no errors, but named backends insist."""
    x, w = tensor(2, 64), tensor(64)
    rms_norm(x.double(), w)
    rms_norm(tensor(2, 64, device="cpu"), tensor(64, device="cpu"))
    rms_norm(tensor(2, 64, device="meta"), tensor(64, device="meta"))
    with prefer("torch"):
        rms_norm(x, w)
    assert not ops
    with pytest.raises(BackendUnavailable, match="it takes float32, bfloat16, float16, got"):
        rms_norm(x.double(), w, backend="triton")
    with pytest.raises(BackendUnavailable, match="it takes tensors on a GPU, got cpu"):
        rms_norm(tensor(2, 64, device="cpu"), tensor(64, device="cpu"), backend="triton")
    with pytest.raises(BackendUnavailable, match="on one device, got cuda:0 and cpu"):
        rms_norm(x, tensor(64, device="cpu"), backend="triton")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((8, 0), None),
        ((12, 0), None),
        ((7, 5), "it needs compute capability 8.0, device 1 has 7.5"),
    ],
)
def test_old_gpus(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(triton_support, "_gpus", {})
    x = SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.float32)
    assert triton_support.why_not(x) == reason


def test_launches_go_to_the_tensors_gpu(monkeypatch):
    """D1 25."""
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Guard)
    with triton_support.device_guard(SimpleNamespace(device=torch.device("cuda", 1))):
        assert entered == [torch.device("cuda", 1)]
    assert entered[-1] is None


def test_token_counts_are_on_the_first_axis_of_a_grid():
    """D1 13: the others end at 65,535."""
    from brickwork.kernels import swiglu_triton

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *a, **k: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swiglu_triton, "swiglu_forward", Kernel())
        x = torch.empty(1, 1).expand(2**18, 2048)
        swiglu_triton._launch(swiglu_triton.swiglu_forward, [x, x], [x], False)
    assert grids == [(2**17, 2)]
