"""How the kernels of `ssd_scan_triton` are launched: tiles, grids, tensors in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brickwork.kernels.ssd_scan_triton_backward import (
    ssd_input_gradients,
    ssd_pair_gradients,
    ssd_step_gradients,
    ssd_vector_gradients,
)
from brickwork.kernels.ssd_scan_triton_forward import (
    ssd_carry,
    ssd_decays,
    ssd_outputs,
    ssd_pairs,
    ssd_states,
)
from brickwork.kernels.triton_support import (
    cdiv,
    launch_options,
    multiprocessors,
    next_power_of_2,
)

LARGEST_CHUNK = 256
_CARRY_BLOCK = 1024


def default_chunk(N: int) -> int:
    """Twice the states: the states between chunks then take as many bytes as x in float32."""
    return min(max(64, 2 * next_power_of_2(max(N, 1))), LARGEST_CHUNK)


def precision(*dtypes: torch.dtype) -> str:
    """How matrix products are taken: float16 in TF32, which has its digits and never overflows."""
    if set(dtypes) == {torch.bfloat16}:
        return "bf16"
    if torch.float32 not in dtypes or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def tiles_of(H: int, P: int, N: int, chunk: int, how: str) -> dict[str, Any]:
    """The kernels' constants: Q rows for the tokens of a chunk, and tiles of the products."""
    Q = max(16, next_power_of_2(chunk))
    most = 32 if how == "ieee" else 64
    return {
        "Q": Q,
        "ROWS": min(Q, most),
        "BP": min(max(16, next_power_of_2(max(P, 1))), most),
        "BN": min(max(16, next_power_of_2(max(N, 1))), most),
        "HEADS": min(next_power_of_2(max(H, 1)), max(1, 512 // Q)),
        "BLOCK": _CARRY_BLOCK,
        "PRECISION": how,
    }


def resources_of(kernel: str, precision: str) -> tuple[int, int, int | None]:
    """Warps, stages of the loops and the limit of registers."""
    if kernel in ("ssd_decays", "ssd_carry", "ssd_step_gradients"):
        return 4, 1, None
    return 8, 1 if kernel == "ssd_states" and precision == "tf32" else 2, 255


def _carries(programs: int, chunks: int, processors: int) -> bool:
    """Whether programs walk from chunk to chunk themselves: enough of them, or few chunks."""
    return programs >= 2 * processors or chunks <= 4


def _splits(programs: int, heads: int, processors: int) -> int:
    """Into how many parts a group's heads are split, so that every processor has a program."""
    return max(1, min(heads, cdiv(2 * processors, programs)))


class Scan:
    """One call's sizes and tensors, by the names that the kernels give their arguments."""

    def __init__(
        self,
        x: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        bias: Tensor | None,
        initial: Tensor | None,
        mask: Tensor | None,
        starts: Tensor | None,
        softplus: bool,
        reverse: bool,
        chunk: int,
    ) -> None:
        self.batch, self.T, self.H, self.P = x.shape
        self.G, self.N = B.shape[2:]
        self.reverse = reverse
        chunk = min(chunk, self.T)
        self.chunks = cdiv(self.T, chunk)
        tiles = tiles_of(self.H, self.P, self.N, chunk, precision(x.dtype, B.dtype, C.dtype))
        self.Q = tiles["Q"]
        self.parts_p = cdiv(self.P, tiles["BP"])
        self.parts_n = max(1, cdiv(self.N, tiles["BN"]))
        self.parts_q, self.blocks_h = self.Q // tiles["ROWS"], cdiv(self.H, tiles["HEADS"])
        self.processors = multiprocessors(x)
        self.x, self.B, self.C = dense_rows(x), dense_rows(B), dense_rows(C)
        self.initial = None if initial is None else initial.float().contiguous()
        self.pool: dict[str, Any] = {
            **tiles,
            "T": self.T,
            "H": self.H,
            "P": self.P,
            "N": self.N,
            "G": self.G,
            "K": self.H // self.G,
            "size": self.P * self.N,
            "chunks": self.chunks,
            "chunk": chunk,
            "origin": self.T - 1 if reverse else 0,
            "SOFTPLUS": softplus,
            "PACKED": mask is not None or starts is not None,
            "A": A.contiguous(),
            "bias": None if bias is None else bias.contiguous(),
            "D": D,
            "D_h": 0 if D is None else D.stride(0),
            "D_p": 0 if D is None or D.dim() == 1 else D.stride(1),
            **self.named(delta=delta, mask=_bytes(mask), starts=_bytes(starts)),
            **self.named(x=self.x, B=self.B, C=self.C, z=None if z is None else dense_rows(z)),
        }
        self._prepare()

    def _prepare(self) -> None:
        """Step sizes, their running sums, and C Bᵀ."""
        B, H, chunks, Q = self.batch, self.H, self.chunks, self.Q
        pool = self.pool
        for name in ("steps", "high", "low"):
            pool[name] = self.space(B, H, chunks, Q)
        pool["through"] = self.space(B, H, chunks)
        pool["pairs"] = self.space(B, chunks, self.G, Q, Q)
        packed = pool["PACKED"]
        pool["past"] = self.space(B, chunks, Q, dtype=torch.int32) if packed else None
        pool["opens"] = self.space(B, chunks, dtype=torch.int32) if packed else None
        self.launch(ssd_decays, (B * chunks, self.blocks_h))
        self.launch(ssd_pairs, (B * chunks * self.G, self.parts_q, self.parts_q))

    def named(self, **tensors: Tensor | None) -> dict[str, Any]:
        """Tensors (B, T, ...) with their strides in scan order."""
        named: dict[str, Any] = {}
        for name, tensor in tensors.items():
            strides = [0, 0, 0] if tensor is None else [*tensor.stride(), 0]
            if self.reverse:
                strides[1] = -strides[1]
            named[name] = tensor
            named |= {f"{name}_{axis}": strides[i] for i, axis in enumerate("bth")}
            named[f"{name}_g"] = strides[2]
        return named

    def space(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def launch(self, kernel: Any, grid: tuple[int, ...], **given: Any) -> None:
        if 0 not in grid:
            values = self.pool | given
            warps, stages, registers = resources_of(kernel.__name__, values["PRECISION"])
            options = launch_options(warps, stages=stages, registers=registers)
            kernel[grid](**{name: values[name] for name in kernel.arg_names}, **options)

    def states(
        self, values: Tensor, vectors: Tensor, initial: Tensor | None, entered: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`states`, `final` and `inner` of `ssd_states`; backward if `entered` is given."""
        B, H, chunks = self.batch, self.H, self.chunks
        parts, blocks = self.parts_p * self.parts_n, cdiv(self.P * self.N, _CARRY_BLOCK)
        carry = _carries(B * H * parts, chunks, self.processors)
        given = self.named(values=values, vectors=vectors)
        given |= {"initial": initial, "entered": entered, "CARRY": carry}
        given["states"] = self.space(B, chunks, H, self.P, self.N)
        given["final"] = self.space(B, H, self.P, self.N)
        given["BACKWARD"] = entered is not None
        given["inner"] = self.space(B, H, chunks, parts if carry else blocks)
        grid = (B * H * (1 if carry else chunks), self.parts_p, self.parts_n)
        self.launch(ssd_states, grid, **given)
        if not carry:
            self.launch(ssd_carry, (B * H, blocks), **given)
        return given["states"], given["final"], given["inner"]

    def outputs(self, states: Tensor, y: Tensor, dy: Tensor | None, dz: Tensor | None) -> None:
        """y; or, given dy, the gradients of z and (as `y`) of the result before the gate."""
        grid = (self.batch * self.chunks * self.parts_q * self.H, self.parts_p)
        given = {**self.named(y=y, dy=dy), "dz": None if dz is None else self.named(dz=dz)["dz"]}
        self.launch(ssd_outputs, grid, states=states, **given)

    def input_gradients(
        self, dy: Tensor, carries: Tensor, dx: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Fill dx; what `ssd_step_gradients` takes from here, and the shares (…, H, P) in dD."""
        B, H, chunks, Q = self.batch, self.H, self.chunks, self.Q
        tiles = B * chunks * self.parts_q
        partial = {
            "direct": self.space(B, H, chunks, self.parts_p, Q),
            "leaving": self.space(B, H, chunks, self.parts_p, Q),
        }
        dD = None if self.pool["D"] is None else self.space(tiles, H, self.P)
        given = {**self.named(dy=dy, dx=dx), **partial, "carries": carries, "dD": dD}
        self.launch(ssd_input_gradients, (tiles * H, self.parts_p), **given)
        return partial, dD

    def pair_gradients(self, dy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient of C Bᵀ, and `right` and `below` of `ssd_pair_gradients`."""
        B, chunks, Q, parts = self.batch, self.chunks, self.Q, self.parts_q
        programs = B * chunks * self.G
        K = self.H // self.G
        splits = _splits(programs * parts * (parts + 1) // 2, K, self.processors)
        dpairs = self.space(splits, B, chunks, self.G, Q, Q)
        partial = {name: self.space(B, self.H, chunks, parts, Q) for name in ("right", "below")}
        given = {**self.named(dy=dy), **partial, "splits": splits, "dpairs": dpairs}
        self.launch(ssd_pair_gradients, (splits * programs, parts, parts), **given)
        # not a sum over Q: above the diagonal whole tiles are uninitialised, and stay unread
        return (dpairs[0] if splits == 1 else dpairs.sum(0)), partial

    def vector_gradients(
        self, values: Tensor, own: Tensor, other: Tensor, dpairs: Tensor, states: Tensor, of_C: bool
    ) -> tuple[Tensor, Tensor]:
        """The gradient of `own`, which is C or B, and `entering` of `ssd_vector_gradients`."""
        B, chunks = self.batch, self.chunks
        programs = B * chunks * self.G
        splits = _splits(programs * self.parts_q * self.parts_n, self.H // self.G, self.processors)
        dtype = own.dtype if splits == 1 else torch.float32
        out = self.space(splits, *own.shape, dtype=dtype)
        entering = self.space(B, self.H, chunks, self.parts_n, self.Q)
        given = self.named(values=values, own=own, other=other, out=out[0])
        given |= {"dpairs": dpairs, "states": states, "entering": entering, "OF_C": of_C}
        given |= {"splits": splits, "out": out, "out_s": out.stride(0)}
        grid = (splits * programs, self.parts_q, self.parts_n)
        self.launch(ssd_vector_gradients, grid, **given)
        return (out[0] if splits == 1 else out.sum(0).to(own.dtype)), entering

    def step_gradients(self, ddelta: Tensor, partial: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Fill ddelta; the gradients of A and of the bias."""
        shares = self.space(2, self.batch, self.chunks, self.H)
        given = self.named(ddelta=ddelta)
        given |= {**partial, "dA": shares[0], "dbias": shares[1]}
        given |= {"parts_p": self.parts_p, "parts_n": self.parts_n}
        given["parts_inner"] = partial["inner"].shape[3]
        grid = (self.batch * self.chunks, self.blocks_h)
        self.launch(ssd_step_gradients, grid, **given)
        dA, dbias = shares.sum((1, 2))
        return dA, dbias


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last axis is not dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
