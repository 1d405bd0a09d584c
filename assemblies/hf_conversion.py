"""The originals' tensor names and ours, as transformers wants them: patterns that it applies to
single names, one set for each model. `Assembly.table` says the same for whole models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

Tensors = dict[str, Any]


class SplitRows(ConversionOps):
    """One tensor into the parameters whose rows it holds under one another."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        **given: Any,
    ) -> Tensors:
        (tensor,) = map(_only, input_dict.values())
        full_name, model, first = given["full_layer_name"], given["model"], target_patterns[0]
        names = [full_name.replace(first, target) for target in target_patterns]
        rows = [model.get_parameter(name).shape[0] for name in names]
        pieces = [piece.contiguous() for piece in tensor.split(rows)]
        return dict(zip(target_patterns, pieces, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(0)


class SwapHalves(ConversionOps):
    """The first half of the rows after the second."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        **given: Any,
    ) -> Tensors:
        (tensor,) = map(_only, input_dict.values())
        return {target_patterns[0]: tensor.roll(tensor.shape[0] // 2, 0)}

    @property
    def reverse_op(self) -> ConversionOps:
        return SwapHalves()


class Tied(ConversionOps):
    """Two names for one parameter, where the config ties the two directions; otherwise for two.

    A file may hold either name, or both if they are equal.
    """

    @torch.no_grad()
    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        **given: Any,
    ) -> Tensors:
        config = given["config"]
        found = {name: _only(tensors) for name, tensors in input_dict.items()}
        forward, *_rest = target_patterns
        if not (config.bidirectional and config.bidirectional_weight_tie):
            if forward not in found:
                raise ValueError(f"{forward} is missing, and {[*found]} is not tied to it")
            return found
        tensors = list(found.values())
        if not all(_equal(tensors[0], other) for other in tensors[1:]):
            raise ValueError(f"{' and '.join(found)} must be one tensor, but they differ")
        return {forward: found.get(forward, tensors[0])}

    @property
    def reverse_op(self) -> ConversionOps:
        return Tied()


def _only(tensors: Any) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    (tensor,) = tensors
    return tensor


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


_EXPERT = "mlp.experts.*."


def _rish() -> list[Any]:
    return [
        WeightRenaming(r"\.self_attn\.", r"\.attention\."),
        WeightRenaming(r"\.mlp\.gate\.", r"\.moe\.router\."),
        WeightConverter(
            [_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"],
            "moe.gate_up",
            [MergeModulelist(0), Concatenate(1)],
        ),
        WeightConverter(_EXPERT + "down_proj.weight", "moe.down", [MergeModulelist(0)]),
    ]


def _mini_llada() -> list[Any]:
    return [
        WeightRenaming(r"^network\.head\.", r"^head\."),
        WeightRenaming(r"\.mha\.", r"\.attention\."),
        WeightRenaming(r"\.gate_up_proj\.", r"\.mlp\.gate_up\."),
        WeightRenaming(r"\.down_proj\.", r"\.mlp\.down\."),
    ]


def _lc_plm() -> list[Any]:
    kinds = ("weight", "bias")
    return [
        WeightRenaming(r"^bimamba\.backbone\.", r"^backbone\."),
        WeightRenaming(r"\.mlp\.fc2\.", r"\.mlp\.down\."),
        WeightRenaming(r"\.mixer\.out_proj\.", r"\.mixer\.o_proj\."),
        WeightConverter("mlp.fc1.weight", "mlp.gate_up.weight", [SwapHalves()]),
        *(
            WeightConverter(
                f"mixer.in_proj.{kind}", [f"mixer.{x}_proj.{kind}" for x in "qkv"], [SplitRows()]
            )
            for kind in kinds
        ),
        *(
            WeightConverter(
                [f"mixer.mamba_{side}.{projection}.{kind}" for side in ("fwd", "rev")],
                f"mixer.mamba_fwd.{projection}.{kind}",
                [Tied()],
            )
            for projection in ("in_proj", "out_proj")
            for kind in kinds
        ),
    ]


def register_conversions() -> None:
    """Tell transformers how the originals' files and our parameters relate."""
    for model_type, table in (
        ("rish_ai", _rish()),
        ("mini-llada", _mini_llada()),
        ("lc_plm", _lc_plm()),
    ):
        register_checkpoint_conversion_mapping(model_type, table, overwrite=True)
