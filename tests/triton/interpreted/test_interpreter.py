"""The interpreter itself, as far as the tests of kernels rely on it or patch it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreter import count_bytes, only_programs, sparse_tensor
from triton.runtime import interpreter as triton_interpreter


@triton.jit
def double(x):
    return tl.sum(x, 0) * 2


@triton.jit
def double_sum(X, Y, BLOCK: tl.constexpr):
    tl.store(Y, double(tl.load(X + tl.arange(0, BLOCK))))


@triton.jit
def copy(X, Y, N, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + columns, mask=columns < N)
    tl.store(Y + row * N + columns, x.to(Y.dtype.element_ty), mask=columns < N)


@triton.jit
def offsets_in_int32(Y, N, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    tl.store(Y + row * N + columns, row * stride + columns, mask=columns < N)


def copied(x, dtype):
    y = torch.empty(x.shape, dtype=dtype)
    copy[(x.shape[0],)](x, y, x.shape[1], x.stride(0), BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def patterns():
    """float32 bit patterns around ties, of both signs, of all sizes, with infinities and NaN."""
    upper = torch.arange(0, 2**16, 7, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] | lower).flatten()
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)[None]


def test_bfloat16_is_rounded_to_nearest_even():
    x = patterns()
    torch.testing.assert_close(
        copied(x, torch.bfloat16), x.bfloat16(), rtol=0, atol=0, equal_nan=True
    )


def test_the_rounding_is_still_wanting():
    """Delete `round_to_nearest` when this fails: Triton rounds by itself then."""
    x = torch.tensor([[1.00390625 + 2**-9]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            triton_interpreter, "_convert_float", _original(triton_interpreter._convert_float)
        )
        assert copied(x, torch.bfloat16) != x.bfloat16()


def _original(patched):
    return patched.__closure__[0].cell_contents


def test_the_language_is_patched_once(monkeypatch):
    """Nothing is patched when a launch calls device functions, of ours and of Triton's."""
    assert not tl.core.is_builtin(tl.load)
    monkeypatch.setattr(triton_interpreter._LangPatchScope, "set_attr", None)
    y = torch.empty(())
    double_sum[(1,)](torch.ones(4), y, BLOCK=4)
    assert y == 8


def test_remembered_types_are_the_interpreters():
    """Of scalars, blocks and pointers; asked twice, since the second answer is remembered."""
    wanted = {tl.float32: "float32", tl.bfloat16: "uint16", tl.int1: "bool", tl.int64: "int64"}
    for dtype, name in wanted.items():
        pointer = tl.pointer_type(dtype)
        for _ in range(2):
            assert triton_interpreter._get_np_dtype(dtype) == name
            assert triton_interpreter._get_np_dtype(tl.block_type(dtype, [4])) == name
            assert triton_interpreter._get_np_dtype(pointer) == "uint64"
            assert triton_interpreter._get_np_dtype(tl.block_type(pointer, [4])) == "uint64"


def test_float16_is_rounded_to_nearest_even():
    x = torch.randn(1, 4096)
    assert torch.equal(copied(x, torch.float16), x.half())
    tiny = torch.randn(1, 4096) * 2.0**-20
    assert torch.equal(copied(tiny, torch.float16), tiny.half())


def test_bytes_are_counted_without_masked_lanes():
    x = torch.randn(3, 5)
    with count_bytes() as moved:
        copied(x, torch.bfloat16)
    assert (moved.loaded, moved.read) == (60, 60)
    assert (moved.stored, moved.written) == (30, 30)
    with count_bytes() as moved:
        copied(x, torch.float32)
        copied(x, torch.float32)
    assert (moved.loaded, moved.read) == (120, 60)
    with count_bytes() as moved:
        copied(x[:1].expand(3, 5), torch.float32)
    assert (moved.loaded, moved.read) == (60, 20)


def test_offsets_past_two_to_the_31_are_real():
    """D1 12: 32-bit arithmetic wraps here as on a GPU; 64-bit rows reach their elements."""
    vast = sparse_tensor((4, 2**30), torch.bfloat16)
    x = vast[:, :64]
    x.copy_(torch.randn(4, 64))
    assert torch.equal(copied(x, torch.float32), x.float())
    y = torch.empty(4, 64, dtype=torch.int64)
    offsets_in_int32[(4,)](y, 64, 2**30, BLOCK=64)
    assert y[3, 0] == 3 * 2**30 - 2**32


def test_only_some_programs_run():
    y = torch.zeros(5, 2)
    x = torch.ones(5, 2)
    with only_programs(1, -1):
        copy[(5,)](x, y, 2, 2, BLOCK=2)
    assert y.sum(1).tolist() == [0, 2, 0, 0, 2]
