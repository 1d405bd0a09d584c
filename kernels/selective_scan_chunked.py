"""`selective_scan` in PyTorch, a chunk of tokens at a time, with a hand-written backward.

A chunk's exponentials are computed at once into a reused buffer, the recurrence runs through it in
place, and a batched product with C gives the chunk's results. Only the states between chunks are
kept for backward, which recomputes the others. Extra memory: two buffers (backward: three) of
`TOKENS` × about `ELEMENTS` × threads numbers, and for backward the kept states, N / `TOKENS` times
the size of x.

Q tokens of a chunk, R rows of the batch, E channels of a tile, N state; inside, time comes first.
Both directions fill the buffers in memory order; the reverse one walks through them backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from brickwork.kernels.backend import autocast_off, compute_dtype
from brickwork.kernels.selective_scan import step_sizes

LOG2E = 1.4426950408889634074  # the CPU's exp2 takes a third of the time of its exp
TOKENS = 32
ELEMENTS = 24576  # of state a thread: a step's operands stay in the second-level cache


def selective_scan_chunked(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    softplus: bool,
    reverse: bool,
    mask: Tensor | None,
    starts: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`selective_scan` for checked arguments, with B and C (B, T, G, N) and sequence starts."""
    floats = (x, delta, A, B, C, D, z, delta_bias, initial_state)
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
    with autocast_off(x):
        y, final_state, _ = _forward(*floats, mask, starts, softplus, reverse, training)
    return y, final_state


class _Scan(NamedTuple):
    """The arguments of the scan, in the order of the registered ops."""

    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    bias: Tensor | None
    initial: Tensor | None
    mask: Tensor | None
    starts: Tensor | None
    softplus: bool
    reverse: bool

    def dtype(self) -> torch.dtype:
        return compute_dtype(*self[:9])


class _Chunk(NamedTuple):
    """What a chunk of a tile needs beside the buffers: (Q, R, E), and B, C (Q, R, N).

    starts: for each token in which rows (R, 1, 1) a sequence starts there, None where in none.
    """

    raw: Tensor
    step: Tensor
    x: Tensor
    B: Tensor
    C: Tensor
    starts: list[Tensor | None]
    padding: Tensor | None


class _Tile:
    """Some rows of the batch and channels of one group, all tokens, and the buffers to run them."""

    def __init__(self, scan: _Scan, rows: slice, group: int, channels: slice, buffers: int) -> None:
        self.scan, self.rows, self.group, self.channels = scan, rows, group, channels
        self.dtype = scan.dtype()
        self.A = scan.A[channels].to(self.dtype).mT.contiguous()
        self.rate = self.A * LOG2E
        self.D = None if scan.D is None else scan.D[channels].to(self.dtype)
        self.bias = None if scan.bias is None else scan.bias[channels].to(self.dtype)
        self.shape = (rows.stop - rows.start, *self.A.shape)
        longest = min(TOKENS, scan.x.shape[1])
        self.decay = scan.x.new_empty(longest, *self.shape, dtype=self.dtype)
        self.states = scan.x.new_empty(longest + 1, *self.shape, dtype=self.dtype)
        if buffers == 3:
            self.grads = torch.empty_like(self.decay)

    def chunks(self, reverse: bool) -> Iterator[tuple[int, slice]]:
        """Number and tokens of each chunk, from right to left if `reverse`."""
        T = self.scan.x.shape[1]
        slices = [slice(t, min(t + TOKENS, T)) for t in range(0, T, TOKENS)]
        return reversed(list(enumerate(slices))) if reverse else iter(enumerate(slices))

    def take(self, tensor: Tensor, at: slice) -> Tensor:
        """This tile's part of a (B, T, E) tensor, (Q, R, E)."""
        part = tensor[self.rows, at, self.channels].to(self.dtype)
        return part.transpose(0, 1).contiguous()

    def state(self, tensor: Tensor | None) -> Tensor:
        """A copy of this tile's part of a (B, E, N) state, or zeros; (R, N, E)."""
        if tensor is None:
            return self.decay.new_zeros(self.shape)
        part = tensor[self.rows, self.channels].mT
        return self.decay.new_empty(self.shape).copy_(part)

    def inputs(self, at: slice) -> _Chunk:
        scan = self.scan
        raw, x = self.take(scan.delta, at), self.take(scan.x, at)
        raw = raw if self.bias is None else raw + self.bias
        step = step_sizes(raw, None, scan.softplus)
        B, C = (
            t[self.rows, at, self.group].to(self.dtype).transpose(0, 1) for t in (scan.B, scan.C)
        )
        starts = self.starts(at)
        if scan.mask is None:
            return _Chunk(raw, step, x, B, C, starts, None)
        padding = ~scan.mask[self.rows, at].mT[..., None]
        step, x, B, C = (t.masked_fill(padding, 0) for t in (step, x, B, C))
        return _Chunk(raw, step, x, B, C, starts, padding)

    def run(self, chunk: _Chunk, at: slice, entering: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decays, states and the states before them, each (Q, R, N, E), views of the buffers."""
        Q, reverse = at.stop - at.start, self.scan.reverse
        decay = torch.mul(chunk.step[:, :, None], self.rate, out=self.decay[:Q]).exp2_()
        states = self.states[:Q] if reverse else self.states[1 : Q + 1]
        before = self.states[1 : Q + 1] if reverse else self.states[:Q]
        push = chunk.step * chunk.x
        torch.mul(push[:, :, None], chunk.B[..., None], out=states)
        before[-1 if reverse else 0].copy_(entering)
        now, previous, decays = states.unbind(0), before.unbind(0), decay.unbind(0)
        for t in reversed(range(Q)) if reverse else range(Q):
            _add_decayed(now[t], decays[t], previous[t], chunk.starts[t])
        return decay, states, before

    def starts(self, at: slice) -> list[Tensor | None]:
        if self.scan.starts is None:
            return [None] * (at.stop - at.start)
        starts = self.scan.starts[self.rows, at].mT[..., None, None]
        return [row if some else None for row, some in zip(starts, starts.flatten(1).any(1))]

    def ungated(self, chunk: _Chunk, states: Tensor) -> Tensor:
        """`C · h + D x`, (Q, R, E)."""
        out = torch.matmul(chunk.C[:, :, None], states).squeeze(2)
        return out if self.D is None else out.addcmul_(chunk.x, self.D)


def _add_decayed(to: Tensor, decay: Tensor, state: Tensor, start: Tensor | None) -> None:
    """What a step leaves of the state before it: nothing where a sequence starts, were it NaN."""
    if start is None:
        to.addcmul_(decay, state)
    else:
        to.add_((decay * state).masked_fill_(start, 0))


def _tiles(scan: _Scan, buffers: int = 2) -> Iterator[_Tile]:
    """Tiles of about `ELEMENTS` numbers of state a thread."""
    batch, _, channels = scan.x.shape
    groups, N = scan.B.shape[2:]
    budget = max(1, ELEMENTS * torch.get_num_threads() // max(1, N))
    per_group = channels // groups
    width = max(1, min(per_group, budget))
    rows = max(1, min(batch, budget // width))
    for group in range(groups):
        end = (group + 1) * per_group
        for c in range(group * per_group, end, width):
            for b in range(0, batch, rows):
                part = slice(b, min(b + rows, batch))
                yield _Tile(scan, part, group, slice(c, min(c + width, end)), buffers)


@torch.library.custom_op("brickwork::selective_scan_chunked", mutates_args=())
def _forward(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    softplus: bool,
    reverse: bool,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    scan = _Scan(
        x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts, softplus, reverse
    )
    y, final_state, kept = _outputs(scan, training)
    for tile in _tiles(scan):
        carry = tile.state(initial_state)
        for number, at in tile.chunks(reverse):
            if training:
                kept[tile.rows, _states(number, A), tile.channels] = carry
            chunk = tile.inputs(at)
            _, states, _ = tile.run(chunk, at, carry)
            carry.copy_(states[0 if reverse else -1])
            out = tile.ungated(chunk, states)
            if z is not None:
                out = out.mul_(silu(tile.take(z, at)))
            if chunk.padding is not None:
                out = out.masked_fill_(chunk.padding, 0)
            y[tile.rows, at, tile.channels] = out.transpose(0, 1)
        final_state[tile.rows, tile.channels] = carry.mT
    return y, final_state, kept


def _outputs(scan: _Scan, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    """With room for the states in front of the chunks, (B, chunks · N, E): an axis of chunks alone
    would make torch.compile tell programs with one chunk from others."""
    x, N, dtype = scan.x, scan.A.shape[1], scan.dtype()
    chunks = (x.shape[1] + TOKENS - 1) // TOKENS if training else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape[0], x.shape[2], N, dtype=dtype),
        x.new_empty(x.shape[0], chunks * N, x.shape[2], dtype=dtype),
    )


def _states(chunk: int, A: Tensor) -> slice:
    return slice(chunk * A.shape[1], (chunk + 1) * A.shape[1])


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(_Scan(*arguments[:-1]), arguments[-1])


@torch.library.custom_op("brickwork::selective_scan_chunked_backward", mutates_args=())
def _backward(
    dy: Tensor,
    dfinal: Tensor,
    kept: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    softplus: bool,
    reverse: bool,
) -> list[Tensor]:
    scan = _Scan(
        x, delta, A, B, C, D, z, delta_bias, initial_state, mask, starts, softplus, reverse
    )
    sums = scan._replace(**_gradients(scan))
    for tile in _tiles(scan, buffers=3):
        rows, channels, group = tile.rows, tile.channels, tile.group
        carry, dA = tile.state(dfinal), tile.state(None)
        for number, at in tile.chunks(not reverse):
            chunk = tile.inputs(at)
            decay, states, before = tile.run(chunk, at, kept[rows, _states(number, A), channels])
            dout = tile.take(dy, at)
            if chunk.padding is not None:
                dout = dout.masked_fill(chunk.padding, 0)
            if z is not None and sums.z is not None:
                gate = tile.take(z, at)
                if chunk.padding is not None:
                    gate = gate.masked_fill(chunk.padding, 0)
                s = torch.sigmoid(gate)
                dgate = dout * tile.ungated(chunk, states) * (s * (1 + gate * (1 - s)))
                if chunk.padding is not None:
                    dgate = dgate.masked_fill_(chunk.padding, 0)
                sums.z[rows, at, channels] = dgate.transpose(0, 1)
                dout = dout * (gate * s)
            dC = torch.matmul(dout[:, :, None], states.mT).squeeze(2)
            if chunk.padding is not None:
                dC.masked_fill_(chunk.padding, 0)
            sums.C[rows, at, group] += dC.transpose(0, 1)
            dstates = torch.mul(chunk.C[..., None], dout[:, :, None], out=tile.grads[: len(decay)])
            _accumulate(dstates, decay, carry, chunk.starts, reverse)
            dpush = torch.matmul(chunk.B[:, :, None], dstates).squeeze(2)
            push = chunk.step * chunk.x
            dB = torch.matmul(push[:, :, None], dstates.mT).squeeze(2)
            sums.B[rows, at, group] += dB.transpose(0, 1)
            drate = decay.mul_(dstates).mul_(before)
            for t, start in enumerate(chunk.starts):
                if start is not None:
                    drate[t].masked_fill_(start, 0)
            dstep = dpush * chunk.x
            for n in range(A.shape[1]):
                dstep.addcmul_(drate[:, :, n], tile.A[n])
            for t, step in enumerate(chunk.step.unbind(0)):
                dA.addcmul_(drate[t], step[:, None])
            dx = dpush.mul_(chunk.step)
            if tile.D is not None and sums.D is not None:
                dx.addcmul_(dout, tile.D)
                sums.D[channels] += (dout * chunk.x).sum((0, 1))
            if softplus:
                dstep.mul_(torch.sigmoid(chunk.raw))
            if chunk.padding is not None:  # the other gradients are products with a 0 of padding
                dstep.masked_fill_(chunk.padding, 0)
            if sums.bias is not None:
                sums.bias[channels] += dstep.sum((0, 1))
            sums.x[rows, at, channels] = dx.transpose(0, 1)
            sums.delta[rows, at, channels] = dstep.transpose(0, 1)
        sums.A[channels] += dA.sum(0).mT
        if sums.initial is not None:
            sums.initial[rows, channels] = carry.mT
    return [
        grad.to(tensor.dtype)
        for grad, tensor in zip(sums[:9], scan[:9])
        if isinstance(grad, Tensor) and isinstance(tensor, Tensor)
    ]


def _accumulate(
    dstates: Tensor, decay: Tensor, carry: Tensor, starts: list[Tensor | None], reverse: bool
) -> None:
    """Run the gradient back through a chunk's states; `carry` comes from after, leaves before."""
    grads, decays = dstates.unbind(0), decay.unbind(0)
    later = None
    for t in range(len(grads)) if reverse else reversed(range(len(grads))):
        if later is None:
            grads[t].add_(carry)
        else:
            _add_decayed(grads[t], decays[later], grads[later], starts[later])
        later = t
    if later is not None:
        _add_decayed(carry.zero_(), decays[later], grads[later], starts[later])


def _gradients(scan: _Scan) -> dict[str, Any]:
    """Uninitialised where an entry is written once, zeros of a wide type where many are summed."""
    grads: dict[str, Any] = {}
    for name, tensor in zip(_Scan._fields[:9], scan[:9]):
        if tensor is None:
            grads[name] = None
        elif name in ("A", "B", "C", "D", "bias"):
            grads[name] = torch.zeros(tensor.shape, dtype=scan.dtype(), device=tensor.device)
        else:
            grads[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return grads


@_backward.register_fake
def _(dy: Tensor, dfinal: Tensor, kept: Tensor, *arguments: Any) -> list[Tensor]:
    scan = _Scan(*arguments)
    return [t.new_empty(t.shape) for t in scan[:9] if t is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[2], *inputs[:11])
    ctx.softplus, ctx.reverse = inputs[11:13]
    ctx.mark_non_differentiable(output[2])  # and no zeros of its size as its gradient
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dy: Tensor | None, dfinal: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    kept, *tensors = ctx.saved_tensors
    x, A = tensors[0], tensors[2]
    if dy is None and dfinal is None:
        return (None,) * (9 + 5)
    dy = torch.zeros_like(x) if dy is None else dy
    if dfinal is None:
        dfinal = kept.new_zeros(x.shape[0], *A.shape)
    with autocast_off(dy):
        found = iter(_backward(dy, dfinal, kept, *tensors, ctx.softplus, ctx.reverse))
    return tuple(None if t is None else next(found) for t in tensors[:9]) + (None,) * 5


_forward.register_autograd(_differentiate, setup_context=_setup)
