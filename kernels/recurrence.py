"""A recurrence along one axis, piece by piece: a loop, or in an exported program an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

Step = Callable[..., tuple[Tensor, Tensor]]


def recur(
    step: Step,
    state: Tensor,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor] = (),
    *,
    axis: int,
    size: int,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run `state, y = step(state, pieces, *constants)` over pieces of `inputs` of `size` along
    `axis`.

    A loop would fix the length of an exported program, so `torch.export` gets PyTorch's `scan`
    instead, for any length; ONNX knows it as Scan. Its pieces are all of `size`, with zeros (False)
    behind the last: of these `step` must return the state it took. Exported without gradients
    (`torch.no_grad()`) the program has none here, whoever runs it: with them PyTorch traces each
    call of `scan` anew, and cannot decompose it for ONNX. So with gradients a fixed length stays a
    loop, which has them all.

    Arguments:
        step: a function of the state, of a piece of each input, the last one maybe shorter, and of
            the constants; it uses no other tensors. The new state has the old one's shape and
            dtype, y the pieces' length along `axis`.
        state: before the first piece.
        inputs: tensors of one length, at least 1, along `axis`.
        reverse: take the pieces from the last to the first.

    Returns:
        The state after the last piece, and the y of all of them, joined in the inputs' order.

    >>> ones = torch.ones(3)
    >>> recur(lambda state, pieces: (state + pieces[0], state + pieces[0]), torch.zeros(1), [ones],
    ...       axis=0, size=1, reverse=False)
    (tensor([3.]), tensor([1., 2., 3.]))
    """
    fixed = isinstance(inputs[0].shape[axis], int)
    if torch.compiler.is_exporting() and not (fixed and torch.is_grad_enabled()):
        return _as_operator(step, state, inputs, constants, axis, size, reverse)
    outputs = []
    pieces = list(zip(*(tensor.split(size, axis) for tensor in inputs)))
    for piece in reversed(pieces) if reverse else pieces:
        state, y = step(state, piece, *constants)
        outputs.append(y)
    return state, torch.cat(outputs[::-1] if reverse else outputs, axis)


def _as_operator(
    step: Step,
    state: Tensor,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    axis: int,
    size: int,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    from torch._higher_order_ops.scan import scan

    tokens = torch.arange(inputs[0].shape[axis], device=state.device)
    inputs = [_pieces(tensor, axis, size) for tensor in inputs]
    if not torch.is_grad_enabled():
        # Copies, for PyTorch may fail to describe views of views to the operator.
        state, *tensors = (t.detach().clone() for t in (state, *inputs, *constants))
        inputs, constants = tensors[: len(inputs)], tensors[len(inputs) :]

    def one(state: Tensor, pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        state, y = step(state, pieces, *constants)
        return state.contiguous(), y  # of one layout throughout

    state, y = scan(one, state.contiguous(), inputs, reverse=reverse)
    return state, y.movedim(0, axis).flatten(axis, axis + 1).index_select(axis, tokens)


def _pieces(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Pieces of `size` along `axis`, along a new axis 0; zeros follow the last token."""
    if size == 1:
        return tensor.movedim(axis, 0).unsqueeze(axis + 1)
    # Taken by index: of a length cut into pieces PyTorch would ask what divides it. At least two
    # pieces, whatever the length: a number that is 1 while tracing it would make a constant.
    first = torch.arange(tensor.shape[axis] // size + 2, device=tensor.device) * size
    index = first[:, None] + torch.arange(size, device=tensor.device)
    behind = (0, 0) * (tensor.ndim - 1 - axis) + (0, 2 * size)
    return pad(tensor, behind).movedim(axis, 0)[index].movedim(1, axis + 1)
