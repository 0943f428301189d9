"""A model without weights: its own modules, real buffers, and where each parameter belongs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain_cli.model.attention import PACKED
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.recorder import Tape
from megatrain_cli.model.spec import ModelSpec


@dataclass(frozen=True)
class Skeleton:
    """A causal language model whose parameters are all on the meta device.

    Attributes:
        spec: Names and shapes, layer by layer.
        layouts: One a layer of `spec.layers`, in order.
        model: The model itself, with a recorder in the place of each decoder layer.
        layers: The decoder layers that the recorders replaced, in order.
        tape: What the recorders write to.
        hf_config: The config as it was read, untouched.
        aliases: Second names of shared parameters: tied head name -> embedding name.
        base_prefix: Name of the base model inside `model`, such as `model` or `transformer`.
        ignored_keys: Regexes of tensors that old files of this family hold and nobody needs.
        dtype: Compute dtype; the dtype of every parameter but those in `foreign`.
        foreign: Parameters that the family keeps in a dtype of their own, by name. Only a skeleton
            to plan with has any: it bills them in the compute dtype.
    """

    spec: ModelSpec
    layouts: tuple[LayerLayout, ...]
    model: PreTrainedModel
    layers: tuple[nn.Module, ...]
    tape: Tape
    hf_config: PreTrainedConfig
    aliases: dict[str, str]
    base_prefix: str
    ignored_keys: tuple[str, ...]
    dtype: torch.dtype
    foreign: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def base(self) -> nn.Module:
        """The base model: everything but the LM head."""
        return self.model.get_submodule(self.base_prefix)

    @property
    def is_packed(self) -> bool:
        """Whether rows may hold several documents, each with an attention of its own."""
        found: str = self.model.config._attn_implementation
        return found == PACKED

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Dropout does nothing meanwhile."""
        roots = (self.model, *self.layers)
        try:
            for root in roots:
                root.eval()
            yield
        finally:
            for root in roots:
                root.train(self.spec.has_dropout)

    def move_buffers(self, device: torch.device) -> None:
        """Put every buffer on `device`, where the prologue, the layers and the head will run."""
        for root in (self.model, *self.layers):
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(device)
