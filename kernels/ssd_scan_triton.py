"""`ssd_scan` as Triton kernels: the chunk form, forward and backward.

Products are taken in bfloat16 where x, B and C are, in TF32 where they are float16 or PyTorch's
precision of float32 products allows it, else in float32; sums, decays and states always in float32.
Only the inputs are kept for backward, which recomputes the rest. No sum depends on the order of
programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from brickwork.kernels.ssd_scan_triton_backward import (
    ssd_input_gradients,
    ssd_pair_gradients,
    ssd_step_gradients,
    ssd_vector_gradients,
)
from brickwork.kernels.ssd_scan_triton_forward import (
    ssd_carry,
    ssd_decays,
    ssd_outputs,
    ssd_pairs,
    ssd_states,
)
from brickwork.kernels.ssd_scan_triton_launch import (
    LARGEST_CHUNK,
    Scan,
    default_chunk,
    dense_rows,
    resources_of,
    tiles_of,
)
from brickwork.kernels.triton_support import TYPE_NAMES, Configuration, register


def ssd_scan_triton(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None,
    z: Tensor | None, delta_bias: Tensor | None, softplus: bool, reverse: bool, mask: Tensor | None,
    starts: Tensor | None, initial_state: Tensor | None, chunk_size: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ssd_scan` for checked arguments, with sequence starts.

    A chunk has at most 256 tokens. x, z, B and C are copied only if their last stride is not 1.

    Bytes of the forward pass, what is read several times counted once: x, delta, A, B, C, D, z are
    read, y and the final state written; between the kernels are written and read, for every chunk
    and head 4 P N + 4 (its state), for every token and head 12 (step size and decays), and for
    every token and group 4 Q, or with several tiles to a chunk about 2 Q (C Bᵀ).

    Of the backward pass: what forward reads and dy are read, their gradients and two states written
    (the final one again, which nothing needs), and for every chunk and head a number for dA, one
    for the bias's gradient and P for dD. Between the kernels are written and read, for every chunk
    and head 8 P N + 8 (the states and their gradients), for every token and head 28, with 4, 8
    and 4 more for each further tile of a chunk, of P and of N, and for every token and group twice
    what forward has for C Bᵀ; with z the gradient behind the gate, as x is.

    Tiles of x, z, dy, B, C, of states and of C Bᵀ are loaded 128 bits at a time where P and N are
    multiples of 8 and the tile is of 32 tokens or more; in TF32 some are turned around for the
    matrix units of Hopper and Blackwell, number by number. What a token or a head has one of, step
    sizes, decays, places of padding, is loaded one by one.
    """
    chunk = min(chunk_size or default_chunk(B.shape[3]), LARGEST_CHUNK)
    tensors = (x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts)
    y, final_state = _op(*tensors, softplus, reverse, chunk)
    return y, final_state


def _forward(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, initial_state: Tensor | None, mask: Tensor | None,
    starts: Tensor | None, softplus: bool, reverse: bool, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and the final state, in four launches, or five with few rows and heads."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y, _no_tokens(x, B, initial_state)
    tensors = (x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts)
    scan = Scan(*tensors, softplus, reverse, chunk)
    states, final_state, _ = scan.states(scan.x, scan.B, scan.initial)
    scan.outputs(states, y, None, None)
    return y, final_state


def _no_tokens(x: Tensor, B: Tensor, state: Tensor | None) -> Tensor:
    shape = (x.shape[0], *x.shape[2:], B.shape[3])
    final = torch.empty(shape, dtype=torch.float32, device=x.device)
    return final.zero_() if state is None else final.copy_(state)


def _backward(
    dy: Tensor | None, dfinal: Tensor | None, x: Tensor, delta: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor | None, z: Tensor | None, delta_bias: Tensor | None,
    initial_state: Tensor | None, mask: Tensor | None, starts: Tensor | None, softplus: bool,
    reverse: bool, chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, delta, A, B, C, D, z, delta_bias and initial_state, in this order; empty for
    those not given."""
    tensors = (x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts)
    grads = _empty_gradients(x, delta, A, B, C, D, z, delta_bias, initial_state)
    dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial = grads
    if x.numel() == 0:
        for grad in grads:
            grad.zero_()
        if initial_state is not None and dfinal is not None:
            dinitial.copy_(dfinal)
        return dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial
    scan = Scan(*tensors, softplus, reverse, chunk)
    dy = torch.zeros_like(scan.x) if dy is None else dense_rows(dy)
    dfinal = None if dfinal is None else dfinal.float().contiguous()
    states, _, _ = scan.states(scan.x, scan.B, scan.initial)
    if z is not None:
        gated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scan.outputs(states, gated, dy, dz)
        dy = gated
    carries, dstate, inner = scan.states(dy, scan.C, dfinal, states)
    partial, shares = scan.input_gradients(dy, carries, dx)
    dpairs, crossing = scan.pair_gradients(dy)
    dC, entering = scan.vector_gradients(dy, scan.C, scan.B, dpairs, states, of_C=True)
    dB, _ = scan.vector_gradients(scan.x, scan.B, scan.C, dpairs, carries, of_C=False)
    partial |= {**crossing, "entering": entering, "inner": inner}
    wide_A, wide_bias = scan.step_gradients(ddelta, partial)
    dA.copy_(wide_A)
    if delta_bias is not None:
        dbias.copy_(wide_bias)
    if D is not None and shares is not None:
        dD.copy_(shares.sum(0) if D.dim() == 2 else shares.sum((0, 2)))
    if initial_state is not None:
        dinitial.copy_(dstate)
    return dx, ddelta, dA, dB, dC, dD, dz, dbias, dinitial


def _empty_gradients(x: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    given = [(t, t.shape) if t is not None else (x, (0,)) for t in (x, *others)]
    return tuple(torch.empty(shape, dtype=t.dtype, device=x.device) for t, shape in given)


def _fake_forward(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, y.new_empty((x.shape[0], *x.shape[2:], B.shape[3]), dtype=torch.float32)


def _fake_backward(dy: Any, dfinal: Any, *inputs: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(*inputs[:9])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.softplus, ctx.reverse, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = _backward_op(dy, dfinal, *tensors, ctx.softplus, ctx.reverse, ctx.chunk)
    return (*(g if t is not None else None for g, t in zip(grads, tensors)), *[None] * 5)


_op = register(
    "ssd_scan_triton", _forward, _fake_forward, gradients=_gradients, setup_context=_setup_context
)
_backward_op = register("ssd_scan_triton_backward", _backward, _fake_backward)


def configurations() -> Iterator[Configuration]:
    """Every kernel at the tiles of large heads and states in bfloat16; the kernels with products in
    the other precisions, without options, and at the smallest tiles."""
    large: Any = {"H": 48, "P": 64, "N": 128, "chunk": 256}
    yield from _kernels(torch.bfloat16, "bf16", **large)
    walked = [states for states in _STATES if states[2]["CARRY"]]
    products = [*_PRODUCTS, *walked]
    yield from _kernels(torch.float32, "ieee", **large, only=products)
    yield from _kernels(torch.float32, "tf32", **large, only=products)
    yield from _kernels(torch.float16, "tf32", **large, only=products)
    yield from _kernels(torch.bfloat16, "bf16", **large, options=False, only=_PRODUCTS[1:4])
    yield from _kernels(torch.bfloat16, "bf16", 3, 16, 16, 16, only=_PRODUCTS[1:4])


_Variant = tuple[Any, str, dict[str, Any]]
_PRODUCTS: list[_Variant] = [
    (ssd_pairs, "pairs", {}),
    (ssd_outputs, "outputs", {"dy": None, "dz": None}),
    (ssd_input_gradients, "input gradients", {}),
    (ssd_pair_gradients, "pair gradients", {}),
    (ssd_vector_gradients, "gradient of C", {"OF_C": True}),
    (ssd_vector_gradients, "gradient of B", {"OF_C": False}),
    (ssd_outputs, "gate gradient", {}),
]
_OTHERS: list[_Variant] = [(ssd_decays, "decays", {}), (ssd_step_gradients, "step gradients", {})]
_STATES: list[_Variant] = []
for _carry, _how in ((True, "walked"), (False, "apart")):
    _given = {"BACKWARD": False, "CARRY": _carry, "entered": None, "inner": None}
    _STATES.append((ssd_states, f"states {_how}", _given))
    _STATES.append((ssd_states, f"gradients of states {_how}", {"BACKWARD": True, "CARRY": _carry}))
_given = {"BACKWARD": False, "entered": None, "inner": None}
_STATES += [(ssd_carry, "carry", {**_given, "CARRY": False})]
_STATES += [(ssd_carry, "carry of gradients", {"BACKWARD": True, "CARRY": False})]


def _kernels(
    dtype: torch.dtype,
    precision: str,
    H: int,
    P: int,
    N: int,
    chunk: int,
    *,
    options: bool = True,
    only: list[_Variant] | None = None,
) -> Iterator[Configuration]:
    kind = TYPE_NAMES[dtype]
    tiles = tiles_of(H, P, N, chunk, precision)
    constants = {**tiles, "SOFTPLUS": options, "PACKED": options}
    names = ("D", "z", "dD", "bias", "initial", "mask", "starts", "past", "opens")
    absent = [] if options else list(names)
    name = f"P={P} N={N} Q={tiles['Q']} {kind}{'' if options else ' plain'}"
    name += "" if precision == kind else f" {precision}"
    for kernel, about, given in only or [*_OTHERS, *_PRODUCTS, *_STATES]:
        yield _configuration(kernel, f"{about} {name}", constants | given, absent, kind, precision)


_WIDE = (
    *("A", "bias", "D", "delta", "ddelta", "dD", "steps", "high", "low", "through", "pairs"),
    *("states", "initial", "entered", "final", "inner", "carries", "direct", "leaving", "below"),
    *("right", "entering", "dpairs", "dA", "dbias"),
)
_TYPES = dict.fromkeys(_WIDE, "*fp32")
_TYPES |= {"mask": "*u8", "starts": "*u8", "past": "*i32", "opens": "*i32"}
_OF_X = ("x", "B", "C", "z", "dy", "y", "dz", "dx", "values", "vectors", "own", "other", "out")
_SIZES = (
    *("T", "H", "K", "G", "P", "N", "size", "chunk", "chunks", "origin", "splits"),
    *("parts_p", "parts_n", "parts_inner"),
)

# At most, on any chip: loads of what a token or a head has one of.
_SINGLE_LOADS = {
    "ssd_pairs": 4,
    "ssd_outputs": 36,
    "ssd_input_gradients": 42,
    "ssd_pair_gradients": 22,
    "ssd_vector_gradients": 25,
    "ssd_states": 40,
    "ssd_carry": 8,
}
_SINGLE_LOADS_TF32 = {  # of float32, whose tiles have more of them
    "ssd_pairs": 8,
    "ssd_outputs": 42,
    "ssd_input_gradients": 45,
    "ssd_pair_gradients": 26,
    "ssd_vector_gradients": 31,
    "ssd_states": 76,
}


def _configuration(
    kernel: Any, name: str, constants: dict[str, Any], absent: list[str], kind: str, precision: str
) -> Configuration:
    names = kernel.arg_names
    constants = {n: constants[n] for n in names if n in constants}
    constants |= {n: None for n in names if n in absent}
    types = _TYPES | dict.fromkeys(_OF_X, f"*{kind}")
    signature = {n: types.get(n, "i32") for n in names if n not in constants}
    strides = {n for n in names if n not in types and n not in _SIZES}
    even = strides | {"P", "N", "size"}
    aligned = [n for n, t in signature.items() if t.startswith("*") or n in even]
    warps, stages, registers = resources_of(kernel.__name__, precision)
    tiled = constants.get("ROWS", 64) >= 32
    single = _SINGLE_LOADS | (_SINGLE_LOADS_TF32 if (kind, precision) == ("fp32", "tf32") else {})
    return Configuration(
        kernel,
        f"ssd_scan {name}",
        signature,
        constants,
        tuple(aligned),
        num_warps=warps,
        launch_warps=True,
        num_stages=stages,
        registers=registers,
        wide_loads=tiled and kernel.__name__ in single,
        narrow_loads=single.get(kernel.__name__, 0),
        matrix="PRECISION" in constants and precision != "ieee" and constants["ROWS"] == 64,
    )
