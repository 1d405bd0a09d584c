"""What the three models have in common under transformers: parameters that start by the blocks' own
rules, recomputed layers, tables that grow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from brickwork.assemblies.assembly import Assembly
from brickwork.assemblies.hf_config import AssemblyConfig
from brickwork.kernels.cross_entropy import token_cross_entropy


class AssemblyModel(PreTrainedModel):
    """Base of the models: the modules of an assembly under transformers' names.

    A subclass is a backbone, or a head over one under the attribute `base_model_prefix`.
    """

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012

    assembly_class: ClassVar[type[Assembly]]
    embedding_name: ClassVar[str]
    head_name: ClassVar[str]  # of the head, in the assembly and here
    lora_targets: ClassVar[tuple[str, ...]]  # the names of its linear modules, for adapters

    config: AssemblyConfig
    layers: nn.ModuleList
    checkpoint_every = 1
    _gradient_checkpointing_func: Callable[..., Any]

    def lay(self) -> None:
        """Take over the modules of a new assembly, all but its head."""
        assembly = self.assembly_class(self.config.assembly_config())  # type: ignore[call-arg]
        setattr(assembly, self.head_name, None)
        for name, module in list(assembly.named_children()):
            setattr(self, name, module)
        for parameter in self.parameters():
            if not parameter.is_meta:
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        self.gradient_checkpointing = False

    def assembly(self) -> Assembly:
        """The assembly of these very modules: what trains or changes one does the other."""
        with torch.device("meta"):
            assembly = self.assembly_class(self.config.assembly_config())  # type: ignore[call-arg]
        for name, module in self.base_model.named_children():
            setattr(assembly, name, module)
        tied = getattr(self.config, "tie_word_embeddings", False)
        head = None if tied else getattr(self, self.head_name, None)
        setattr(assembly, self.head_name, head)
        return assembly.train(self.training)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw every parameter that was not loaded, as the assembly's `reset_parameters` does."""
        owned = [(m, name, p) for m in self.modules() for name, p in m._parameters.items()]
        done = [
            (module, name, parameter)
            for module, name, parameter in owned
            if parameter is None
            or getattr(parameter, "_is_hf_initialized", False)
            or getattr(module, "_is_hf_initialized", False)
        ]
        if len(done) == len(owned):
            return
        with _set_aside(done):
            self.assembly().reset_parameters()
        for parameter in self.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]

    def _init_weights(self, module: nn.Module) -> None:
        """For the tables that transformers makes when it grows one."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=getattr(self.config, "initializer_range", 0.02))

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self.base_model, self.embedding_name)

    def set_input_embeddings(self, value: nn.Module) -> None:
        setattr(self.base_model, self.embedding_name, value)

    def get_output_embeddings(self) -> nn.Module | None:
        return None if self.base_model is self else getattr(self, self.head_name)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        setattr(self, self.head_name, new_embeddings)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        backbone: Any = self.base_model
        backbone.checkpoint_every = every_n_layers

    def run_layer(self, index: int, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """Call a layer, recomputing it in the backward pass where that is asked for. `function`
        returns tensors or one flat tuple: recomputation of the reentrant kind sees no others."""

        def call(*tensors: Tensor | None) -> Any:
            with self._attention():
                return function(*tensors)

        if self.recomputes() and index % self.checkpoint_every == 0:
            return self._gradient_checkpointing_func(call, *tensors)
        return call(*tensors)

    def recomputes(self) -> bool:
        """Whether layers are recomputed in the backward pass of a call now."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def _attention(self) -> AbstractContextManager[Any]:
        eager = self.config._attn_implementation == "eager"
        return sdpa_kernel(SDPBackend.MATH) if eager else contextlib.nullcontext()

    def no_attentions(self, output_attentions: bool | None) -> None:
        """Raise if attention weights are asked for."""
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError(
                f"output_attentions must be False: {type(self).__name__} computes no attention "
                "weights that it could return"
            )


def summed_loss(
    logits: Tensor, targets: Tensor, num_items: Tensor | int | None
) -> tuple[Tensor, Tensor | float]:
    """The mean cross-entropy where targets are not -100, and 1; or its sum divided by `num_items`,
    and the share of them that is in this batch."""
    if num_items is None:
        return token_cross_entropy(logits, targets), 1.0
    if isinstance(num_items, Tensor):
        num_items = num_items.to(logits.device)
    total = token_cross_entropy(logits, targets, reduction="sum")
    return total / num_items, (targets != -100).sum() / num_items


@contextlib.contextmanager
def _set_aside(owned: list[tuple[nn.Module, str, nn.Parameter | None]]) -> Iterator[None]:
    """Parameters without data in these places, so that what is written to them is lost."""
    for module, name, parameter in owned:
        if parameter is not None:
            empty = torch.empty_like(parameter, device="meta")
            module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    try:
        yield
    finally:
        for module, name, parameter in owned:
            module._parameters[name] = parameter
