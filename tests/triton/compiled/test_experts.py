"""How the experts are dispatched for tensors on a GPU, which here are fake: shapes without data."""

from __future__ import annotations

import pytest
import torch
from resources import configurations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brickwork.kernels import experts_triton as kernels
from brickwork.kernels import experts_triton_launch as launch
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.experts import experts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def problem(
    tokens=12, width=16, hidden=8, num_experts=4, top_k=2, *, dtype=torch.float32, device="cuda"
):
    shapes = ((tokens, width), (num_experts, 2 * hidden, width), (num_experts, width, hidden))
    x, gate_up, down = (torch.empty(s, dtype=dtype, device=device) for s in shapes)
    indices = torch.zeros(tokens, top_k, dtype=torch.int64, device=device)
    return [x, gate_up, down, indices, torch.empty(tokens, top_k, device=device)]


class Ops(TorchDispatchMode):
    """The names of the library's own ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "brickwork":
            self.names.append(function.name().removeprefix("brickwork::"))
        return function(*args, **(kwargs or {}))


def names(*inputs, **options):
    with Ops() as ops:
        experts(*inputs, **options)
    return ops.names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(12, 16, 8, 4, 2), (0, 16, 8, 4, 2), (5, 7, 3, 1, 1)])
def test_auto_takes_triton_on_a_gpu(dtype, sizes):
    """D4 57, 58: a value that is looked at would raise. (PyTorch without CUDA aborts where autograd
    meets a fake GPU: the backward op is called by itself.)"""
    with FakeTensorMode():
        inputs = problem(*sizes, dtype=dtype)
        assert names(*inputs) == ["experts_triton"]
        y = experts(*inputs)
        assert (y.shape, y.dtype, y.device.type) == (inputs[0].shape, dtype, "cuda")
        assert y.is_contiguous()
        y, both, order = kernels.experts_forward(*inputs, dtype, True)
        for wanted in ([True] * 4, [False] * 4):
            grads = kernels.experts_backward(y, *inputs, both, order, wanted)
            for t, grad in zip((*inputs[:3], inputs[4]), grads):
                shape = t.shape if wanted[0] else (0,) * t.dim()
                assert (grad.shape, grad.dtype, grad.device) == (shape, t.dtype, t.device)


def test_strides_and_int32():
    """D1 7: views of any stride give a contiguous result."""
    with FakeTensorMode():
        x, gate_up, down, indices, weights = problem(12, 16, 16)
        views = [t.mT for t in problem(16, 12, 16)[:1]] + [gate_up.mT.mT, down.mT]
        y = experts(*views, indices.int(), weights)
        assert not views[0].is_contiguous()
        assert not views[2].is_contiguous()
        assert y.shape == x.shape
        assert y.is_contiguous()


def test_what_triton_does_not_take_goes_to_grouped():
    with FakeTensorMode():
        wide = problem(dtype=torch.float64)
        assert names(*wide) == ["experts"]
        with pytest.raises(BackendUnavailable, match="float64"):
            experts(*wide, backend="triton")
        inputs = problem()
        with prefer("grouped"):
            assert names(*inputs) == ["experts"]
        with prefer("torch"):
            assert names(*inputs) == []
        apart = [*inputs[:2], inputs[2].cpu(), *inputs[3:]]
        with pytest.raises(BackendUnavailable, match="must be on one device, got cuda:0 and cpu"):
            experts(*apart, backend="triton")
    with pytest.raises(BackendUnavailable, match="it takes tensors on a GPU, got cpu"):
        experts(*problem(device="cpu"), backend="triton")


def test_compiles_to_one_graph():
    """D1 28: with shapes that vary, and on a GPU that is not here."""
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    compiled = torch.compile(experts, fullgraph=True, backend=backend, dynamic=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for tokens in (12, 20):
            y = compiled(*problem(tokens))
            assert y.shape == (tokens, 16)
    assert len(graphs) == 1
    assert any("experts_triton" in str(node.target) for node in graphs[0].graph.nodes)


def test_routing_reads_nothing_on_the_host():
    """D4 58: what the launches prepare, outside of any op; capture in a CUDA graph needs it."""
    with FakeTensorMode():
        _, _, down, indices, _ = problem()
        p = launch.plan(indices, len(down), 16, True)
        assert len(p.expert_of_tile) == p.tiles == 24 // 16 + 4
        assert p.groups.place.shape == indices.shape


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
@pytest.mark.parametrize("widths", [(2056, 1032), (999, 1001)])
@pytest.mark.parametrize("rows", [1, 23, 24, 95, 96, 5000])
def test_every_launch_is_in_the_table(monkeypatch, dtype, widths, rows):
    """The tiles, warps and stages that a launch chooses are compiled in `test_resources.py`; token
    counts are on the first axis of a grid (D1 13), and no constant depends on them (D1 21)."""
    launches = []
    for name in ("gate_up", "rows", "activation_grad", "weight_grad", "combine"):
        kernel = getattr(launch, f"{name}_kernel")
        monkeypatch.setattr(launch, f"{name}_kernel", Launched(launches, kernel))
    monkeypatch.setattr(launch, "is_wide", lambda *t: widths[0] % 8 == 0)
    with FakeTensorMode():
        x, gate_up, down, indices, weights = problem(4 * rows, *widths, 4, 1, dtype=dtype)
        x = torch.empty_like(x)
        _, both, order = kernels._forward(x, gate_up, down, indices, weights, dtype, True)
        wanted = [True] * 4
        kernels._backward(x, x, gate_up, down, indices, weights, both, order, wanted)
    assert len(launches) == 8
    sizes = ("BM", "BN", "BK", "num_warps", "num_stages", "PRECISION")
    table = list(configurations("experts_triton"))
    for kernel, grid, given in launches:
        assert all(extent < 65_536 for extent in grid[1:])
        options = {n: given[n] for n in sizes if n in given}
        found = [
            c
            for c in table
            if c.kernel is kernel
            and {"num_warps": c.num_warps, "num_stages": c.num_stages, **c.constants}.items()
            >= options.items()
            and c.constants["C" if "C" in c.constants else "J"] in (*widths, 2 * widths[1])
        ]
        alike = dtype == torch.float16 and (widths[0] % 8 or rows < 96)  # compiled as bfloat16
        own = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
        types = "*bf16" if alike else own[dtype]
        assert any(types in c.signature.values() for c in found), (kernel.__name__, options)
        tokens = {n for n in ("S", "tiles") if n in given}
        assert tokens <= {p.name for p in kernel.params if p.do_not_specialize}
