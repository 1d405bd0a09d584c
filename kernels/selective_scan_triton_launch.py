"""How the kernels of `selective_scan_triton` are launched: tiles, segments, tensors in between.

One launch takes the scan of one direction, or that from the left and that from the right together:
the rows of the second come after those of the first, and its programs walk the other way. All that
is asked of the two is that their tensors are alike.

B batch, T tokens, E channels, N state, G groups of B and C; S directions, R = S · B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from brickwork.kernels.triton_support import cdiv, next_power_of_2

ENOUGH = 4  # programs for each multiprocessor that fill it
Q_FORWARD = 8  # tokens that a program carries a state through at a time
Q_BACKWARD = 4  # twice as many where a thread has one channel
REGISTERS = 255  # of a thread backward: left alone, the compiler would rather spill a few
COMBINED = 256  # states of a program of the small pass


def flags_of(mask: Tensor | None, starts: Tensor | None) -> Tensor | None:
    """(B, T): 1 for a real token, 2 more where a sequence starts; None if all are 1."""
    if starts is None:
        return None if mask is None else mask.to(torch.uint8)
    return 2 * starts.to(torch.uint8) + (1 if mask is None else mask.to(torch.uint8))


class Scans:
    """One or two directions in one launch, the first from the right if `reverse`.

    `flags` (R, T) are `flags_of` every row in turn.
    """

    def __init__(
        self,
        sides: Sequence[ScanInputs],
        z: Tensor | None,
        flags: Tensor | None,
        softplus: bool,
        reverse: bool,
    ) -> None:
        first, last = sides[0], sides[-1]
        self.batch, self.tokens, self.channels = first.x.shape
        self.groups, self.state = first.B.shape[2], first.A.shape[1]
        self.rows, self.width = len(sides) * self.batch, self.channels // self.groups
        self.softplus, self.reverse, self.device = softplus, reverse, first.x.device
        self.x, self.x_2 = _alike(first.x, last.x)
        self.delta, self.delta_2 = _alike(first.delta, last.delta)
        self.D, self.D_2 = _alike(first.D, last.D)
        self.bias, self.bias_2 = _alike(first.delta_bias, last.delta_bias)
        self.A = torch.stack([side.A.mT for side in sides])
        self.z = None if z is None else _dense(z)
        self.flags = None if flags is None else flags.contiguous()
        self.chunk = chunk_of(self.state)
        self.prepared = self._prepare(*_alike(first.B, last.B), *_alike(first.C, last.C))
        self.padded = self.prepared.shape[2] * together()

    def _prepare(self, B: Tensor, B_2: Tensor, C: Tensor, C_2: Tensor) -> Tensor:
        """B and C in scan order, as (R, G, T / some, 2, N, some), T in whole groups of Q."""
        longest = max(Q_FORWARD, 2 * Q_BACKWARD)
        padded = cdiv(self.tokens, longest) * longest
        some = together()
        prepared = self.wide(self.rows, self.groups, padded // some, 2, self.state, some)
        columns, rows = shape_of_preparation(self.state)
        prepare_kernel[(self.rows * self.groups * cdiv(padded, rows),)](
            B, B_2, C, C_2, self.flags, prepared, *B.stride()[:3], *C.stride()[:3], self.batch,
            self.tokens, padded, self.groups, int(self.reverse), N=self.state, COLUMNS=columns,
            ROWS=rows, TOGETHER=some, num_warps=4,
        )  # fmt: skip
        return prepared

    def wide(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def forward(self, initial_state: Tensor | None, y: Tensor, states: Tensor | None) -> Tensor:
        """Fill y (R, T, E) and the states (R, chunks · N, E) in front of the chunks, where asked
        for; the states (R, N, E) behind all tokens."""
        block = block_of_forward(self.width, self.rows * self.groups, self.x)
        cut = self._cut(block)
        strides = _strides(self.x, self.delta, self.z)
        constants = self._constants(Q_FORWARD, block)

        def run(summary: bool) -> None:
            forward_kernel[(self._programs(block) * (cut.segments - summary),)](
                self.x, self.x_2, self.delta, self.delta_2, self.A, self.prepared, self.D, self.D_2,
                self.z, self.bias, self.bias_2, self.flags, cut.carry,
                cut.decay if summary else None, None if summary else states,
                None if summary else y, *strides, *self._sizes(cut), self.chunk, 0,
                int(self.reverse), SUMMARY=summary, **constants, num_warps=1,
            )  # fmt: skip

        if cut.segments > 1:
            run(summary=True)
        self._begin(cut, initial_state, backwards=False)
        run(summary=False)
        return cut.carry[:, -1]

    def backward(self, dy: Tensor, dfinal: Tensor | None, states: Tensor, into: Into) -> Sums:
        """Fill `into`; the gradients that are sums, in float32."""
        dy, block = _dense(dy), block_of_backward(self.width)
        cut, blocks = self._cut(block), cdiv(self.width, block)
        strides = (*dy.stride()[:2], *_strides(self.x, self.delta, self.z))
        sizes, reverse = self._sizes(cut), int(self.reverse)
        q = tokens_of_backward(block, triton_support.lanes())
        constants = self._constants(q, block)
        if cut.segments > 1:
            backward_summary_kernel[(self._programs(block) * (cut.segments - 1),)](
                dy, self.delta, self.delta_2, self.A, self.prepared, self.z, self.bias, self.bias_2,
                self.flags, cut.carry, cut.decay, *strides[:2], *strides[4:], *sizes, reverse,
                **constants, num_warps=1,
            )  # fmt: skip
        self._begin(cut, dfinal, backwards=True)
        sums = self.wide(self.rows, cut.segments, 2, self.channels)
        rates = torch.zeros_like(cut.carry)
        scratch = self.wide(*cut.carry.shape[:2], self.chunk // q, *cut.carry.shape[2:])
        shares = self.wide(blocks, self.rows, self.groups, self.padded, 2, self.state)
        backward_kernel[(self._programs(block) * cut.segments,)](
            dy, self.x, self.x_2, self.delta, self.delta_2, self.A, self.prepared, self.D, self.D_2,
            self.z, self.bias, self.bias_2, self.flags, states, cut.carry, scratch, into.x,
            into.delta, rates, shares, into.z, sums, *strides, self.rows, *sizes, self.chunk, 0,
            reverse, **constants, **triton_support.launch_options(1, registers=REGISTERS),
        )  # fmt: skip
        total = sums.unflatten(0, (-1, self.batch)).sum((1, 2))
        of_A = rates.unflatten(0, (-1, self.batch)).sum((1, 2)).mT
        of_B, of_C = self._of_tokens(shares.sum(0)).unbind(-2)
        return Sums(of_A, of_B, of_C, total[:, 0], total[:, 1], cut.carry[:, 0])

    def _of_tokens(self, shares: Tensor) -> Tensor:
        """(R, G, padded, 2, N) in scan order as (S, B, T, G, 2, N), 0 at padding."""
        ways = shares[:, :, : self.tokens].unflatten(0, (-1, self.batch)).unbind()
        turned = [w.flip(2) if self.reverse != bool(i) else w for i, w in enumerate(ways)]
        of_tokens = torch.stack(turned).transpose(2, 3)
        if self.flags is None:
            return of_tokens
        padding = (self.flags & 1 == 0).view(*of_tokens.shape[:3], 1, 1, 1)
        return of_tokens.masked_fill(padding, 0)

    def _constants(self, q: int, block: int) -> dict[str, Any]:
        sizes = {"N": self.state, "Q": q, "BLOCK": block, "TOGETHER": together()}
        return {"SOFTPLUS": self.softplus, **sizes, "LANES": triton_support.lanes()}

    def _programs(self, block: int) -> int:
        return self.rows * self.groups * cdiv(self.width, block)

    def _sizes(self, cut: _Cut) -> tuple[int, ...]:
        of_inputs = (self.batch, self.tokens, self.padded, self.channels, self.width, self.groups)
        return (*of_inputs, self.state, cut.segments, cut.tokens)

    def _cut(self, block: int) -> _Cut:
        count, tokens = segments_of(
            self._programs(block),
            self.tokens,
            self.chunk,
            triton_support.multiprocessors(self.x),
        )
        shape = (self.rows, count, self.state, self.channels)
        carry = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return _Cut(count, tokens, carry, carry if count == 1 else torch.empty_like(carry))

    def _begin(self, cut: _Cut, start: Tensor | None, *, backwards: bool) -> None:
        """Make of the segments' effects the states in front of them; `start` (R, E, N) is the
        first."""
        if cut.segments == 1:
            if start is not None:
                cut.carry[:, 0] = start.mT
            return
        size = self.state * self.channels
        first = cut.carry.new_zeros(self.rows, self.state, self.channels)
        if start is not None:
            first.copy_(start.mT)
        combine_kernel[(self.rows * cdiv(size, COMBINED),)](
            first, cut.decay, cut.carry, size, cut.segments, BACKWARDS=backwards, BLOCK=COMBINED,
            **triton_support.launch_options(2),
        )  # fmt: skip


class _Cut(NamedTuple):
    """Tokens in segments: how many, the tokens of each, and (R, segments, N, E) zeros for states
    and room for what is left of them."""

    segments: int
    tokens: int
    carry: Tensor
    decay: Tensor


class Into(NamedTuple):
    """Room for the gradients (R, T, E) of x, delta and z."""

    x: Tensor
    delta: Tensor
    z: Tensor | None


class Sums(NamedTuple):
    """The gradients that the directions have each for themselves, and of states in front."""

    A: Tensor  # (S, E, N)
    B: Tensor  # (S, B, T, G, N)
    C: Tensor
    D: Tensor  # (S, E)
    bias: Tensor
    initial: Tensor  # (R, N, E)


def _dense(tensor: Tensor) -> Tensor:
    """The same, with a contiguous last axis; no copy where it is."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Both directions' tensors with the same strides and a contiguous last axis."""
    if one is None:
        return None, None
    if one is other:
        return (_dense(one),) * 2
    one, other = _dense(one), _dense(other)
    return (
        (one, other) if one.stride() == other.stride() else (one.contiguous(), other.contiguous())
    )


def _strides(x: Tensor, delta: Tensor, z: Tensor | None) -> tuple[int, ...]:
    return (*x.stride()[:2], *delta.stride()[:2], *((0, 0) if z is None else z.stride()[:2]))


def shape_of_preparation(state: int) -> tuple[int, int]:
    columns = next_power_of_2(max(state, 1))
    return columns, max(together(), 2048 // columns)


def together() -> int:
    """Tokens whose numbers of B, or of C, a thread loads at once: 128 bits."""
    return min(4, Q_FORWARD, Q_BACKWARD)


def chunk_of(state: int) -> int:
    """Tokens between kept states: the more states, the more tokens."""
    return min(max(64, 4 * state), 256) // 64 * 64


def block_of_forward(width: int, groups: int, x: Tensor) -> int:
    """Channels of a program, of `groups` of `width`: two or four for each of 32 threads where the
    GPU is full all the same, so that there is one segment."""
    enough = 2 * ENOUGH * triton_support.multiprocessors(x)
    least = triton_support.lanes()
    return next((b for b in (128, 64) if groups * cdiv(width, b) >= enough), least)


def block_of_backward(width: int) -> int:
    """Two channels a thread halve the work of the sums over channels; for four of them the
    registers do not suffice."""
    lanes = triton_support.lanes()
    return lanes if width <= lanes else 2 * lanes


def tokens_of_backward(block: int, lanes: int) -> int:
    """Tokens at a time: the more, the fewer channels a thread has, so that each of a warp's threads
    loads 128 bits of a tile, of 16-bit numbers too, and keeps as many numbers in registers."""
    return Q_BACKWARD * 2 * lanes // block


def segments_of(programs: int, tokens: int, chunk: int, processors: int) -> tuple[int, int]:
    """How many segments the tokens are cut into, and the tokens of each: whole chunks."""
    enough = ENOUGH * processors
    wanted = 1 if programs >= enough else cdiv(2 * enough, programs)
    segment = cdiv(cdiv(tokens, wanted), chunk) * chunk
    return cdiv(tokens, segment), segment
