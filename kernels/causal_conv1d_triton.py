"""`causal_conv1d` in Triton: one pass over x in either direction, forward and backward.

A program takes a block of channels and walks along the tokens with the filter's window in
registers, so each token is loaded once. Tokens are visited in scan order: backwards for `reverse`,
and through an index that leaves padding for last where there is a mask. Channels must be
contiguous, else x is copied; batch and token strides are free.

Bytes from memory, for x and y of b bytes an element (all else is of the size of one token):
forward B·T·C·2b; backward B·T·C·3b. Programs read again what they share at their borders: forward
W - 1 tokens each, backward 3 (W - 1), and backward adds (W + 1) · C float32 partial sums for
every program along the tokens, written and read once.

B batch, T tokens, C channels, W width of the filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brickwork.kernels import triton_support
from brickwork.kernels.causal_conv1d import Activation
from brickwork.kernels.causal_conv1d_triton_kernels import backward_kernel, forward_kernel
from brickwork.kernels.sequences import scan_order
from brickwork.kernels.triton_support import (
    TYPE_NAMES,
    Configuration,
    cdiv,
    lanes,
    launch_options,
    launch_warps,
    next_power_of_2,
)
from brickwork.kernels.triton_support import unavailable_here as unavailable_here

_TOKENS = 16  # least that a program walks along
_PROGRAMS = 8  # wanted for each multiprocessor; twice as many of those that work in tiles
_REGISTERS = 255  # of a thread: left alone, the compiler would rather spill a few


def causal_conv1d_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    activation: Activation,
    reverse: bool,
) -> Tensor:
    """The result of `causal_conv1d` (B, T, C) for checked arguments, with sequence starts."""
    if initial_state is not None:
        initial_state = initial_state.to(x.dtype)
    order = count = None
    if mask is not None:
        order, count = scan_order(mask, reverse=reverse), mask.sum(1)
    return _forward_op(
        x, weight, bias, initial_state, order, count, starts, activation == "silu", reverse
    )


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    order: Tensor | None,
    count: Tensor | None,
    starts: Tensor | None,
    silu: bool,
    reverse: bool,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = _dense(x)
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    tile = _forward_tile(channels, width, x.dtype, lanes())
    per_program = _tokens_per_program(x, tile)
    grid = (batch * cdiv(tokens, per_program) * cdiv(channels, tile.block),)
    forward_kernel[grid](
        x, *_small(weight, bias, initial_state, order, count, starts), y, x.stride(0), x.stride(1),
        tokens, channels, per_program, WIDTH=width, SILU=silu, REVERSE=reverse, UNROLL=tile.unroll,
        BLOCK=tile.block, num_warps=launch_warps(tile.warps),
    )  # fmt: skip
    return y


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None,
    order: Tensor | None, count: Tensor | None, starts: Tensor | None, silu: bool, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias and initial_state, in this order."""
    grads = _empty_gradients(x, weight, bias, initial_state)
    dx, dweight, dbias, dinitial = grads
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    x, dy = _dense(x), _dense(dy)
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    tile = _backward_tile(channels, width, x.dtype, lanes())
    per_program = _tokens_per_program(x, tile)
    rows = batch * cdiv(tokens, per_program)
    sums = torch.empty(rows, width + 1, channels, dtype=torch.float32, device=x.device)
    backward_kernel[(rows * cdiv(channels, tile.block),)](
        dy, x, *_small(weight, bias, initial_state, order, count, starts), dx,
        dinitial.mT if initial_state is not None else None, sums, dy.stride(0), dy.stride(1),
        x.stride(0), x.stride(1), tokens, channels, per_program, WIDTH=width, SILU=silu,
        REVERSE=reverse, UNROLL=tile.unroll, TILED=tile.tiled, BLOCK=tile.block,
        **launch_options(tile.warps, registers=_registers(tile, starts is not None)),
    )  # fmt: skip
    total = sums.sum(0)
    dweight.copy_(total[:width].mT)
    dbias.copy_(total[width])
    return grads


def _dense(tensor: Tensor) -> Tensor:
    """The same, with contiguous channels; no copy where they are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _small(
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    order: Tensor | None,
    count: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The kernels' other arguments, contiguous and with channels last."""
    return (
        weight.mT.contiguous(),
        None if bias is None else bias.contiguous(),
        None if initial_state is None else initial_state.mT.contiguous(),
        None if order is None else order.contiguous(),
        None if count is None else count.contiguous(),
        None if starts is None else starts.contiguous().view(torch.uint8),
    )


def _empty_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, _, channels), width = x.shape, weight.shape[1]
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device),
        torch.empty(channels, dtype=(weight if bias is None else bias).dtype, device=x.device),
        torch.empty(
            batch,
            0 if initial_state is None else width - 1,
            channels,
            dtype=x.dtype,
            device=x.device,
        ).mT,
    )


def _fake_forward(x: Tensor, *others: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    return _empty_gradients(x, weight, bias, initial_state)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = _backward_op(dy, *tensors, ctx.silu, ctx.reverse)
    wanted = [None if t is None else g for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None, None)


_forward_op = triton_support.register(
    "causal_conv1d_triton",
    _forward,
    _fake_forward,
    gradients=_gradients,
    setup_context=_setup_context,
)
_backward_op = triton_support.register("causal_conv1d_triton_backward", _backward, _fake_backward)


class Tile(NamedTuple):
    """Channels of a program, its warps, tokens whose loads are in flight together, and whether
    they are loaded as one tile."""

    block: int
    warps: int
    unroll: int
    tiled: bool = False


def _forward_tile(channels: int, width: int, dtype: torch.dtype, lanes: int) -> Tile:
    """Loads of 128 bits."""
    a_thread = 16 // dtype.itemsize
    return _tile(channels, a_thread, lanes, 4 if a_thread * width <= 32 else 2)


def _backward_tile(channels: int, width: int, dtype: torch.dtype, lanes: int) -> Tile:
    """Loads of 128 bits.

    Of 16-bit numbers these are eight channels, whose sums would fill a thread's registers, or more
    than them in filters wider than 4. So a thread loads eight channels of one of four tokens and
    computes with two channels of all four: what the threads exchange stays within the one warp of a
    program. Of the bias, which is loaded once, a thread has 64 bits.
    """
    if dtype.itemsize == 2:
        return Tile(2 * lanes, 1, 4, tiled=True)
    a_thread = 16 // dtype.itemsize
    return _tile(channels, a_thread, lanes, 4 if a_thread * width <= 16 else 2)


def _tile(channels: int, a_thread: int, lanes: int, unroll: int) -> Tile:
    block = min(max(next_power_of_2(channels), lanes * a_thread), 128 * a_thread)
    return Tile(block, block // (32 * a_thread), unroll)


def _registers(tile: Tile, starts: bool) -> int | None:
    """The limit backward, where there is one."""
    return _REGISTERS if tile.tiled and starts else None


def _tokens_per_program(x: Tensor, tile: Tile) -> int:
    """As many as keep the GPU busy."""
    batch, tokens, channels = x.shape
    wanted = _PROGRAMS * (1 + tile.tiled) * triton_support.multiprocessors(x)
    return max(_TOKENS, min(tokens, cdiv(batch * tokens * cdiv(channels, tile.block), wanted)))


def configurations() -> Iterator[Configuration]:
    """Every block of channels and every option that changes a kernel's course."""
    every = {"BIAS", "INITIAL", "ORDER", "COUNT", "STARTS"}
    sizes = {
        torch.float32: ((96, 4), (256, 4), (4096, 4)),
        torch.bfloat16: ((96, 4), (4096, 2), (4096, 4), (64, 8), (4096, 8)),
    }
    cases = [
        (dtype, channels, width, {"BIAS"}, False)
        for dtype, sizes_of in sizes.items()
        for channels, width in sizes_of
    ]
    cases += [
        (torch.float16, 4096, 4, {"BIAS"}, True),
        (torch.bfloat16, 4096, 1, set(), False),
        (torch.bfloat16, 4096, 4, every, False),
        (torch.float16, 4096, 4, every, False),
        (torch.bfloat16, 96, 4, every, True),
        (torch.bfloat16, 96, 8, every, True),
        (torch.bfloat16, 4096, 5, every, False),
        (torch.bfloat16, 4096, 8, every, True),
        (torch.float32, 96, 8, every, True),
        (torch.float32, 4096, 4, every, True),
        (torch.float32, 4096, 8, every, True),
    ]
    for dtype, channels, width, given, reverse in cases:
        options = " all options" if given == every else ""
        name = f"{channels} channels, width {width}, {TYPE_NAMES[dtype]}{options}"
        for kernel, shape in (
            (forward_kernel, _forward_tile),
            (backward_kernel, _backward_tile),
        ):
            tile, of_64 = (shape(channels, width, dtype, n) for n in (32, 64))
            direction = kernel.__name__.removesuffix("_kernel")
            yield Configuration(
                kernel,
                f"causal_conv1d {direction}, {name}",
                *_arguments(kernel, dtype, given, width, reverse, tile),
                num_warps=tile.warps,
                num_stages=1 if kernel is backward_kernel else 3,
                registers=_registers(tile, "STARTS" in given),
                launch_warps=True,
                of_64_lanes={"BLOCK": of_64.block},
                wide_loads=True,
                narrow_loads=24 if given == every else int(tile.tiled),  # places, starts; a bias
            )


def _arguments(
    kernel: Any, dtype: torch.dtype, given: set[str], width: int, reverse: bool, tile: Tile
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    types = {"WEIGHT": "*fp32", "BIAS": "*fp32", "ORDER": "*i64", "COUNT": "*i64"}
    types |= {"STARTS": "*u8", "SUMS": "*fp32"}
    constants: dict[str, Any] = {"WIDTH": width, "SILU": True, "REVERSE": reverse}
    constants |= {"UNROLL": tile.unroll, "TILED": tile.tiled, "BLOCK": tile.block}
    optional = {"BIAS", "INITIAL", "ORDER", "COUNT", "STARTS"}
    if "INITIAL" not in given:
        constants["DINITIAL"] = None
    constants |= dict.fromkeys(optional - given)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {
        name: types.get(name, f"*{TYPE_NAMES[dtype]}" if name.isupper() else "i32")
        for name in kernel.arg_names
        if name not in constants
    }
    free = {"tokens", "per_program", "ORDER", "COUNT", "STARTS"}
    return signature, constants, tuple(name for name in signature if name not in free)
