from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from support import assert_close, assert_same_function
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from brickwork.blocks.linear import Linear
from brickwork.kernels import linear as module
from brickwork.kernels.backend import prefer
from brickwork.kernels.linear import linear


@pytest.fixture(params=["oneDNN", "MKL"])
def library(request, monkeypatch):
    """Whatever the processor and the size."""
    monkeypatch.setattr(module, "_faster", request.param == "oneDNN")
    monkeypatch.setattr(module, "TERMS", 1)
    return request.param


@pytest.fixture
def by_onednn(monkeypatch):
    """The products that oneDNN computes, whatever the processor and the size."""
    called = []
    product = module._product
    monkeypatch.setattr(module, "_faster", True)
    monkeypatch.setattr(module, "TERMS", 1)
    monkeypatch.setattr(module, "_product", lambda *a: (called.append(a), product(*a))[1])
    return called


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64,), (130,), (2, 3, 40), (65, 1), (0,)])
def test_values_and_gradients(library, shape, bias):
    x, weight = torch.randn(*shape, 24), torch.randn(17, 24)
    tensors = [x, weight, *([torch.randn(17)] if bias else [])]
    assert_same_function(nn.functional.linear, linear, tensors, terms=max(24, x.numel() // 24))


def test_any_strides(library):
    x = torch.randn(24, 2, 70).mT  # (24, 70, 2)
    weight = torch.randn(2, 9).mT
    assert_same_function(nn.functional.linear, linear, [x, weight], terms=24 * 70)
    row = torch.randn(24)
    assert_same_function(
        lambda row, w: nn.functional.linear(row.expand(80, 24), w),
        lambda row, w: linear(row.expand(80, 24), w),
        [row, torch.randn(5, 24)],
        terms=80 * 5,
    )


@pytest.mark.parametrize(
    ("weight", "taken"),
    [
        (torch.randn(20, 24), True),
        (torch.randn(24, 20).mT, True),
        (torch.randn(40, 24)[:20], True),
        (torch.randn(20, 30)[:, :24], False),
        (torch.randn(40, 24)[::2], False),
        (torch.randn(24, 30)[:, :20].mT, False),
        (torch.randn(24).expand(20, 24), False),
    ],
)
def test_a_weight_with_gaps_does_not_go_to_onednn(by_onednn, weight, taken):
    """oneDNN multiplies by it a thousand times more slowly than by a whole matrix."""
    x = torch.randn(70, 24)
    torch.testing.assert_close(linear(x, weight), nn.functional.linear(x, weight))
    assert bool(by_onednn) == taken


@pytest.mark.parametrize(("tokens", "products"), [(150, 3), (190, 3), (200, 2)])
def test_gradient_of_a_wide_weight(by_onednn, tokens, products):
    """It is a product of oneDNN's too, where the tokens that it sums over are few."""
    x, weight = torch.randn(tokens, 96), torch.randn(70, 96)
    linear(x.requires_grad_(), weight.requires_grad_()).sum().backward()
    assert len(by_onednn) == products
    for cut in (x.detach(), torch.randn(tokens, 200)[:, ::2][:, :96], torch.randn(96, tokens).mT):
        assert_same_function(
            nn.functional.linear, linear, [cut, weight.detach()], terms=tokens * 96
        )


def test_second_derivatives(library):
    x, weight = torch.randn(70, 8), torch.randn(6, 8)

    def penalty(product):
        def function(x, weight):
            y = product(x, weight).tanh().sum()
            return torch.autograd.grad(y, x, create_graph=True)[0].square().sum()

        return function

    assert_same_function(
        penalty(nn.functional.linear), penalty(linear), [x, weight], terms=70 * 8 * 6
    )


def test_only_the_gradients_asked_for(library):
    x, weight = torch.randn(70, 8), torch.randn(6, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert_close(weight.grad, x.sum(0).expand(6, 8), terms=70)
    moving = x.clone().requires_grad_()
    linear(moving, weight.detach()).sum().backward()
    assert_close(moving.grad, weight.detach().sum(0).expand(70, 8), terms=6)


def test_where_it_steps_back(library, monkeypatch):
    """Small or other products, tracing, counting, and the specification's own run go to PyTorch."""
    asked = []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda *args: asked.append(1) or product(*args))
    x, weight = torch.randn(70, 8), torch.randn(6, 8)
    linear(x, weight)
    assert len(asked) == (library == "oneDNN")
    asked.clear()
    linear(x[:63], weight)
    linear(x.double(), weight.double())
    linear(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    with prefer("torch"):
        linear(x, weight)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    assert counter.get_total_flops() == 2 * 70 * 8 * 6
    torch.func.vmap(linear, (0, None))(x.expand(3, 70, 8), weight)
    torch.compile(linear, fullgraph=True, backend="eager")(x, weight)
    assert linear(x.to("meta"), weight.to("meta")).shape == (70, 6)
    assert not asked
    monkeypatch.setattr(module, "TERMS", 2**24)
    linear(x, weight)
    assert not asked
    with pytest.raises(RuntimeError, match="shape"):
        linear(x, torch.randn(6, 9))


def test_the_layer_is_an_nn_linear(library):
    torch.manual_seed(0)
    ours = Linear(8, 6)
    torch.manual_seed(0)
    theirs = nn.Linear(8, 6)
    assert isinstance(ours, nn.Linear)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(ours.weight, theirs.weight)
    x = torch.randn(70, 8)
    assert_close(ours(x), theirs(x), terms=8)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x), ours(x))


def test_biases_of_any_form(library):
    x, weight = torch.randn(70, 8), torch.randn(6, 8)
    for bias in (
        torch.randn(1).expand(6),
        torch.randn(6, 2)[:, 0],
        torch.randn(()),
        torch.randn(1),
        torch.randn(1, 6),
    ):
        assert_close(linear(x, weight, bias), nn.functional.linear(x, weight, bias), terms=8)
    with pytest.raises((RuntimeError, NotImplementedError)):
        linear(x, weight, torch.randn(6, device="meta"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own
def test_forward_mode_and_batched_gradients(library):
    x, weight = torch.randn(70, 8), torch.randn(6, 8)
    with forward_ad.dual_level():
        y = linear(forward_ad.make_dual(x, torch.ones_like(x)), weight)
        assert_close(forward_ad.unpack_dual(y).tangent, weight.sum(1).expand(70, 6), terms=8)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: linear(x, weight).sum(0), x, vectorize=True
    )
    assert_close(jacobian, weight[:, None].expand(6, 70, 8), terms=70)


def test_other_layouts_go_to_pytorch(library):
    x, weight = torch.randn(70, 8), torch.randn(6, 8)
    expected = nn.functional.linear(x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sparse layouts, and of flags for other devices
        sparse = weight.to_sparse_csr()
        with torch.backends.mkldnn.flags(enabled=False):
            assert_close(linear(x, weight), expected, terms=8)
    assert_close(linear(x, sparse), expected, terms=8)
    assert_close(linear(torch._neg_view(x), weight), -expected, terms=8)
