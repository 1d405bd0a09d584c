"""Config of MiniLLaDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from brickwork.assemblies.config import (
    Config,
    check_fraction,
    check_number,
    check_size,
    check_token_id,
    given,
)
from brickwork.kernels.checks import check_one_of


@dataclass(frozen=True, kw_only=True)
class MiniLLaDAConfig(Config):
    """The original's fields; `norm_eps` and the training objective's two are ours."""

    model_type: ClassVar[str] = "mini-llada"

    vocab_size: int = 52000
    mask_token_id: int = 4
    dim: int = 2048
    depth: int = 18
    head: int = 16
    intermediate_size: int = 5632
    max_seq_len: int = 2048
    norm_eps: float = 1.1920929e-07
    diffusion_eps: float | None = None
    weighting: Literal["elbo", "uniform"] = "elbo"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(vocab_size=self.vocab_size, dim=self.dim, depth=self.depth, head=self.head)
        check_size(intermediate_size=self.intermediate_size, max_seq_len=self.max_seq_len)
        check_number(0, norm_eps=self.norm_eps)
        check_token_id(self.vocab_size, mask_token_id=self.mask_token_id)
        check_fraction(**given(diffusion_eps=self.diffusion_eps))
        if self.dim % (2 * self.head):
            raise ValueError(
                f"dim must be an even multiple of head = {self.head} (RoPE turns pairs of "
                f"channels), got {self.dim}"
            )
        check_one_of("weighting", self.weighting, ("elbo", "uniform"))
