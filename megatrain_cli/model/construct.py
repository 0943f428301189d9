"""Build a model's modules without ever allocating its parameters.

Parameters go to the meta device; buffers (rotary tables and such) are real and on the CPU, as they
are computed in `__init__` and come in no file.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

import megatrain_cli.model.attention  # noqa: F401  makes `packed` known to transformers
from megatrain_cli.errors import ModelError

# How a model's own code refuses a value that its config class let pass: an unknown activation or
# rope type, heads that do not divide.
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class EmptyOnMeta(TorchFunctionMode):
    """Sends `torch.empty` without a device to meta: how modules allocate what init then fills.

    Not `torch.device("meta")`, which would send buffers there too and lose their values.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func`, with the device filled in if it is `torch.empty`."""
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def construct(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Make the causal language model of a config: parameters on meta, buffers real on the CPU.

    Neither the global random state nor `config` is changed. Parameters that the model keeps in a
    dtype of their own have it: see `foreign_dtypes`.

    Raises:
        ModelError: The config has a value that the model's code refuses, or a buffer has no value,
            or no finite one.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if attention == "sdpa" and getattr(family, "_supports_sdpa", None) is False:
        raise ModelError(
            f"{config.model_type} models have no `sdpa` attention in transformers. Set "
            "`model.attention: eager`."
        )
    try:
        with EmptyOnMeta(), warnings.catch_warnings():
            # A size of 0 is refused by name, once all shapes are known.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            model = cast(
                PreTrainedModel,
                AutoModelForCausalLM.from_config(
                    copy.deepcopy(config),
                    dtype=dtype,
                    attn_implementation=attention,
                    trust_remote_code=False,
                ),
            )
    except _REFUSALS as error:
        raise ModelError(
            f"transformers cannot make a {config.model_type} model of this config: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    _move_parameters_to_meta(model)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"{type(model).__name__} does not say what is in its buffer `{name}`: "
                "such a model cannot be trained yet."
            )
        if name.endswith("inv_freq") and not bool(buffer.isfinite().all()):
            raise ModelError(
                f"{type(model).__name__}: the rotary frequencies `{name}` are not finite. Look at "
                "`rope_theta` and the factors of `rope_parameters` in config.json."
            )
    # What we never want, whatever the config says: caches and collected outputs. Without a pad
    # token the model neither reads the ids back from the device to look for padding, nor warns.
    # Padding on the right needs no mask under causal attention.
    model.config.use_cache = False
    model.config.output_hidden_states = False
    model.config.output_attentions = False
    model.config.return_dict = True
    model.config.pad_token_id = None
    return model


def foreign_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameters that are not in `dtype`, by name: routers that a family keeps in FP32."""
    return {name: p.dtype for name, p in model.named_parameters() if p.dtype != dtype}


def _move_parameters_to_meta(model: nn.Module) -> None:
    """Replace what was made by `ones` and `zeros` (norms, biases); shared ones stay shared."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or param.is_meta:
                continue
            if id(param) not in moved:
                moved[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"))
            module._parameters[name] = moved[id(param)]
