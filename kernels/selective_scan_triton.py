"""`selective_scan` in Triton, forward and backward.

Where rows and channels fill the GPU, a program walks through all tokens of its channels. Where
they do not, the tokens are cut into segments: one pass finds what each segment does to a state, a
small one the state in front of every segment, and a third walks through all segments at once; the
same for the gradient, from the other end. The work is bounded by N exponentials for each channel
and token: once forward, once more where there are segments; backward just under twice, and once
more with segments.

Bytes from memory for B·T·E values of b bytes each, z included: forward 4b (x, delta, z, y);
backward 7b. To this come B and C, once for each 32 to 64 channels through the cache, and, if a
gradient will be asked for, the states kept in front of every chunk of tokens, N / chunk float32
values for each channel and token (a quarter of one up to N = 64), written and read once. Backward
adds the shares in the gradients of B and C: 2N float32 values a token for every 64 channels,
written and read once. Between groups of Q tokens the states wait in the cache.

Channels must be contiguous, else a tensor is copied; all other strides are free. The exponential is
2^(Δ A log₂ e), which the GPU's unit for it gives with a relative error of about (2 + |Δ A|) · 1e-7.

B batch, T tokens, E channels, N state, G groups of B and C.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import triton_support
from brickwork.kernels.selective_scan_triton_backward import (
    backward_kernel,
    backward_summary_kernel,
)
from brickwork.kernels.selective_scan_triton_forward import (
    combine_kernel,
    forward_kernel,
    prepare_kernel,
)
from brickwork.kernels.triton_support import TYPE_NAMES, Configuration, cdiv, next_power_of_2
from brickwork.kernels.triton_support import unavailable_here as unavailable_here

_ENOUGH = 4  # programs for each multiprocessor that fill it
_Q_FORWARD = 8  # tokens that a program carries a state through at a time
_Q_BACKWARD = 4
_REGISTERS = 255  # of a thread backward: left alone, the compiler would rather spill a few
_COMBINED = 256  # states of a program of the small pass


def selective_scan_triton(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None,
    z: Tensor | None, delta_bias: Tensor | None, softplus: bool, reverse: bool,
    mask: Tensor | None, starts: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`selective_scan` for checked arguments, with B and C (B, T, G, N) and sequence starts."""
    tensors = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    y, final_state, _ = _forward_op(*tensors, _flags(mask, starts), softplus, reverse, keep)
    return y, final_state


def _flags(mask: Tensor | None, starts: Tensor | None) -> Tensor | None:
    """(B, T): 1 for a real token, 2 more where a sequence starts; None if all are 1."""
    if starts is None:
        return None if mask is None else mask.to(torch.uint8)
    return 2 * starts.to(torch.uint8) + (1 if mask is None else mask.to(torch.uint8))


def _forward(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, initial_state: Tensor | None, flags: Tensor | None, softplus: bool,
    reverse: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the final state and, if `keep`, the states (B, chunks, N, E) in front of the chunks."""
    y, final_state, states = _empty_results(x, A, keep)
    if y.numel() == 0:
        if initial_state is None:
            return y, final_state.zero_(), states
        return y, final_state.copy_(initial_state), states
    (batch, tokens, channels), groups, state = x.shape, B.shape[2], A.shape[1]
    x, delta, A = _dense(x), _dense(delta), A.mT.contiguous()
    z, D, delta_bias = (None if t is None else _dense(t) for t in (z, D, delta_bias))
    flags = None if flags is None else flags.contiguous()
    block, chunk = _block_of_forward(x, groups), _chunk(state)
    segments, segment = _segments(x, groups, block, chunk)
    carry, decay = _carry(x, state, segments)
    prepared = _prepare(B, C, flags, reverse)
    programs = batch * groups * cdiv(channels // groups, block)

    def run(summary: bool) -> None:
        forward_kernel[(programs * (segments - summary),)](
            x, delta, A, prepared, D, z, delta_bias, flags, carry, decay if summary else None,
            states if keep and not summary else None, None if summary else y,
            *_strides(x, delta, z), tokens, prepared.shape[2], channels, groups, state, segments,
            segment, chunk, 0, SUMMARY=summary, SOFTPLUS=softplus, TURN=-1 if reverse else 1,
            N=state, Q=_Q_FORWARD, BLOCK=block, num_warps=1,
        )  # fmt: skip

    if segments > 1:
        run(summary=True)
    _begin(carry, decay, initial_state, backwards=False)
    run(summary=False)
    return y, final_state.copy_(carry[:, -1].mT), states


def _backward(
    dy: Tensor | None, dfinal: Tensor | None, states: Tensor, x: Tensor, delta: Tensor, A: Tensor,
    B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, delta_bias: Tensor | None,
    initial_state: Tensor | None, flags: Tensor | None, softplus: bool, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, delta, A, B, C, D, z, delta_bias and initial_state, in this order."""
    grads = _empty_gradients(x, delta, A, B, C, D, z, delta_bias, initial_state)
    dx, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial = grads
    if x.numel() == 0:
        for grad in grads[:-1]:
            grad.zero_()
        dinitial.zero_() if dfinal is None else dinitial.copy_(dfinal)
        return grads
    (batch, tokens, channels), groups, state = x.shape, B.shape[2], A.shape[1]
    dy = x.new_zeros(()).expand(x.shape) if dy is None else dy
    dy, x, delta = (_dense(t) for t in (dy, x, delta))
    z, D, delta_bias = (None if t is None else _dense(t) for t in (z, D, delta_bias))
    flags = None if flags is None else flags.contiguous()
    A = A.mT.contiguous()
    block, chunk = _block_of_backward(x, groups), _chunk(state)
    segments, segment = _segments(x, groups, block, chunk)
    carry, decay = _carry(x, state, segments)
    prepared = _prepare(B, C, flags, reverse)
    blocks, padded = cdiv(channels // groups, block), prepared.shape[2]
    strides = (*dy.stride()[:2], *_strides(x, delta, z))
    sizes = (tokens, padded, channels, groups, state, segments, segment)
    constants = {
        "SOFTPLUS": softplus,
        "TURN": -1 if reverse else 1,
        "N": state,
        "Q": _Q_BACKWARD,
        "BLOCK": block,
    }
    if segments > 1:
        backward_summary_kernel[(batch * groups * blocks * (segments - 1),)](
            dy, delta, A, prepared, z, delta_bias, flags, carry, decay, *strides[:2], *strides[4:],
            *sizes, **constants, num_warps=1,
        )  # fmt: skip
    _begin(carry, decay, dfinal, backwards=True)
    wide: Any = {"dtype": torch.float32, "device": x.device}
    sums = torch.empty(batch, segments, 2, channels, **wide)
    rates = torch.zeros(batch, segments, state, channels, **wide)
    scratch = torch.empty(batch, segments, chunk // _Q_BACKWARD, state, channels, **wide)
    shares = torch.empty(blocks, batch, groups, padded, 2, state, **wide)
    backward_kernel[(batch * groups * blocks * segments,)](
        dy, x, delta, A, prepared, D, z, delta_bias, flags, states, carry, scratch, dx, ddelta,
        rates, shares, None if z is None else dz, sums, *strides, batch, *sizes, chunk, 0,
        **constants, **triton_support.launch_options(1, registers=_REGISTERS),
    )  # fmt: skip
    dA.copy_(rates.sum((0, 1)).mT)
    of_tokens = shares.sum(0)[:, :, :tokens]
    of_tokens = (of_tokens.flip(2) if reverse else of_tokens).transpose(1, 2)
    if flags is not None:
        of_tokens = of_tokens.masked_fill((flags & 1 == 0)[:, :, None, None, None], 0)
    dB.copy_(of_tokens[..., 0, :])
    dC.copy_(of_tokens[..., 1, :])
    total = sums.sum((0, 1))
    dD.copy_(total[0])
    ddelta_bias.copy_(total[1])
    dinitial.copy_(carry[:, 0].mT)
    return grads


def _dense(tensor: Tensor) -> Tensor:
    """The same, with a contiguous last axis; no copy where it is."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(x: Tensor, delta: Tensor, z: Tensor | None) -> tuple[int, ...]:
    return (*x.stride()[:2], *delta.stride()[:2], *((0, 0) if z is None else z.stride()[:2]))


def _prepare(B: Tensor, C: Tensor, flags: Tensor | None, reverse: bool) -> Tensor:
    """B and C in scan order, as (B, G, T in whole groups of Q, 2, N)."""
    B, C = _dense(B), _dense(C)
    batch, tokens, groups, state = B.shape
    longest = max(_Q_FORWARD, _Q_BACKWARD)
    padded = cdiv(tokens, longest) * longest
    prepared = torch.empty(batch, groups, padded, 2, state, dtype=torch.float32, device=B.device)
    columns, rows = _shape_of_preparation(state)
    prepare_kernel[(batch * groups * cdiv(padded, rows),)](
        B, C, flags, prepared, *B.stride()[:3], *C.stride()[:3], tokens, padded, groups,
        REVERSE=reverse, N=state, COLUMNS=columns, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return prepared


def _shape_of_preparation(state: int) -> tuple[int, int]:
    columns = next_power_of_2(max(state, 1))
    return columns, max(1, 2048 // columns)


def _carry(x: Tensor, state: int, segments: int) -> tuple[Tensor, Tensor]:
    """Zeros (B, segments, N, E), and as much room for the segments' decays."""
    carry = torch.zeros(
        x.shape[0], segments, state, x.shape[2], dtype=torch.float32, device=x.device
    )
    return carry, carry if segments == 1 else torch.empty_like(carry)


def _begin(carry: Tensor, decay: Tensor, start: Tensor | None, *, backwards: bool) -> None:
    """Make of the segments' effects the states in front of them; `start` (B, E, N) is the first."""
    batch, segments, state, channels = carry.shape
    if segments == 1:
        if start is not None:
            carry[:, 0] = start.mT
        return
    first = carry.new_zeros(batch, state, channels)
    if start is not None:
        first.copy_(start.mT)
    grid = (batch * cdiv(state * channels, _COMBINED),)
    combine_kernel[grid](
        first,
        decay,
        carry,
        state * channels,
        segments,
        BACKWARDS=backwards,
        BLOCK=_COMBINED,
        num_warps=2,
    )


def _chunk(state: int) -> int:
    """Tokens between kept states: the more states, the more tokens."""
    return min(max(64, 4 * state), 256) // 64 * 64


def _block_of_forward(x: Tensor, groups: int) -> int:
    """Channels of a program: two a thread where the GPU is full all the same."""
    width = x.shape[2] // groups
    programs = x.shape[0] * groups * cdiv(width, 64)
    return 64 if programs >= 2 * _ENOUGH * triton_support.multiprocessors(x) else 32


def _block_of_backward(x: Tensor, groups: int) -> int:
    """Two channels a thread halve the work of the sums over channels."""
    return 32 if x.shape[2] // groups <= 32 else 64


def _segments(x: Tensor, groups: int, block: int, chunk: int) -> tuple[int, int]:
    """How many segments the tokens are cut into, and the tokens of each: whole chunks."""
    batch, tokens, channels = x.shape
    programs = batch * groups * cdiv(channels // groups, block)
    enough = _ENOUGH * triton_support.multiprocessors(x)
    wanted = 1 if programs >= enough else cdiv(2 * enough, programs)
    segment = cdiv(cdiv(tokens, wanted), chunk) * chunk
    return cdiv(tokens, segment), segment


def _empty_results(x: Tensor, A: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    (rows, tokens, channels), state = x.shape, A.shape[1]
    chunks = cdiv(tokens, _chunk(state)) if keep else 0
    wide: Any = {"dtype": torch.float32, "device": x.device}
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(rows, channels, state, **wide),
        torch.empty(rows, chunks, state, channels, **wide),
    )


def _empty_gradients(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for each gradient in its tensor's dtype; but for z's also where there is no tensor."""
    (rows, _, channels), state = x.shape, A.shape[1]

    def empty(like: Tensor | None, *size: int) -> Tensor:
        dtype = torch.float32 if like is None else like.dtype
        return torch.empty(size if like is None else like.shape, dtype=dtype, device=x.device)

    return (
        empty(x),
        empty(delta),
        empty(A),
        empty(B),
        empty(C),
        empty(D, channels),
        empty(z, 0),
        empty(delta_bias, channels),
        empty(initial_state, rows, channels, state),
    )


def _fake_forward(
    x: Tensor, delta: Tensor, A: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(x, A, others[-1])


def _fake_backward(dy: Any, dfinal: Any, states: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(*inputs[:9])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.softplus, ctx.reverse, _ = inputs
    ctx.save_for_backward(output[2], *tensors)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Any, ...]:
    states, *tensors = ctx.saved_tensors
    flags = ctx.softplus, ctx.reverse
    if states.numel() == 0:  # the forward pass did not know that a gradient would be asked for
        states = _forward_op(*tensors, *flags, True)[2]
    grads = _backward_op(dy, dfinal, states, *tensors, *flags)
    wanted = [g if t is not None else None for g, t in zip(grads, tensors)]
    return (*wanted, None, None, None, None)


_forward_op = triton_support.register(
    "selective_scan_triton",
    _forward,
    _fake_forward,
    gradients=_gradients,
    setup_context=_setup_context,
)
_backward_op = triton_support.register("selective_scan_triton_backward", _backward, _fake_backward)


def configurations() -> Iterator[Configuration]:
    """Both blocks of channels, with every option and with those of Mamba in training. Others need
    fewer registers, N moves none, and the narrow dtypes are alike."""
    every = {"D", "Z", "BIAS", "FLAGS", "STATES"}
    for dtype, given, block in (
        (torch.float32, every, 32),
        (torch.float32, every, 64),
        (torch.bfloat16, every - {"FLAGS"}, 64),
    ):
        options = "all options" if given == every else "no padding"
        name = f"{block} channels, {TYPE_NAMES[dtype]}, {options}"
        types = dict.fromkeys(("X", "DELTA", "Z", "Y", "DY", "DX", "DDELTA", "DZ"), dtype)
        turn = -1 if given == every else 1
        both: dict[str, Any] = {"SOFTPLUS": True, "TURN": turn, "N": 16, "BLOCK": block}
        both |= dict.fromkeys(every - given)
        forward = both | {"Q": _Q_FORWARD, "SUMMARY": False, "DECAY": None}
        summary = both | {"Q": _Q_FORWARD, "SUMMARY": True, "Y": None, "STATES": None}
        backward = both | {"Q": _Q_BACKWARD}
        for kernel, label, constants in (
            (forward_kernel, "forward", forward),
            (forward_kernel, "forward summary", summary),
            (backward_kernel, "backward", backward),
            (backward_summary_kernel, "backward summary", backward),
        ):
            found = _configuration(kernel, f"{label}, {name}", constants, types)
            limit = _REGISTERS if kernel is backward_kernel else None
            yield found._replace(num_stages=1, registers=limit)
    for state in (16, 128):
        columns, rows = _shape_of_preparation(state)
        constants = {"N": state, "COLUMNS": columns, "ROWS": rows, "REVERSE": True}
        types = {"B": torch.bfloat16, "C": torch.bfloat16}
        prepare = _configuration(prepare_kernel, f"B and C, N = {state}", constants, types)
        yield prepare._replace(num_warps=4)
    for backwards in (False, True):
        name = f"segments combined, {'backward' if backwards else 'forward'}"
        constants = {"BACKWARDS": backwards, "BLOCK": _COMBINED}
        yield _configuration(combine_kernel, name, constants, {})._replace(num_warps=2)


def _configuration(
    kernel: Any, name: str, constants: dict[str, Any], types: dict[str, torch.dtype]
) -> Configuration:
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    signature = {
        argument: f"*{TYPE_NAMES[types.get(argument, torch.float32)]}"
        if argument.isupper()
        else "i32"
        for argument in kernel.arg_names
        if argument not in constants
    }
    if "FLAGS" in signature:
        signature["FLAGS"] = "*u8"
    free = {"tokens", "segments", "segment", "batch", "groups", "FLAGS", "nought"}
    aligned = tuple(argument for argument in signature if argument not in free)
    return Configuration(
        kernel, f"selective_scan {name}", signature, constants, aligned, num_warps=1
    )
