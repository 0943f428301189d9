"""Which parameters are stacks of experts, and how many of them a token meets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig


@contextmanager
def watch_experts(
    config: PreTrainedConfig, layers: Sequence[nn.Module]
) -> Iterator[dict[int, int]]:
    """Watch which experts a forward asks for.

    A module that has `num_experts` and is given whole numbers, a row of them a token, computes that
    many of its experts for each token. So the number is what the model's own code does, and a model
    that computes all its experts for every token has none that are left out.

    Args:
        config: The model's own. Meanwhile it asks for experts by batched products, which exist in
            any dtype; grouped ones want BF16, on meta too.
        layers: The decoder layers.

    Yields:
        Experts that a token meets, by the `id` of a parameter whose first dimension is the experts;
        filled by the forwards that run meanwhile.
    """
    found: dict[int, int] = {}

    def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                for param in module.parameters():
                    if param.shape[0] == module.num_experts:
                        found[id(param)] = value.shape[-1]
                return

    implementation = config._experts_implementation
    config._experts_implementation = "batched_mm"
    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for layer in layers
        for module in layer.modules()
        if isinstance(getattr(module, "num_experts", None), int)
    ]
    try:
        yield found
    finally:
        config._experts_implementation = implementation
        for hook in hooks:
            hook.remove()
