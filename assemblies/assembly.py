"""What the three assemblies share: their checkpoints, their inputs, and checkpointed layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brickwork.assemblies.checkpoint import Rename, from_original, original_name, to_original
from brickwork.assemblies.checkpoint_files import load_config, open_checkpoint, save_checkpoint
from brickwork.assemblies.config import Config

AssemblyType = TypeVar("AssemblyType", bound="Assembly")


class Assembly(nn.Module):
    """Base of the assemblies: an `nn.Module` that loads and saves an original's checkpoint.

    A subclass names its config and its rename table, and lays blocks.
    """

    config_class: ClassVar[type[Config]]
    table: ClassVar[tuple[Rename, ...]]
    config: Config

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.bookkeeping: dict[str, Any] = {}  # of config.json, for the original's own loader

    def aliases(self) -> dict[str, str]:
        """The original's further names of tied tensors, each with the name it shares."""
        return {
            original_name(f"{path}.{alias}", self.table): original_name(
                f"{path}.{name}", self.table
            )
            for path, module in self.named_modules()
            if callable(tied := getattr(module, "tied_parameters", None))
            for alias, name in tied().items()
        }

    def reset_parameters(self) -> None:
        """Initialise every block by its own rule; a subclass then adds the model's.

        After `model.to_empty(device=...)` this makes a model built on the meta device whole.
        """
        for module in reversed(list(self.modules())[1:]):  # children first: parents refine them
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    def original_state_dict(self) -> dict[str, Tensor]:
        """The parameters under the original's names, tied ones under each of their names."""
        ours = {name: p.detach() for name, p in self.named_parameters()}
        return to_original(ours, self.table, self.aliases())

    def load_original_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy an original's tensors into the parameters, which keep their dtype and device.

        Of a tied tensor one name is enough. Nothing is changed unless everything fits.

        Raises:
            ValueError: naming every missing, unexpected, misshapen or contradictory entry; or this
                model is on the meta device (`to_empty` it first).
        """
        parameters = dict(self.named_parameters())
        if any(parameter.is_meta for parameter in parameters.values()):
            raise ValueError("the model is on the meta device: call to_empty(device=...) first")
        shapes = {name: p.shape for name, p in parameters.items()}
        loaded = from_original(state, shapes, self.table, self.aliases(), widen=True)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(loaded[name])

    @classmethod
    def from_pretrained(
        cls: type[AssemblyType],
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> AssemblyType:
        """A model in eval mode from `config.json` and the safetensors files in `folder`.

        Parameters take `dtype`, or keep each tensor's own (None).

        Raises:
            ImportError: safetensors is not installed.
            FileNotFoundError: a file is missing.
            ValueError: a file is corrupt, or its entries or config do not fit; all are named.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
        fields = load_config(folder)
        config = cls.config_class.from_dict(fields)
        with torch.device("meta"):
            model = cls(config)  # type: ignore[call-arg]
        shapes = {name: p.shape for name, p in model.named_parameters()}
        with open_checkpoint(folder) as state:
            loaded = from_original(
                state, shapes, cls.table, model.aliases(), widen=dtype is not None
            )
        for name, tensor in loaded.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
        bookkeeping = ("architectures", "auto_map", "tokenizer_class")
        model.bookkeeping = {name: fields[name] for name in bookkeeping if name in fields}
        return model.to(device=device, dtype=dtype).eval()

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write `config.json` and safetensors files under the original's names, each tensor once.

        Raises:
            ImportError: safetensors is not installed.
            OSError: they could not be written; what stood in `folder` before is untouched.
        """
        aliases = self.aliases()
        state = {n: t for n, t in self.original_state_dict().items() if n not in aliases}
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        config = {**self.bookkeeping, **self.config.to_dict(), "torch_dtype": dtype}
        save_checkpoint(folder, config, state, max_shard_bytes=max_shard_bytes)

    def run_layer(self, layer: nn.Module, *args: Any, **options: Any) -> Any:
        """Call a layer, recomputing it in the backward pass if `gradient_checkpointing` is set."""
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return layer(*args, **options)
        if options.get("cache") is not None:
            raise ValueError("cache must be None while gradient_checkpointing trains the model")
        return checkpoint(layer, *args, use_reentrant=False, **options)
