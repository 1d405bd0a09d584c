"""Experts over sorted tokens: the products of the chosen experts only, forward and backward.

S tokens, C width, F hidden width, E experts, K chosen; N = S K choices, sorted by expert.

`torch.nn.functional.grouped_mm` runs all experts at once, and the host never reads how many rows
each has. Where it does not reach, and where that is faster - on the CPU in float32 and in the
backward pass - experts run one after another, each over its own rows while they are in cache. All
of it is one op with one backward op, so that `torch.compile` keeps one graph. Nothing is added
atomically: results are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brickwork.kernels.backend import autocast_off, compute_dtype
from brickwork.kernels.checks import memory_is_all
from brickwork.kernels.experts import product_dtype
from brickwork.kernels.linear import linear

_silu_backward = torch.ops.aten.silu_backward


def experts_grouped(
    x_SC: Tensor, gate_up_EFC: Tensor, down_ECF: Tensor, indices_SK: Tensor, weights_SK: Tensor
) -> Tensor:
    """`experts` by sorted groups; the arguments are checked already."""
    dtype = product_dtype(x_SC, gate_up_EFC, down_ECF)
    x, gate_up, down = (t.to(dtype) for t in (x_SC, gate_up_EFC, down_ECF))
    weights = weights_SK.to(compute_dtype(x, weights_SK))
    train = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate_up, down, weights))
    inputs = (x, gate_up, down, indices_SK.long(), weights)
    plain = memory_is_all(*inputs)
    # Nothing to record for a compiler or for autograd: the op's own cost, tens of µs, is saved.
    run = _forward if plain and not train else experts_forward
    return run(*inputs, train)[0].to(x_SC.dtype)


class Groups(NamedTuple):
    """How the N choices are sorted: `order` (N) lists them by expert, `token` (N) says whose they
    are, `place` (S, K) where each choice went, `counts` (E) how many rows each expert has, `ends`
    (E) where they end."""

    order: Tensor
    token: Tensor
    place: Tensor
    counts: Tensor
    ends: Tensor


def sort_by_expert(indices_SK: Tensor, num_experts: int, order: Tensor | None = None) -> Groups:
    """Sort the choices by expert, equal ones by token; nothing is read on the host."""
    choices = indices_SK.reshape(-1)
    if order is None:
        order = choices.argsort(stable=True)
    counts = choices.new_zeros(num_experts).scatter_add_(0, choices, torch.ones_like(choices))
    rows = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order).scatter_(0, order, rows)
    token = order.div(max(indices_SK.shape[1], 1), rounding_mode="floor")
    return Groups(order, token, place.view(indices_SK.shape), counts, counts.cumsum(0))


def _forward(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y (S, C) in the weights' dtype; with `train` also gate and up (N, 2F) and the order (N)."""
    groups = sort_by_expert(indices, len(gate_up))
    with autocast_off(x):
        by_mm = x.dtype != torch.float32 and grouped_mm_reaches(x, gate_up, down, indices)
        run = forward_by_grouped_mm if by_mm else forward_by_expert
        out, both = run(x, gate_up, down, groups, train)
        y = _combine(out, groups.place, weights)
    return y, both, groups.order if train else groups.order.new_empty(0)


experts_forward = torch.library.custom_op("brickwork::experts", _forward, mutates_args=())


@torch.library.custom_op("brickwork::experts_backward", mutates_args=())
def experts_backward(
    grad_y: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    both: Tensor,
    order: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, gate_up, down and weights; those not wanted are empty."""
    groups = sort_by_expert(indices, len(gate_up), order)
    with autocast_off(x):
        by_mm = x.device.type != "cpu" and grouped_mm_reaches(x, gate_up, down, indices)
        run = backward_by_grouped_mm if by_mm else backward_by_expert
        weight = weights.reshape(-1)[order].to(compute_dtype(x))
        rows, grad_gate_up, grad_down, grad_weight = run(
            grad_y.to(x.dtype), x, gate_up, down, groups, weight, both, wanted
        )
        grad_x = _combine(rows, groups.place, None).to(x.dtype) if wanted[0] else rows
    grad_weights = grad_weight.to(weights.dtype)
    return (
        grad_x,
        grad_gate_up,
        grad_down,
        grad_weights[groups.place] if wanted[3] else grad_weights,
    )


def forward_by_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, groups: Groups, keep: bool
) -> tuple[Tensor, Tensor]:
    """The experts' outputs (N, C), sorted, and with `keep` their gate and up (N, 2F)."""
    out = _empty(x, len(groups.token), x.shape[1])
    kept = _empty(x, len(groups.token) if keep else 0, gate_up.shape[1])
    for e, mine in _filled(groups):
        both = linear(x.index_select(0, groups.token[mine]), gate_up[e])
        if keep:
            kept[mine] = both
        out[mine] = linear(_activate(both), down[e])
    return out, kept


def backward_by_expert(
    grad_y: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    groups: Groups,
    weight: Tensor,
    both: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x for each choice (N, C), sorted, of gate_up, of down, and of the sorted weights
    (N). `weight` (N) is sorted."""
    count = len(groups.token)
    grad_rows = _empty(x, count if wanted[0] else 0, x.shape[1])
    grad_gate_up = _empty(gate_up, *(gate_up.shape if wanted[1] else (0, 0, 0)))
    grad_down = _empty(down, *(down.shape if wanted[2] else (0, 0, 0)))
    grad_weight = _empty(weight, count)
    idle = set(range(len(down)))
    for e, mine in _filled(groups):
        idle.remove(e)
        token = groups.token[mine]
        grad = grad_y.index_select(0, token)
        grad_both, scaled = _activate_backward(
            linear(grad, down[e].mT), both[mine], weight[mine], grad_weight[mine]
        )
        if wanted[0]:
            grad_rows[mine] = linear(grad_both, gate_up[e].mT)
        if wanted[1]:
            torch.mm(grad_both.mT, x.index_select(0, token), out=grad_gate_up[e])
        if wanted[2]:
            torch.mm(grad.mT, scaled, out=grad_down[e])
    for e in sorted(idle):
        grad_gate_up[e : e + 1].zero_()
        grad_down[e : e + 1].zero_()
    return grad_rows, grad_gate_up, grad_down, grad_weight


def forward_by_grouped_mm(
    x: Tensor, gate_up: Tensor, down: Tensor, groups: Groups, keep: bool
) -> tuple[Tensor, Tensor]:
    """`forward_by_expert` with all experts in one product."""
    ends = groups.ends.int()
    rows = x.index_select(0, groups.token)
    both = torch.nn.functional.grouped_mm(rows, gate_up.mT, offs=ends)
    out = torch.nn.functional.grouped_mm(_activate(both), down.mT, offs=ends)
    return out, both if keep else both.new_empty(0, gate_up.shape[1])


def backward_by_grouped_mm(
    grad_y: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    groups: Groups,
    weight: Tensor,
    both: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`backward_by_expert` with all experts in one product."""
    mm = torch.nn.functional.grouped_mm
    ends = groups.ends.int()
    idle = (groups.counts == 0).view(-1, 1, 1)
    grad = grad_y.index_select(0, groups.token)
    grad_weight = torch.empty_like(weight)
    grad_both, scaled = _activate_backward(mm(grad, down, offs=ends), both, weight, grad_weight)
    grad_rows = mm(grad_both, gate_up, offs=ends) if wanted[0] else _empty(x, 0, x.shape[1])
    grad_gate_up, grad_down = _empty(gate_up, 0, 0, 0), _empty(down, 0, 0, 0)
    if wanted[1]:
        rows = x.index_select(0, groups.token)
        grad_gate_up = mm(grad_both.mT, rows, offs=ends).masked_fill_(idle, 0)
    if wanted[2]:
        grad_down = mm(grad.mT, scaled, offs=ends).masked_fill_(idle, 0)
    return grad_rows, grad_gate_up, grad_down, grad_weight


def grouped_mm_reaches(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor) -> bool:
    """Whether `grouped_mm` takes these tensors: there are any, in rows of whole 16-byte words; on
    CUDA bfloat16 from compute capability 8.0, on the CPU anything but float64."""
    if x.device.type == "cpu":
        takes = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    else:
        takes = x.is_cuda and x.dtype == torch.bfloat16
        takes = takes and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return (
        takes
        and indices.numel() > 0
        and hasattr(torch.nn.functional, "grouped_mm")
        and all(
            weight.numel() > 0
            and weight.is_contiguous()
            and weight.data_ptr() % 16 == 0
            and weight.shape[-1] * weight.element_size() % 16 == 0
            for weight in (gate_up, down)
        )
    )


def _filled(groups: Groups) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which."""
    start = 0
    for e, end in enumerate(groups.ends.tolist()):
        if end > start:
            yield e, slice(start, end)
        start = end


def _activate(both: Tensor) -> Tensor:
    gate, up = both.to(compute_dtype(both)).chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up).to(both.dtype)


def _activate_backward(
    grad: Tensor, both: Tensor, weight: Tensor, grad_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of the unweighted activation: the gradient of gate and up, weighted, and
    the weighted activation; fills `grad_weight`, so that the experts' outputs need not be kept."""
    grad = grad.to(weight.dtype)
    gate, up = both.to(weight.dtype).chunk(2, -1)
    silu = torch.nn.functional.silu(gate)
    activation = silu * up
    torch.sum(grad * activation, -1, out=grad_weight)
    grad = grad * weight.unsqueeze(1)
    grad_gate = _silu_backward(grad * up, gate)
    grad_both = torch.cat((grad_gate, grad.mul_(silu)), -1).to(both.dtype)
    return grad_both, activation.mul_(weight.unsqueeze(1)).to(both.dtype)


def _combine(rows: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over K of the sorted rows of each token, weighted, (S, C), in at least float32."""
    if weights is None:  # embedding_bag with weights of 1 takes half the time of one without
        weights = rows.new_ones(place.shape, dtype=compute_dtype(rows))
    if place.numel() == 0:
        return weights.new_zeros(place.shape[0], rows.shape[1])
    if rows.dtype == weights.dtype:
        return torch.nn.functional.embedding_bag(
            place, rows, mode="sum", per_sample_weights=weights
        )
    return torch.bmm(weights[:, None], rows[place].to(weights.dtype))[:, 0]


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


@experts_forward.register_fake
def _(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    count = indices.shape[0] * indices.shape[1] if train else 0
    return (
        weights.new_empty(x.shape),
        x.new_empty(count, gate_up.shape[1]),
        indices.new_empty(count),
    )


@experts_backward.register_fake
def _(
    grad_y: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    both: Tensor,
    order: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if wanted[0] else (0, x.shape[1])),
        gate_up.new_empty(gate_up.shape if wanted[1] else (0, 0, 0)),
        down.new_empty(down.shape if wanted[2] else (0, 0, 0)),
        weights.new_empty(weights.shape if wanted[3] else (weights.numel(),)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _ = inputs
    _, both, order = output
    ctx.mark_non_differentiable(both, order)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, both, order)


def _backward(ctx: Any, grad_y: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if grad_y is None:
        return (None,) * 6
    x, gate_up, down, indices, weights, both, order = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[2], needs[4]]
    found = experts_backward(grad_y, x, gate_up, down, indices, weights, both, order, wanted)
    grad_x, grad_gate_up, grad_down, grad_weights = (
        grad if want else None for grad, want in zip(found, wanted)
    )
    return grad_x, grad_gate_up, grad_down, None, grad_weights, None


def _no_second_backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise RuntimeError(
        "experts: backend 'grouped' can be differentiated once; take backend='torch', or "
        "brickwork.kernels.backend.prefer('torch'), for second derivatives"
    )


experts_forward.register_autograd(_backward, setup_context=_setup_context)
experts_backward.register_autograd(_no_second_backward)
