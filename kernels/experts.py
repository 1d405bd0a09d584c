"""A mixture of SwiGLU experts: every token through the experts chosen for it, weighted.

S tokens, C width, F hidden width, E experts, K chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from brickwork.kernels.backend import autocast_off, choose, compute_dtype, why_not_opaque
from brickwork.kernels.checks import check_floating, check_shapes, values_readable
from brickwork.kernels.swiglu import swiglu_reference

WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
WIDEST_IN_TRITON = 2**23  # C or 2F: offsets within a tile of 128 rows fit into 32 bits


def experts(
    x_SC: Tensor,
    gate_up_EFC: Tensor,
    down_ECF: Tensor,
    indices_SK: Tensor,
    weights_SK: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Send each token through its K experts and add up what they return, weighted.

    `y_s = Σ_k w_sk · down_e (silu(gate_e x_s) · up_e x_s)` with `e = indices_sk`. No token is
    dropped, an expert without tokens gets a zero gradient, and an expert that is not chosen for a
    token never touches it, whatever it would have computed.

    `"torch"`, the reference, runs every expert over all tokens in float32 (float64 if any argument
    is) and masks what was not chosen: E/K times the work, no shape that depends on the routing, so
    that it can be exported. `"grouped"` sorts the tokens by expert and computes only what was
    chosen. Its products take the widest dtype of x and the experts - under autocast that of
    autocast - and the weighted sum float32; it can be differentiated once. `"triton"` does the same
    in kernels of its own, on a GPU, without float64; float32 is multiplied as such unless
    `torch.backends.cuda.matmul` allows TF32. `"cpu"` does it in compiled kernels, in float32
    (float64 if any argument is); what a token gets then does not depend on the other tokens, to the
    last bit. `auto` takes `"triton"`; on a CPU with AVX2 `"cpu"` where the products are float32
    or float64; else `"grouped"`; and in `torch.export`, `torch.jit.trace` and
    `torch.func` transforms the reference.

    Paper: Shazeer et al., *Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer*, 2017.

    Arguments:
        x_SC: (S, C), floating point; S may be 0.
        gate_up_EFC: (E, 2F, C), the rows of the gate first, then those of up.
        down_ECF: (E, C, F).
        indices_SK: (S, K), int32 or int64, in [0, E); an expert may occur twice in a row.
        weights_SK: (S, K), floating point.
        backend: see `brickwork.kernels.backend`.

    Returns:
        (S, C) in x's dtype, under autocast too.

    Raises:
        ValueError: a wrong shape or dtype; an index out of range (looked at on the CPU only, and
            not while tracing).
        BackendUnavailable: a backend was named that cannot run here.

    >>> x = torch.tensor([[2.0], [3.0]])
    >>> gate_up = torch.tensor([[[50.0], [1.0]], [[50.0], [10.0]]])  # gate 50x, up x or 10x
    >>> down = torch.tensor([[[0.01]], [[0.01]]])
    >>> experts(x, gate_up, down, torch.tensor([[0], [1]]), torch.ones(2, 1))
    tensor([[ 2.],
            [45.]])
    """
    check_floating(x=x_SC, gate_up=gate_up_EFC, down=down_ECF, weights=weights_SK)
    sizes = check_shapes(
        x=(x_SC, "S C"),
        gate_up=(gate_up_EFC, "E 2F C"),
        down=(down_ECF, "E C F"),
        indices=(indices_SK, "S K"),
        weights=(weights_SK, "S K"),
    )
    if sizes["2F"] != 2 * sizes["F"]:
        raise ValueError(
            f"gate_up must have twice as many rows as down has columns, {2 * sizes['F']}, "
            f"got {sizes['2F']}"
        )
    check_expert_indices("indices", indices_SK, sizes["E"])
    tensors = (x_SC, gate_up_EFC, down_ECF, indices_SK, weights_SK)

    def triton() -> str | None:
        return _why_not_triton(*tensors)

    def cpu() -> str | None:
        return _why_not_cpu(x_SC)

    if _compiled_is_faster(x_SC, gate_up_EFC, down_ECF, weights_SK):
        chosen = choose("experts", backend, triton=triton, cpu=cpu, grouped=why_not_opaque)
    else:
        chosen = choose("experts", backend, triton=triton, grouped=why_not_opaque, cpu=cpu)
    if chosen == "triton":
        from brickwork.kernels.experts_triton import experts_triton

        return experts_triton(*tensors)
    if chosen == "cpu":
        from brickwork.kernels.experts_cpu import experts_cpu

        return experts_cpu(*tensors)
    if chosen == "grouped":
        from brickwork.kernels.experts_grouped import experts_grouped

        return experts_grouped(*tensors)
    return experts_reference(*tensors)


def experts_reference(
    x_SC: Tensor, gate_up_EFC: Tensor, down_ECF: Tensor, indices_SK: Tensor, weights_SK: Tensor
) -> Tensor:
    """The specification of `experts`."""
    dtype = compute_dtype(x_SC, gate_up_EFC, down_ECF, weights_SK)
    with autocast_off(x_SC):
        x, weights = x_SC.to(dtype), weights_SK.to(dtype)
        y = torch.zeros_like(x)
        for e, (gate_up, down) in enumerate(zip(gate_up_EFC, down_ECF)):
            chosen = indices_SK == e
            mine = chosen.any(-1, keepdim=True)
            weight = torch.where(chosen, weights, 0).sum(-1, keepdim=True)
            # Masked before and after: 0 times what another token makes of this expert may be NaN.
            gate, up = (torch.where(mine, x, 0) @ gate_up.to(dtype).mT).chunk(2, -1)
            out = swiglu_reference(gate, up) @ down.to(dtype).mT
            y = y + weight * torch.where(mine, out, 0)
        return y.to(x_SC.dtype)


def _why_not_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor
) -> str | None:
    from brickwork.kernels.triton_support import why_not

    widest = max(gate_up.shape[1:])
    if widest > WIDEST_IN_TRITON:
        return f"it takes widths up to {WIDEST_IN_TRITON}, got {widest}"
    return why_not(x, gate_up, down, weights)


def _compiled_is_faster(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> bool:
    """Whether the compiled kernels multiply no wider dtype than the products have to take, in
    vectors as wide as those of PyTorch's libraries."""
    as_wide = product_dtype(x, gate_up, down) == compute_dtype(x, gate_up, down, weights)
    return as_wide and WIDE_VECTORS


def _why_not_cpu(x: Tensor) -> str | None:
    if x.device.type != "cpu":  # the module need not be imported to know this
        return f"it takes CPU tensors, got {x.device.type}"
    from brickwork.kernels.experts_cpu import unavailable_here

    return why_not_opaque() or unavailable_here()


def product_dtype(x: Tensor, gate_up: Tensor, down: Tensor) -> torch.dtype:
    """What the products take: the widest dtype of their operands, under autocast that of autocast
    (but float64 stays)."""
    dtype = torch.promote_types(x.dtype, torch.promote_types(gate_up.dtype, down.dtype))
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype


def check_expert_indices(argument: str, indices: Tensor, num_experts: int) -> None:
    """Raise unless `indices` are int32 or int64 and, on the CPU in eager mode, in [0, E)."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{argument} must be int32 or int64, got {indices.dtype}")
    if indices.numel() == 0 or indices.device.type != "cpu" or not values_readable(indices):
        return
    least, most = (int(bound) for bound in torch.aminmax(indices))
    if least < 0 or most >= num_experts:
        wrong = least if least < 0 else most
        raise ValueError(f"{argument} must be in [0, {num_experts}), the experts, got {wrong}")
