"""The choices of experts of a whole model: written down in one run, replayed in another.

T tokens, K experts chosen for a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brickwork.blocks.moe import MoE


class RoutingRecord(Sequence[Tensor]):
    """What every `MoE` of a model chose, in the order of `model.named_modules()`.

    `calls[i]` lists the indices (..., T, K) of layer i call by call; `record[i]` joins them along
    the tokens, so that the record of a cached `generate` is a routing of prompt and continuation,
    as `Rish(..., routing=record)` takes it. `names` are the layers' names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.calls: list[list[Tensor]] = [[] for _ in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        calls = self.calls[index]
        if not calls:
            raise ValueError(
                f"nothing was recorded of {self.names[index] or 'the model'}: it was not called "
                f"(a compiled model does not see that it is being recorded)"
            )
        return calls[0] if len(calls) == 1 else torch.cat(calls, -2)


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Within the block, write down the experts that every `MoE` in `model` chooses.

    What activation checkpointing computes again is written down once. Leaves nothing behind in the
    model. Raises ValueError for a model without `MoE`.

    >>> moe, x = MoE(4, hidden_dim=8, num_experts=6, top_k=2), torch.randn(5, 4)
    >>> with record_routing(moe) as record:
    ...     y = moe(x).y
    >>> record[0].shape
    torch.Size([5, 2])
    >>> torch.nn.init.normal_(moe.router.weight).shape
    torch.Size([6, 4])
    >>> with replay_routing(moe, record):
    ...     torch.equal(moe(x).indices, record[0])
    True
    """
    layers = _layers(model)
    record = RoutingRecord(list(layers))

    def writer(calls: list[Tensor]) -> Callable[..., None]:
        def write(module: nn.Module, args: Any, output: Any) -> None:
            if not _recomputing():
                calls.append(output.indices.detach())

        return write

    with contextlib.ExitStack() as hooks:
        for layer, calls in zip(layers.values(), record.calls):
            hooks.callback(layer.register_forward_hook(writer(calls)).remove)
        yield record


@contextlib.contextmanager
def replay_routing(model: nn.Module, routing: Sequence[Tensor]) -> Iterator[None]:
    """Within the block, every `MoE` in `model` takes the experts given; weights are its own.

    Each call takes the next tokens of its layer's routing, a `RoutingRecord` call by call; after
    the last come the first again. So one block serves a forward and its backward, a cached
    `generate`, or an epoch of equal batches. With activation checkpointing the backward pass must
    run within the block too, and before another forward takes other tokens: what is computed again
    would not know which of them were its own.

    Arguments:
        model: any module; the `MoE` blocks within it, in the order of `model.named_modules()`.
        routing: one tensor of expert indices (..., T, K) per `MoE`, or a `RoutingRecord`.

    Raises:
        ValueError: no `MoE`, another number of layers, more tokens asked for than are left, a
            `routing` passed to a block besides, a recomputation that cannot be told apart, or, at
            the end, a routing that was not used or not used up.
    """
    layers = _layers(model)
    if isinstance(routing, Tensor) or len(routing) != len(layers):
        got = type(routing).__name__ if isinstance(routing, Tensor) else str(len(routing))
        raise ValueError(
            f"routing must hold one tensor for each of the model's {len(layers)} MoE, got {got}"
        )
    if isinstance(routing, RoutingRecord):
        given = [list(calls) for calls in routing.calls]
    else:
        given = [[indices] for indices in routing]
    decks = [_Deck(name, calls) for name, calls in zip(layers, given)]

    def dealer(deck: _Deck) -> Callable[..., tuple[Any, dict[str, Any]]]:
        def deal(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            if kwargs.get("routing") is not None:
                raise ValueError("routing was passed to a MoE within replay_routing: give it once")
            x = args[0] if args else kwargs["x"]
            return args, {**kwargs, "routing": deck.deal(x.shape[:-1]).to(x.device)}

        return deal

    with contextlib.ExitStack() as hooks:
        for layer, deck in zip(layers.values(), decks):
            hook = layer.register_forward_pre_hook(dealer(deck), with_kwargs=True)
            hooks.callback(hook.remove)
        yield
    for deck in decks:
        deck.check_used()


class _Deck:
    """The routing of one layer, dealt token by token."""

    def __init__(self, name: str, calls: list[Tensor]) -> None:
        self.name = name or "the model"
        self.calls = calls
        self.call = self.token = 0
        self.dealt: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        if not calls:
            raise ValueError(f"routing must not be empty, got no call of {self.name}")

    def deal(self, leading: torch.Size) -> Tensor:
        """Indices (*leading, K): the next, or in a backward pass those of the forward."""
        places = self.dealt.setdefault(tuple(leading), set())
        if _recomputing():
            if len(places) != 1:
                raise ValueError(
                    f"{self.name} is computed again in a backward pass and may have been any of "
                    f"{len(places)} calls: enter replay_routing anew for every forward and backward"
                )
            call, token = next(iter(places))
            return self._slice(call, token, leading)
        place = (self.call, self.token)
        indices = self._slice(*place, leading)
        places.add(place)
        self.token += leading[-1] if leading else 0
        if not leading or self.token == self.calls[self.call].shape[-2]:
            self.call, self.token = (self.call + 1) % len(self.calls), 0
        return indices

    def _slice(self, call: int, token: int, leading: torch.Size) -> Tensor:
        indices = self.calls[call]
        if not leading:
            return indices
        end = token + leading[-1]
        if indices.ndim != len(leading) + 1 or indices.shape[:-2] != leading[:-1]:
            raise ValueError(
                f"routing of {self.name} must have shape {(*leading, 'K')}, or more tokens, "
                f"got {tuple(indices.shape)}"
            )
        if end > indices.shape[-2]:
            raise ValueError(
                f"routing of {self.name} has {indices.shape[-2] - token} tokens left, "
                f"got {leading[-1]} to replay"
            )
        return indices[..., token:end, :]

    def check_used(self) -> None:
        """Raise if nothing was dealt, or not everything."""
        if not any(self.dealt.values()):
            raise ValueError(
                f"routing of {self.name} was not replayed: it was not called "
                f"(a compiled model does not see that routing is being replayed)"
            )
        if self.call or self.token:
            raise ValueError(
                f"routing of {self.name} was not used up: {self.call} of {len(self.calls)} calls "
                f"and {self.token} tokens of the next were replayed"
            )


def _layers(model: nn.Module) -> dict[str, MoE]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not found:
        raise ValueError(f"model must hold a MoE, got {type(model).__name__} without one")
    return found


def _recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1
