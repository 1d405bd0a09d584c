"""triton-viz's sanitizer for kernels whose addresses depend on data.

It keeps program ids and loop counters as symbols and cannot follow a value loaded in a loop, or a
branch on one. Here every program and every iteration is checked by itself, with the numbers it has;
lanes stay symbols. Patches of triton-viz 3.0, by `concretely()`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime.interpreter import TensorHandle
from triton_viz.clients.sanitizer import sanitizer
from z3 import IntVal


def concretely() -> None:
    """Patch the sanitizer, in this process for good."""
    sanitizer.PidSymbolicExpr._to_z3_impl = lambda self: (IntVal(_number(self)), None)
    sanitizer.SymbolicExprDataWrapper.__bool__ = lambda self: _true(self.symbolic_expr)
    sanitizer.ExpandDimsSymbolicExpr.concretize = lambda self: self.concrete_fn(
        self.arg.concretize(), self.axis.to_py()
    )
    binary = sanitizer.BinarySymbolicExpr.concretize

    def concretize(self: Any) -> Any:
        if self.op != "idiv":
            return binary(self)
        return self.concrete_fn(self.lhs.concretize(), self.rhs.concretize())

    sanitizer.BinarySymbolicExpr.concretize = concretize
    sanitizer.WhereSymbolicExpr.concretize = lambda self: self.concrete_fn(
        self.cond.concretize(), self.lhs.concretize(), self.rhs.concretize(), np.where
    )
    register = sanitizer.SymbolicSanitizer.register_for_loop_callback

    def register_for_loop_callback(self: Any) -> Any:
        callbacks = register(self)
        symbolic = callbacks.range_wrapper_factory

        def concrete(*args: Any, **kwargs: Any) -> Any:
            found = symbolic(*args, **kwargs)
            return found if found is None else range(found.start, found.stop, found.step)

        callbacks.range_wrapper_factory = concrete
        callbacks.loop_iter_overrider = None
        return callbacks

    sanitizer.SymbolicSanitizer.register_for_loop_callback = register_for_loop_callback


def _number(expression: Any) -> int:
    return int(expression.concretize().data.item())


def _true(expression: Any) -> bool:
    """As the interpreter has it: only a single number can be false."""
    value = expression.to_py() if expression.op == "const" else expression.concretize()
    if isinstance(value, TensorHandle):
        return value.data.size != 1 or bool(value.data.item())
    return bool(value)
