"""The adapter, on a stand-in for the package; `make test-vendor` runs it on the real one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from einops import rearrange
from support import assert_close, gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from brickwork.kernels import backend
from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.selective_scan import selective_scan, selective_scan_reference
from brickwork.kernels.selective_scan_mamba_ssm import selective_scan_mamba_ssm


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(backend._availability, "mamba_ssm", None)


def arguments(**changes):
    """CUDA tensors that the package takes, with `changes`; for use under FakeTensorMode."""
    shapes = {"x": (2, 5, 6), "delta": (2, 5, 6), "A": (6, 4), "B": (2, 5, 4), "C": (2, 5, 4)}
    given = {name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}
    given.update(changes)
    return [given.pop(name) for name in shapes], given


def why(**changes):
    tensors, options = arguments(**changes)
    with pytest.raises(BackendUnavailable) as error:
        selective_scan(*tensors, **options, backend="mamba_ssm")
    return str(error.value).partition("cannot run here: ")[2]


@pytest.mark.usefixtures("installed")
def test_limits_of_the_package():
    """mamba#503: offsets below 2^31; mamba#536: no initial state; axolotl PR#3572: no seq_ids."""
    with FakeTensorMode():
        cuda = {"device": "cuda"}
        x = torch.empty(2, 5, 6, **cuda)
        assert why(mask=torch.ones(2, 5, dtype=torch.bool, **cuda)) == "it knows no mask"
        assert why(seq_ids=torch.ones(2, 5, dtype=torch.long, **cuda)) == "it knows no seq_ids"
        initial = torch.empty(2, 6, 4, **cuda)
        assert why(initial_state=initial) == "it knows no initial_state"
        assert "share one dtype" in why(x=x.bfloat16())
        assert "share one dtype" in why(z=x.half())
        assert "float64" in why(D=torch.empty(6, dtype=torch.float64, **cuda))
        wide = torch.empty(2, 5, 257, **cuda)
        assert why(A=torch.empty(6, 257, **cuda), B=wide, C=wide).endswith("states, got 257")
        none = torch.empty(2, 5, 0, **cuda)
        assert why(A=torch.empty(6, 0, **cuda), B=none, C=none).endswith("states, got 0")
        nothing, short = torch.empty(2, 0, 6, **cuda), torch.empty(2, 0, 4, **cuda)
        assert why(x=nothing, delta=nothing, B=short, C=short) == "it takes no empty tensors"
        large, tall = torch.empty(2, 2**30, 1, **cuda), torch.empty(2, 2**30, 4, **cuda)
        assert "2^31" in why(x=large, delta=large, A=torch.empty(1, 4, **cuda), B=tall, C=tall)
        wide = [t.double() for t in arguments()[0]]
        assert "share one dtype" in why(**dict(zip(("x", "delta", "A", "B", "C"), wide)))
    x, A, B = torch.ones(1, 2, 3), torch.ones(3, 4), torch.ones(1, 2, 4)
    with pytest.raises(BackendUnavailable, match="it takes CUDA tensors, got cpu"):
        selective_scan(x, x, A, B, B, backend="mamba_ssm")


def test_not_installed_is_the_reason(monkeypatch):
    monkeypatch.setitem(backend._availability, "mamba_ssm", "import mamba_ssm failed: why ever")
    with FakeTensorMode():
        assert why() == "import mamba_ssm failed: why ever"
        tensors, _ = arguments()
        assert selective_scan(*tensors).y.shape == (2, 5, 6)


@pytest.fixture
def package(monkeypatch, installed):
    """A mamba-ssm made of our reference: its layout, and no gradient of the last state."""

    def selective_scan_fn(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state=False
    ):
        assert A.dtype == torch.float32
        assert return_last_state
        y, last = selective_scan_reference(
            u.mT,
            delta.mT,
            A,
            rearrange(B, "b g n t -> b t g n"),
            rearrange(C, "b g n t -> b t g n"),
            D=D,
            z=None if z is None else z.mT,
            delta_bias=delta_bias,
            softplus=delta_softplus,
        )
        return y.mT, last.detach()

    modules = {
        name: ModuleType(name)
        for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.selective_scan_interface")
    }
    modules["mamba_ssm.ops.selective_scan_interface"].selective_scan_fn = selective_scan_fn
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", [True, False])
@pytest.mark.parametrize("results", ["both", "y", "final_state"])
def test_equals_the_reference(reverse, options, results):
    """Also the gradient of the final state, which the package does not have."""
    x, delta, z = torch.randn(3, 2, 7, 6)
    B, C = torch.randn(2, 2, 7, 2, 4)
    tensors = [x, delta, -torch.rand(6, 4), B, C]
    tensors += [torch.randn(6), z, torch.randn(6)] if options else []

    def picked(run):
        def call(x, delta, A, B, C, D=None, z=None, delta_bias=None):
            named = {"D": D, "z": z, "delta_bias": delta_bias, "reverse": reverse}
            y, state = run(x, delta, A, B, C, softplus=True, **named)
            return {"both": (y, state), "y": (y,), "final_state": (state,)}[results]

        return call

    absent = dict.fromkeys(("mask", "starts", "initial_state"))
    found = gradients(picked(lambda *a, **k: selective_scan_mamba_ssm(*a, **k, **absent)), tensors)
    expected = gradients(picked(selective_scan_reference), tensors)
    for a, e in zip([*found[0], *found[1]], [*expected[0], *expected[1]]):
        if e is None:  # the final state depends on neither C, D nor z
            assert a is None or (a == 0).all()
        else:
            assert_close(a, e, terms=7)
