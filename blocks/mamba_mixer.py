"""What the Mamba mixers share: their state, their small layers, and how a call is put together.

B batch, T tokens, C model width, I inner width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from brickwork.blocks.hooks import has_hooks
from brickwork.kernels.backend import compute_dtype
from brickwork.kernels.bidirectional_conv1d import Filter
from brickwork.kernels.causal_conv1d import CausalConv1dOutput, causal_conv1d
from brickwork.kernels.checks import check_integer, claim
from brickwork.kernels.linear import linear
from brickwork.kernels.sequences import check_mask

STEP_RANGE = (1e-3, 1e-1)
STEP_FLOOR = 1e-4
PROJECTIONS = ("in_proj", "out_proj")


class MambaState:
    """What a causal mixer has read: the last inputs of its convolution and its scan's state.

    Pass the same object to one mixer again and again; every call goes on where the last one ended
    and replaces both tensors (none is written in place, so gradients reach back through calls).
    One object belongs to one mixer and one direction. `reset` empties it; `select` keeps or
    reorders rows of the batch, as a beam search does; `detach` cuts the gradient.

    >>> state = MambaState()
    >>> state.is_empty
    True
    """

    def __init__(self) -> None:
        self.conv: Tensor | None = None
        self.scan: Tensor | None = None
        self.reverse: bool | None = None
        self.owner: str | None = None  # which mixer fills it

    @property
    def is_empty(self) -> bool:
        """Whether nothing was read yet."""
        return self.scan is None

    def reset(self) -> None:
        """Forget everything."""
        self.conv = self.scan = self.reverse = self.owner = None

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.conv is not None and self.scan is not None:
            self.conv, self.scan = self.conv.index_select(0, rows), self.scan.index_select(0, rows)

    def detach(self) -> None:
        """Keep the values, without their history."""
        if self.conv is not None and self.scan is not None:
            self.conv, self.scan = self.conv.detach(), self.scan.detach()

    def update(self, conv: Tensor, scan: Tensor, reverse: bool) -> None:
        """Go on from these tensors (B, channels, W - 1) and (B, ..., N)."""
        self.conv, self.scan, self.reverse = conv, scan, reverse


class DepthwiseFilter(nn.Module):
    """A short causal convolution of every channel by itself: weight (I, 1, W) and bias (I,).

    Not an `nn.Conv1d`, so that a model's generic re-initialisation passes it by.

    >>> DepthwiseFilter(3, width=4).weight.shape
    torch.Size([3, 1, 4])
    """

    def __init__(self, dim: int, *, width: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, width))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from U(± W^-0.5), as `nn.Conv1d` does."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def filters(self) -> Filter:
        """As the ops take them."""
        return Filter(self.weight[:, 0], self.bias)

    def forward(self, x: Tensor, **options: Any) -> CausalConv1dOutput:
        """`causal_conv1d` of x (B, T, I), with its options."""
        return causal_conv1d(x, *self.filters(), **options)

    def extra_repr(self) -> str:
        return (
            f"{self.weight.shape[0]}, width={self.weight.shape[-1]}, bias={self.bias is not None}"
        )


class StepProjection(nn.Module):
    """The low-rank map to step sizes: weight (I, R), and the bias (I,) that the scan adds, float32.

    Not an `nn.Linear`, so that a model's generic re-initialisation (zero biases) passes it by.

    >>> proj = StepProjection(2, dim=8)
    >>> step = torch.nn.functional.softplus(proj.bias)
    >>> bool((step >= 9e-4).all() and (step <= 0.11).all())
    True
    """

    def __init__(self, rank: int, *, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, rank))
        self.bias = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight from U(± R^-0.5), bias from `init_step_bias_`."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        init_step_bias_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The step sizes (..., I) before bias and softplus."""
        return linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, dim={self.weight.shape[0]}"


def init_step_bias_(bias: Tensor) -> Tensor:
    """Set `bias` so that softplus(bias) is log-uniform in [1e-3, 1e-1], at least 1e-4."""
    low, high = (math.log(bound) for bound in STEP_RANGE)
    with torch.no_grad():
        step = torch.empty_like(bias).uniform_(low, high).exp().clamp(min=STEP_FLOOR)
        return bias.copy_(step + torch.log(-torch.expm1(-step)))


def decay_rates(A_log: Tensor) -> Tensor:
    """`A = -exp(A_log)`, at least in float32."""
    return -torch.exp(A_log.to(compute_dtype(A_log)))


class MambaMixer(nn.Module):
    """A causal mixer in three parts: `in_proj`, `mix` (convolution, scan, gate), `out_proj`.

    `split` cuts in_proj's result into the tensors that `mix` takes; two mixers that share it cut
    it once, so that their gradients are put together once.

    The parameters in `float32_parameters` stay in float32 whatever the model is cast to, by
    `.to(dtype)`, `.half()`, `load_state_dict(assign=True)` or a narrower default dtype:
    an exponential of a rounded A_log, or a step bias near 1e-3, is too coarse in bfloat16.
    They also take no weight decay (`brickwork.blocks.param_groups`).
    """

    float32_parameters: tuple[str, ...] = ()
    in_proj: nn.Linear
    out_proj: nn.Linear
    _lender: MambaMixer | None = None

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def borrow_projections(self, lender: MambaMixer) -> None:
        """Use the `lender`'s `in_proj` and `out_proj`, whatever they are replaced by later.

        They stay attributes of both mixers and modules of the lender alone: what PyTorch finds
        under two names, `torch.func.functional_call` does not put back.
        """
        for name in PROJECTIONS:
            del self._modules[name]
        self.__dict__["_lender"] = lender  # not registered; copies and pickles keep the reference

    def __getattr__(self, name: str) -> Any:
        if name in PROJECTIONS and self._lender is not None:
            return getattr(self._lender, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PROJECTIONS and self._lender is not None:
            setattr(self._lender, name, value)
        else:
            super().__setattr__(name, value)

    def must_be_called(self) -> bool:
        """Whether more belongs to a call than the three parts: hooks, a forward of its own."""
        return has_hooks(self) or type(self).forward is not MambaMixer.forward

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """in_proj's result as the arguments of `mix`."""
        raise NotImplementedError

    def mix(
        self,
        parts: tuple[Tensor, ...],
        *,
        mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
        reverse: bool = False,
        state: MambaState | None = None,
    ) -> Tensor:
        """What lies between the projections: the parts of in_proj's result in, out_proj's argument
        out."""
        raise NotImplementedError

    def mix_both(
        self,
        backward: MambaMixer,
        parts: tuple[Tensor, ...],
        *,
        mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
    ) -> Tensor:
        """This mixer's `mix` plus `backward`'s from right to left, of the same parts."""
        y = self.mix(parts, mask=mask, seq_ids=seq_ids)
        return y + backward.mix(parts, mask=mask, seq_ids=seq_ids, reverse=True)

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        seq_ids: Tensor | None = None,
        reverse: bool = False,
        state: MambaState | None = None,
    ) -> Tensor:
        check_tokens(x, self.dim)
        check_state(state, x.shape[0], reverse)
        if state is not None:
            claim("state", state, self)
        mask = check_mask(mask, (x.shape[0], x.shape[1]))
        parts = self.split(self.in_proj(x))
        y = self.mix(parts, mask=mask, seq_ids=seq_ids, reverse=reverse, state=state)
        return zero_padding(self.out_proj(y), mask, self.out_proj.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MambaMixer:
        kept = {id(t) for t in self._float32_tensors()}
        kept |= {id(t.grad) for t in self._float32_tensors() if t.is_leaf and t.grad is not None}

        def widened(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if id(tensor) in kept and out.is_floating_point() and out.dtype.itemsize < 4:
                return tensor.to(out.device, torch.float32)
            return out

        super()._apply(widened, recurse)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in self.float32_parameters:
            tensor = state_dict.get(prefix + name)
            if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                state_dict[prefix + name] = tensor.float()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _float32_tensors(self) -> Iterator[Tensor]:
        """Also where a parameter was made a buffer, pruned, or computed from others."""
        for path in self.float32_parameters:
            place, _, name = path.rpartition(".")
            module = self.get_submodule(place)
            for held in (module._parameters, module._buffers):
                yield from (t for t in map(held.get, (name, f"{name}_orig")) if t is not None)
            if nn.utils.parametrize.is_parametrized(module, name):
                parametrizations = module.get_submodule("parametrizations")
                yield from parametrizations.get_submodule(name).parameters(recurse=False)


def check_tokens(x: Tensor, dim: int) -> None:
    """Raise unless x is (B, T, dim)."""
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f"x must have shape (B, T, C) with C = {dim}, got {tuple(x.shape)}")


def check_state(state: MambaState | None, batch: int, reverse: bool) -> None:
    """Raise unless the state is empty or of this batch and direction."""
    if state is None:
        return
    if not isinstance(state, MambaState):
        raise ValueError(f"state must be a MambaState or None, got {type(state).__name__}")
    if state.scan is not None and state.scan.shape[0] != batch:
        raise ValueError(f"state holds a batch of {state.scan.shape[0]}, x one of {batch}")
    if state.reverse is not None and state.reverse != reverse:
        raise ValueError(f"state was filled with reverse={state.reverse}, got reverse={reverse}")


def check_sizes(**sizes: int) -> None:
    """Raise unless every size is an integer of at least 1."""
    for name, size in sizes.items():
        check_integer(name, size, least=1)


def zero_padding(y: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """`y` (B, T, C) with 0 at masked tokens, where only `bias` can have put something."""
    return y if mask is None or bias is None else y.masked_fill(~mask[..., None], 0)
