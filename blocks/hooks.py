"""Whether a module must be called, because more would run than its class's forward."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks watch the module, or all modules, or its forward was replaced.

    >>> layer = nn.Linear(2, 2)
    >>> has_hooks(layer)
    False
    >>> _ = layer.register_forward_hook(print)
    >>> has_hooks(layer)
    True
    """
    everywhere = nn.modules.module
    return bool(
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )
