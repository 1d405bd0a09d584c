"""What the tests share: tolerances, comparison of values and gradients, goldens, tensors.

Tolerances are derived, here and nowhere else. Two computations of a sum of `terms` products in a
compute type of machine epsilon e differ, for rounding errors that behave like a random walk, by
about √terms · e times the size of the terms; `SAFETY` covers both sides and the few operations
around the sum. A result stored in a narrower type adds one rounding on each side: 2 ulp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAFETY = 8
GOLDEN_FOLDER = Path(__file__).parent / "golden"

# Agreement with the recorded originals in float32: (absolute, relative). Both sides are float32
# programs of the same depth with other summation orders; `tests/golden/README.md` has the origin.
GOLDEN_TOLERANCES = {
    "router_logits": (1e-4, 1e-5),
    "hidden": (5e-5, 1e-5),
    "logits": (2e-5, 1e-5),
    "loss": (5e-6, 1e-5),
    "gradient": (2e-5, 1e-4),
}


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    terms: int = 1,
    compute: torch.dtype | None = None,
    scale: float | None = None,
    name: str = "result",
) -> None:
    """Assert equality within the derived tolerance; NaN or Inf on either side never passes.

    `terms`: how many terms the longest sum behind an entry has. `compute`: the type summed in
    (default: float32, or float64 if actual is). `scale`: the size of the terms (default: the
    largest magnitude of `expected`).
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
    stored = actual.dtype
    compute = compute or (torch.float64 if stored == torch.float64 else torch.float32)
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.isfinite().all(), f"{name} is not finite"
    assert expected.isfinite().all(), f"{name}: the expected values are not finite"
    if expected.numel() == 0:
        return
    size = expected.abs().max().item() if scale is None else scale
    atol = SAFETY * math.sqrt(terms) * torch.finfo(compute).eps * size
    if stored != compute:
        atol += 2 * torch.finfo(stored).smallest_normal * torch.finfo(stored).eps
    rtol = 2 * torch.finfo(stored).eps
    error = (actual - expected).abs() - rtol * expected.abs()
    worst = error.max().item()
    assert worst <= atol, (
        f"{name}: off by {worst:.3e} beyond {rtol:.1e} relative; allowed {atol:.3e}"
    )


def gradients(
    function: Callable[..., object],
    inputs: Sequence[Tensor | None],
    *,
    seed: int = 1,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs of `function(*inputs)` and the gradient of every floating input.

    The upstream gradients are random and fixed by `seed`, so that two functions can be compared.
    """
    leaves = [
        t.detach().clone().requires_grad_(t.is_floating_point()) if isinstance(t, Tensor) else t
        for t in inputs
    ]
    outputs = _tensors(function(*leaves))
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    pairs = [(o, u) for o, u in zip(outputs, upstream) if o.requires_grad]
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], wanted, [u for _, u in pairs], allow_unused=True
    )
    by_leaf = {id(leaf): grad for leaf, grad in zip(wanted, found)}
    return outputs, [by_leaf.get(id(t)) for t in leaves]


def assert_same_function(
    actual: Callable[..., object],
    expected: Callable[..., object],
    inputs: Sequence[Tensor | None],
    *,
    terms: int = 1,
    compute: torch.dtype | None = None,
    one_scale: bool = False,
) -> None:
    """Assert that two functions agree in every output and in the gradient of every input.

    `one_scale`: where all are sums over the same products, so that a small one may be the
    difference of large terms, the size of the terms is the largest magnitude among all of them.
    """
    values, grads = gradients(actual, inputs)
    expected_values, expected_grads = gradients(expected, inputs)
    assert len(values) == len(expected_values)
    scale = None
    if one_scale:
        every = [t for t in (*expected_values, *expected_grads) if t is not None and t.numel()]
        scale = max((t.abs().max().item() for t in every), default=None)
    for i, (a, e) in enumerate(zip(values, expected_values)):
        assert a.dtype == e.dtype, f"output {i}: {a.dtype} against {e.dtype}"
        assert_close(a, e, terms=terms, compute=compute, scale=scale, name=f"output {i}")
    for i, (a, e) in enumerate(zip(grads, expected_grads)):
        assert (a is None) == (e is None), f"gradient of input {i}: one side has none"
        if a is not None and e is not None:
            name = f"gradient of input {i}"
            assert_close(a, e, terms=terms, compute=compute, scale=scale, name=name)


def gradcheck(function: Callable[..., object], inputs: Sequence[Tensor | None]) -> None:
    """`torch.autograd.gradcheck` and `gradgradcheck` in float64, inputs made double leaves."""
    leaves = [
        t.detach().double().requires_grad_(True)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=False)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def load_golden(name: str) -> tuple[dict[str, Tensor], dict]:
    """Tensors and config of one golden file."""
    from safetensors import safe_open

    with safe_open(str(GOLDEN_FOLDER / f"{name}.safetensors"), framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    return tensors, config


def golden_names(prefix: str) -> list[str]:
    """Names of the golden files that start with `prefix`."""
    names = sorted(path.stem for path in GOLDEN_FOLDER.glob(f"{prefix}*.safetensors"))
    assert names, f"no golden files for {prefix}"
    return names


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries under `prefix`, without it."""
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}


def assert_golden(actual: Tensor, expected: Tensor, kind: str, name: str = "") -> None:
    """Assert agreement with a recorded tensor within `GOLDEN_TOLERANCES[kind]`."""
    atol, rtol = GOLDEN_TOLERANCES[kind]
    torch.testing.assert_close(
        actual.detach(), expected, atol=atol, rtol=rtol, msg=lambda text: f"{kind} {name}: {text}"
    )


def golden_model(
    model_class: Any, config_class: Any, name: str, **ours: object
) -> tuple[Any, dict[str, Tensor]]:
    """A model with the weights of one golden file, and the file's tensors; `ours` are config fields
    that the originals lack."""
    tensors, config = load_golden(name)
    model = model_class(config_class.from_dict(config | ours))
    model.load_original_state_dict(part(tensors, "state."))
    return model, tensors


def assert_golden_gradients(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Assert that every parameter has a gradient and that it agrees with the recorded one."""
    from brickwork.assemblies.checkpoint import to_original

    ours = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in ours.values())
    found = to_original(ours, model.table)
    expected = part(tensors, "grad.")
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        assert_golden(found[name], grad, "gradient", name)


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, Iterable)
    return [r for r in result if isinstance(r, Tensor)]
