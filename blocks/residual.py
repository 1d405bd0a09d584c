"""A branch with its normalisation, added to its own input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Residual(nn.Module):
    """Add a branch to its input, normalised before, after, both, or not at all.

    `x + post_norm(branch(norm(x)))`, where a norm that is not given is left out: `norm` alone is
    the pre-norm block of most transformers, `post_norm` alone the one of OLMo-2 and FlexOlmo.

    Papers: He et al., *Deep Residual Learning for Image Recognition*, 2016; Xiong et al., *On Layer
    Normalization in the Transformer Architecture*, 2020.

    Arguments:
        branch: any module whose first argument is x (..., C) and whose result has the shape of x,
            or is a NamedTuple with such a field `y` (`MoE`'s).
        norm: module applied to the branch's input.
        post_norm: module applied to the branch's output.

    Called with x (..., C) and the branch's own keyword arguments, all of which go to the branch.
    Returns (..., C) in x's dtype; for a NamedTuple the same tuple, every field kept, with `y`
    replaced by the sum.

    Raises ValueError for a part that is not a module, and when the branch returns another shape or
    anything but a tensor or such a tuple.

    >>> import torch
    >>> feed_forward = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))
    >>> block = Residual(feed_forward, norm=nn.LayerNorm(4))
    >>> x = torch.randn(2, 4)
    >>> torch.equal(block(x), x + feed_forward(block.norm(x)))
    True
    """

    def __init__(
        self,
        branch: nn.Module,
        *,
        norm: nn.Module | None = None,
        post_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, part in (("branch", branch), ("norm", norm), ("post_norm", post_norm)):
            if not isinstance(part, nn.Module) and (part is not None or name == "branch"):
                raise ValueError(f"{name} must be a module, got {part!r}")
        self.norm = norm
        self.branch = branch
        self.post_norm = post_norm

    def reset_parameters(self) -> None:
        """Reset the branch and the norms, each by its own rule."""
        for part in self.children():
            _reset(part)

    def forward(self, x: Tensor, **branch_arguments: Any) -> Any:
        output = self.branch(x if self.norm is None else self.norm(x), **branch_arguments)
        if isinstance(output, Tensor):
            return self._add(x, output)
        if isinstance(output, tuple) and "y" in getattr(output, "_fields", ()):
            return output._replace(y=self._add(x, output.y))  # type: ignore[attr-defined]
        raise ValueError(
            f"branch must return a tensor or a NamedTuple with a field y, got {type(output)}"
        )

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        if self.post_norm is not None:
            y = self.post_norm(y)
        if y.shape != x.shape:
            raise ValueError(
                f"branch must return the shape of x, {tuple(x.shape)}, got {tuple(y.shape)}"
            )
        return (x + y).to(x.dtype)


def _reset(module: nn.Module) -> None:
    """Call `reset_parameters` of `module`, or of the modules in it if it has none."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    if next(module.parameters(recurse=False), None) is not None:
        raise ValueError(f"{type(module).__name__} has parameters but no reset_parameters()")
    for child in module.children():
        _reset(child)
