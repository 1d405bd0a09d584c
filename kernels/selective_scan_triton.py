"""`selective_scan` in Triton, forward and backward.

Where rows and channels fill the GPU, a program walks through all tokens of its channels. Where
they do not, the tokens are cut into segments: one pass finds what each segment does to a state, a
small one the state in front of every segment, and a third walks through all segments at once; the
same for the gradient, from the other end. The work is bounded by N exponentials for each channel
and token: once forward, once more where there are segments; backward just under twice, and once
more with segments.

Bytes from memory for B·T·E values of b bytes each, z included: forward 4b (x, delta, z, y);
backward 7b. To this come B and C, once for each 32 to 128 channels through the cache, and, if a
gradient will be asked for, the states kept in front of every chunk of tokens, N / chunk float32
values for each channel and token (a quarter of one up to N = 64), written and read once. Backward
adds the shares in the gradients of B and C: 2N float32 values a token for every 64 channels,
written and read once. Between groups of Q tokens the states wait in the cache.

A warp takes 32, 64 or 128 channels that lie side by side: one, two or four a thread. It loads and
stores their values at Q tokens as one tile, of 128 bits a thread, and hands them round, once for
all n, outside of the loop over n. Numbers of B and C serve a whole warp: each thread loads them
all, at four tokens at a time, 128 bits. What remains narrow: what a channel has one of, that is
states, A, D and the bias, where there are fewer than four channels a thread, though together they
are whole lines of memory, and flags of tokens.

Channels must be contiguous, else a tensor is copied; all other strides are free. The exponential is
2^(Δ A log₂ e), which the GPU's unit for it gives with a relative error of about (2 + |Δ A|) · 1e-7.

B batch, T tokens, E channels, N state, G groups of B and C.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels import selective_scan_triton_launch as launch
from brickwork.kernels import triton_support
from brickwork.kernels.bidirectional_scan import ScanInputs
from brickwork.kernels.selective_scan_triton_backward import (
    backward_kernel,
    backward_summary_kernel,
)
from brickwork.kernels.selective_scan_triton_forward import (
    combine_kernel,
    forward_kernel,
    prepare_kernel,
)
from brickwork.kernels.triton_support import TYPE_NAMES, Configuration, cdiv
from brickwork.kernels.triton_support import unavailable_here as unavailable_here


def selective_scan_triton(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None,
    z: Tensor | None, delta_bias: Tensor | None, softplus: bool, reverse: bool,
    mask: Tensor | None, starts: Tensor | None, initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`selective_scan` for checked arguments, with B and C (B, T, G, N) and sequence starts."""
    tensors = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    flags = launch.flags_of(mask, starts)
    y, final_state, _ = _forward_op(*tensors, flags, softplus, reverse, keep)
    return y, final_state


def _forward(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, initial_state: Tensor | None, flags: Tensor | None, softplus: bool,
    reverse: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the final state and, if `keep`, the states (B, chunks · N, E) in front of the chunks."""
    y, final_state, states = _empty_results(x, A, keep)
    if y.numel() == 0:
        if initial_state is None:
            return y, final_state.zero_(), states
        return y, final_state.copy_(initial_state), states
    side = ScanInputs(x, delta, A, B, C, D, delta_bias)
    scans = launch.Scans([side], z, flags, softplus, reverse)
    final = scans.forward(initial_state, y, states if keep else None)
    return y, final_state.copy_(final.mT), states


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
    side = ScanInputs(x, delta, A, B, C, D, delta_bias)
    scans = launch.Scans([side], z, flags, softplus, reverse)
    dy = x.new_zeros(()).expand(x.shape) if dy is None else dy
    into = launch.Into(dx, ddelta, None if z is None else dz)
    sums = scans.backward(dy, dfinal, states, into)
    dA.copy_(sums.A[0])
    dB.copy_(sums.B[0])
    dC.copy_(sums.C[0])
    dD.copy_(sums.D[0])
    ddelta_bias.copy_(sums.bias[0])
    dinitial.copy_(sums.initial.mT)
    return grads


def _empty_results(x: Tensor, A: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    (rows, tokens, channels), state = x.shape, A.shape[1]
    chunks = cdiv(tokens, launch.chunk_of(state)) if keep else 0
    wide: Any = {"dtype": torch.float32, "device": x.device}
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(rows, channels, state, **wide),
        torch.empty(rows, chunks * state, channels, **wide),
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
    """Every block of channels, with every option and with those of Mamba in training, some in
    float32, some in bfloat16. Others need fewer registers, N moves none, the narrow dtypes are
    alike, and both directions in one launch take the same programs. Segments are for blocks that do
    not fill the GPU: forward the smallest."""
    every = {"D", "Z", "BIAS", "FLAGS", "STATES"}
    fp32, bf16 = (torch.float32, every), (torch.bfloat16, every - {"FLAGS"})
    for kernel, label, blocks in (
        (forward_kernel, "forward", (32, 64, 128)),
        (forward_kernel, "forward summary", (32,)),
        (backward_kernel, "backward", (32, 64)),
        (backward_summary_kernel, "backward summary", (32, 64)),
    ):
        for block, (dtype, given) in itertools.product(blocks, (fp32, bf16)):
            q = launch.tokens_of_backward(block, 32)
            q = launch.Q_FORWARD if kernel is forward_kernel else q
            of_64 = max(block, 64) if kernel is forward_kernel else 2 * block
            options = "all options" if given == every else "no padding"
            name = f"{label}, {block} channels, {TYPE_NAMES[dtype]}, {options}"
            types = dict.fromkeys(("X", "DELTA", "Z", "Y", "DY", "DX", "DDELTA", "DZ"), dtype)
            absent = every - given
            if kernel is forward_kernel:
                absent |= {"Y", "STATES"} if "summary" in label else {"DECAY"}
            constants = dict.fromkeys(absent) | {
                "SOFTPLUS": True,
                "SUMMARY": label == "forward summary",
                "N": 16,
                "Q": q,
                "BLOCK": block,
                "TOGETHER": launch.together(),
                "LANES": 32,
            }
            yield _configuration(kernel, name, constants, types)._replace(
                num_stages=1,
                registers=launch.REGISTERS if kernel is backward_kernel else None,
                of_64_lanes={"BLOCK": of_64, "LANES": 64},
                wide_loads=True,
                narrow_loads=_narrow_loads(label, given, block, 32),
                narrow_loads_of_64=_narrow_loads(label, given, of_64, 64),
            )
    for state in (16, 128):
        columns, rows = launch.shape_of_preparation(state)
        constants = {"N": state, "COLUMNS": columns, "ROWS": rows, "TOGETHER": launch.together()}
        types = {"B": torch.bfloat16, "C": torch.bfloat16}
        prepare = _configuration(prepare_kernel, f"B and C, N = {state}", constants, types)
        yield prepare._replace(num_warps=4, wide_loads=True, narrow_loads=2)  # flags
    for backwards in (False, True):
        name = f"segments combined, {'backward' if backwards else 'forward'}"
        constants = {"BACKWARDS": backwards, "BLOCK": launch.COMBINED}
        combine = _configuration(combine_kernel, name, constants, {})
        yield combine._replace(num_warps=2, num_stages=1, launch_warps=True, wide_loads=True)


def _narrow_loads(label: str, given: set[str], block: int, lanes: int) -> int:
    """Of what a channel has one of, with fewer than four a thread, and of flags; a summary with
    flags has its last loop, with its load, once more, for where a sequence starts."""
    of_channels, of_flags = {
        "forward": (4, 2),
        "forward summary": (4, 2),
        "backward": (9, 3),
        "backward summary": (4, 2),
    }[label]
    return of_channels * (block < 4 * lanes) + of_flags * ("FLAGS" in given)


def _configuration(
    kernel: Any, name: str, constants: dict[str, Any], types: dict[str, torch.dtype]
) -> Configuration:
    """Of a second direction's pointers, named _2, what holds of the first's."""
    absent = {f"{k}_2": None for k, v in constants.items() if k.isupper() and v is None}
    constants = {k: v for k, v in (constants | absent).items() if k in kernel.arg_names}
    signature = {
        argument: f"*{TYPE_NAMES[types.get(argument.removesuffix('_2'), torch.float32)]}"
        if argument.isupper()
        else "i32"
        for argument in kernel.arg_names
        if argument not in constants
    }
    if "FLAGS" in signature:
        signature["FLAGS"] = "*u8"
    free = {"batch", "rows", "tokens", "segments", "segment", "groups", "FLAGS", "nought"}
    aligned = tuple(argument for argument in signature if argument not in free | {"reverse"})
    return Configuration(
        kernel, f"selective_scan {name}", signature, constants, aligned, num_warps=1
    )
