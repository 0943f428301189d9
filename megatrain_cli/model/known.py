"""Skeletons of published models by name; nothing is read but this package's list of sizes."""

from dataclasses import replace

import torch
from transformers import AutoConfig, PreTrainedConfig

from megatrain_cli.model.discover import make_skeleton
from megatrain_cli.model.shapes import Shape, find_shape
from megatrain_cli.model.skeleton import Skeleton


def config_of(shape: Shape) -> PreTrainedConfig:
    """What transformers would read from the model's config.json, as far as sizes go."""
    # Tokens by number belong to a tokenizer, and defaults of a family to another vocabulary.
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config: PreTrainedConfig = AutoConfig.for_model(
        shape.type, **shape.config_values(), **no_tokens
    )
    return config


def known_skeleton(
    name: str, *, dtype: torch.dtype, attention: str, layers: int | None = None
) -> Skeleton:
    """The skeleton of a model in the list, to plan with.

    Args:
        name: As `qwen2.5-32b`.
        dtype: Compute dtype.
        attention: `sdpa`, `eager` or `packed`.
        layers: Decoder layers in place of the published number.

    Raises:
        ModelError: No such name, or the model cannot be taken apart.
    """
    shape = find_shape(name)
    if layers is not None:
        shape = replace(shape, layers=layers)
    return make_skeleton(config_of(shape), dtype=dtype, attention=attention, to_train=False)
