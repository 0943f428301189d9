"""What a module tells about itself without weights: layer kinds and dropout."""

import hashlib
import json
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig

# Config fields with a dropout for heads that a causal language model does not have.
OTHER_HEADS = ("summary_", "classifier_")


def layer_kinds(layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """One digest a layer: equal for layers of the same class, shapes and settings.

    A number that equals the layer's own index in every layer is a counter, not a setting.
    """
    settings = [_settings(layer) for layer in layers]
    counters = {
        key
        for key in settings[0]
        if all(type(s.get(key)) is int and s[key] == i for i, s in enumerate(settings))
    }
    return tuple(
        _digest(layer, {k: v for k, v in found.items() if k not in counters})
        for layer, found in zip(layers, settings, strict=True)
    )


def _settings(layer: nn.Module) -> dict[str, str | int | float | bool | None]:
    """Plain attributes of the layer and of its parts, such as a window or an attention type."""
    return {
        f"{path}:{name}": value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, str | int | float | bool | None)
    }


def _digest(layer: nn.Module, settings: dict[str, str | int | float | bool | None]) -> str:
    parts = {path: type(module).__qualname__ for path, module in layer.named_modules()}
    shapes = {name: tuple(param.shape) for name, param in layer.named_parameters()}
    text = json.dumps([parts, shapes, settings], sort_keys=True)
    return f"{type(layer).__name__}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def asks_for_dropout(config: PreTrainedConfig, modules: Sequence[nn.Module]) -> bool:
    """Whether a module or a config field has a dropout above zero; errs towards yes."""
    fields = {k: v for k, v in config.to_dict().items() if not k.startswith(OTHER_HEADS)}
    for root in modules:
        for module in root.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                return True
            fields.update({f"{id(module)}:{k}": v for k, v in vars(module).items()})
    return any(
        "drop" in name.lower() and isinstance(value, int | float) and value > 0
        for name, value in fields.items()
    )
