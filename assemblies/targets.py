"""What an assembly is trained on: which tokens may be masked, and next-token targets."""

from __future__ import annotations

import torch
from torch import Tensor

from brickwork.assemblies.inputs import check_mask
from brickwork.blocks.diffusion_canvas import free_to_look_at, sequence_index
from brickwork.blocks.masked_diffusion import MaskedDiffusion, Noise
from brickwork.kernels.checks import check_floating, check_shapes


def maskable_tokens(labels: Tensor, input_ids: Tensor) -> Tensor:
    """(B, T), True where a label is not -100: the tokens that noise may mask.

    Raises:
        ValueError: a wrong shape or dtype, or (looked at on the CPU only) labels that are neither
            -100 nor the token of input_ids, which is what is predicted.
    """
    check_shapes(input_ids=(input_ids, "B T"), labels=(labels, "B T"))
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels must be int64 or int32, got {labels.dtype}")
    maskable = labels != -100
    if free_to_look_at(labels) and free_to_look_at(input_ids):
        wrong = maskable & (labels != input_ids)
        if wrong.any():
            raise ValueError(
                f"labels must be -100 or the token of input_ids, got {labels[wrong][0]} for token "
                f"{input_ids[wrong][0]} at {tuple(wrong.nonzero()[0].tolist())}"
            )
    return maskable


def check_noise(noise: Noise, input_ids: Tensor, maskable: Tensor) -> Noise:
    """`noise` of `input_ids` (B, T), its p cut to the maskable tokens.

    Raises:
        ValueError: not a Noise, a wrong shape or dtype, or (looked at on the CPU only) a masked
            token that is not maskable or whose p is 0.
    """
    if not isinstance(noise, Noise):
        raise ValueError(f"noise must be a Noise, got {type(noise).__name__}")
    shapes = {f"noise.{name}": (tensor, "B T") for name, tensor in noise._asdict().items()}
    check_shapes(input_ids=(input_ids, "B T"), **shapes)
    if noise.mask.dtype != torch.bool:
        raise ValueError(f"noise.mask must be bool, got {noise.mask.dtype}")
    check_floating(**{"noise.p": noise.p})
    if free_to_look_at(noise.mask) and free_to_look_at(maskable) and (noise.mask & ~maskable).any():
        raise ValueError(
            "noise.mask must be False where labels are -100 or attention_mask is 0, got True at "
            f"{tuple((noise.mask & ~maskable).nonzero()[0].tolist())}"
        )
    if (
        free_to_look_at(noise.mask)
        and free_to_look_at(noise.p)
        and (noise.p[noise.mask] <= 0).any()
    ):
        raise ValueError("noise.p must be above 0 where noise.mask is True")
    return noise._replace(mask=noise.mask & maskable, p=noise.p.masked_fill(~maskable, 0))


def noised(
    diffusion: MaskedDiffusion,
    input_ids: Tensor | None,
    labels: Tensor | None,
    *,
    attention_mask: Tensor | None,
    seq_ids: Tensor | None,
    noise: Noise | None,
    generator: torch.Generator | None,
) -> tuple[Noise | None, Tensor | None]:
    """The noise to score, drawn or given, and the index (B, T) of each token's packed sequence;
    without labels both are None.

    Raises:
        ValueError: `noise` or `generator` without labels, labels without ids, both of the former,
            or noise that does not fit.
    """
    if labels is None:
        if noise is not None or generator is not None:
            which = "generator" if noise is None else "noise"
            raise ValueError(f"{which} needs labels: without them input_ids are taken as they are")
        return None, None
    if input_ids is None:
        raise ValueError("labels need input_ids: they are what is masked and predicted")
    maskable = maskable_tokens(labels, input_ids)
    mask = check_mask("attention_mask", attention_mask, input_ids)
    sequences = sequence_index(seq_ids, input_ids, mask)
    maskable = maskable if mask is None else maskable & mask
    if noise is None:
        noise = diffusion.noise(input_ids, maskable, seq_ids=sequences, generator=generator)
    elif generator is not None:
        raise ValueError("generator must be None with noise: nothing is drawn")
    return check_noise(noise, input_ids, maskable), sequences


def next_token_labels(
    labels: Tensor, *, mask: Tensor | None = None, seq_ids: Tensor | None = None
) -> Tensor:
    """The target of every position: the next position's label, -100 where there is none to score.

    Arguments:
        labels: (B, T), -100 where the token is not to be predicted.
        mask: (B, T), True for real tokens; nothing is predicted from or at padding.
        seq_ids: (B, T); nothing is predicted across the border of two packed sequences.

    Returns:
        (B, T).

    >>> next_token_labels(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    if labels.shape[1] == 0:
        return labels
    ahead = labels[:, 1:]
    if mask is not None:
        ahead = ahead.masked_fill(~(mask[:, :-1] & mask[:, 1:]), -100)
    if seq_ids is not None:
        ahead = ahead.masked_fill(seq_ids[:, :-1] != seq_ids[:, 1:], -100)
    return torch.nn.functional.pad(ahead, (0, 1), value=-100)
