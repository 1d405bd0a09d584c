"""What products in TF32 have in common."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from brickwork.kernels.tf32_triton import turned


@triton.jit
def turn(X, Y, N: tl.constexpr, PRECISION: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(Y + n, turned(tl.load(X + n), PRECISION))


def turn_all(x, precision="tf32"):
    y = torch.empty_like(x)
    turn[(1,)](x, y, x.numel(), precision)
    return y


def test_what_tf32_can_hold_stays_as_it_is():
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int32) & ~0x1FFF
    x = bits.view(torch.float32)
    x = torch.where((x.abs() < 3.4e38) & (x.abs() > 1e-30), x, 1.0)
    x[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(turn_all(x).view(torch.int32), x.view(torch.int32))
    assert turn_all(torch.full((2,), torch.nan)).isnan().all()


def test_the_rest_is_nearer_than_cut_off():
    x = torch.randn(2**16)
    last = 2.0 ** (x.abs().log2().floor() - 10)
    off = (turn_all(x).double() - x.double()) * x.sign() / last
    assert off.abs().max() <= 2 / 3 + 1e-3
    assert off.mean().abs() < 0.05
    assert turn_all(x).view(torch.int32).bitwise_and(0x1FFF).count_nonzero() == 0


def test_nothing_else_is_changed():
    for dtype, precision in ((torch.float32, "ieee"), (torch.float16, "tf32")):
        x = torch.randn(64).to(dtype)
        assert torch.equal(turn_all(x, precision), x)
