"""From a model folder's config.json to a `Skeleton`. Reads no weights."""

import json
import mmap
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain_cli.errors import ModelError
from megatrain_cli.model.construct import construct, foreign_dtypes
from megatrain_cli.model.experts import watch_experts
from megatrain_cli.model.kinds import asks_for_dropout, layer_kinds
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.ownership import Ownership, find_layers, find_owners, replace_layers
from megatrain_cli.model.recorder import Tape
from megatrain_cli.model.sizes import check_sizes
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.model.spec import LayerSpec, ModelSpec, ParamSpec
from megatrain_cli.model.template import Prologue
from megatrain_cli.units import show_bytes

# The architectures whose logits, loss and gradients equal Hugging Face's own in the tests. The
# only place of the program that names a family.
PROVED = frozenset(
    {
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)

# All that transformers raises for a field of a wrong type, an unknown rope type, heads that do not
# divide, and such.
_CONFIG_FAULTS = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)

# What older transformers stored as buffers and now computes: Llama-2's rotary tables and GPT-2's
# mask values. No parameter ever had such a name.
_OLD_BUFFERS = (r"\brotary_emb\.inv_freq$", r"\battn\.masked_bias$")


def discover(
    folder: Path, *, dtype: torch.dtype, attention: str, to_train: bool = True
) -> Skeleton:
    """Make the skeleton of the model in a Hugging Face folder.

    Args:
        folder: Holds config.json; nothing else is read.
        dtype: Compute dtype.
        attention: `sdpa`, `eager`, or `packed` for rows of several documents.
        to_train: See `make_skeleton`; what is not proved can be planned.

    Raises:
        ModelError: config.json is missing or damaged, or the architecture cannot be trained.
    """
    config = read_config(folder)
    architecture = _architecture(config)
    if to_train and architecture not in PROVED:
        raise ModelError(
            f"{architecture} in {folder} is not proved yet: its loss and gradients were never "
            f"compared with Hugging Face's. Proved are {', '.join(sorted(PROVED))}."
        )
    return make_skeleton(config, dtype=dtype, attention=attention, to_train=to_train)


def _what_it_is(folder: Path) -> str:
    """What is named where a model's folder belongs, and what to name instead."""
    if (folder / "checkpoints").is_dir():
        return (
            "it is a run. Name one of its checkpoints, or what `megatrain export` makes of it; "
            "`megatrain resume` goes on with the run itself."
        )
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter. Merge that into its model, and name the result."
    return "it is no model as Hugging Face serves it. Name the folder that has the file."


def read_config(folder: Path) -> PreTrainedConfig:
    """Read config.json as Hugging Face does, without running code from the folder.

    Raises:
        ModelError: The file is missing, is not valid, or describes something else than a plain
            decoder-only language model.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json: {_what_it_is(folder)}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {error}.") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ModelError(f"{path}: has no `model_type`: not the config of a Hugging Face model.")
    named = raw.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"{path}: `architectures` is {named!r}, not a list of names.")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(raw["model_type"])
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"{path}: {_first(named)} is an encoder-decoder, not a causal LM.")
    if causal is None:
        raise ModelError(
            f"{path}: transformers has no causal LM for model type `{raw['model_type']}` "
            f"({_first(named)})."
        )
    if named and named[0] != causal:
        raise ModelError(f"{path}: {named[0]} is not a causal LM; {causal} would be.")
    if raw.get("quantization_config") is not None:
        raise ModelError(
            f"{path}: {causal} is quantised (`quantization_config`). Train from the unquantised "
            "weights."
        )
    check_sizes(str(path), raw, getattr(CONFIG_MAPPING[raw["model_type"]], "attribute_map", {}))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (StrictDataclassError, *_CONFIG_FAULTS) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: not a valid {raw['model_type']} config: {reason}") from error
    return config


def make_skeleton(
    config: PreTrainedConfig, *, dtype: torch.dtype, attention: str, to_train: bool = True
) -> Skeleton:
    """Make the skeleton of any causal language model, proved or not.

    Args:
        config: Of the model.
        dtype: Compute dtype.
        attention: `sdpa`, `eager` or `packed`.
        to_train: Without it the skeleton is to plan with, and may have `foreign` parameters.

    Raises:
        ModelError: The model is not one sequence of decoder layers with parameters of their own.
    """
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ModelError(f"{_architecture(config)} has an encoder or cross-attention.")
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ModelError(
            f"{_architecture(config)}: `num_hidden_layers` is {num_layers}, not 1 or more."
        )
    _refuse_moving_rope(config)
    model = construct(config, dtype, attention)
    foreign = foreign_dtypes(model, dtype)
    if to_train:
        for name, found in foreign.items():
            raise ModelError(
                f"{type(model).__name__} keeps `{name}` in {found}, not in {dtype}: "
                "mixed dtypes in one layer cannot be trained yet."
            )
    # Before the layers are replaced: their parameters are in no state dict afterwards.
    names = dict(model.named_parameters(remove_duplicate=False))
    path, module_list = find_layers(model)
    tape = Tape(len(module_list))
    layers = replace_layers(module_list, tape)
    with watch_experts(model.config, layers) as visited:
        owners = find_owners(model, names, layers, tape)
    has_dropout = asks_for_dropout(config, (model, *layers))
    for module in (model, *layers):
        module.train(has_dropout)
    spec = ModelSpec(
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=_layer_specs(path, layers, names, owners, visited, _full_attention(config)),
        tied=owners.tied,
        has_dropout=has_dropout,
        max_positions=getattr(config, "max_position_embeddings", None),
        num_heads=getattr(config, "num_attention_heads", 1),
        attention_width=_attention_width(config),
        uneven_heads=_has_uneven_heads(config),
        window=_window(config),
    )
    _refuse_empty(spec)
    if spec.max_positions is not None and spec.max_positions < 1:
        raise ModelError(
            f"{spec.architecture}: config.json says that rows have at most {spec.max_positions} "
            "tokens (`max_position_embeddings`), not 1 or more."
        )
    skeleton = Skeleton(
        spec=spec,
        layouts=tuple(make_layout(layer) for layer in spec.layers),
        model=model,
        layers=layers,
        tape=tape,
        hf_config=config,
        aliases=owners.aliases,
        base_prefix=model.base_model_prefix,
        ignored_keys=(*sorted(model._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS),
        dtype=dtype,
        foreign=foreign,
    )
    return replace(skeleton, spec=replace(spec, lookup=is_lookup(skeleton)))


def _refuse_empty(spec: ModelSpec) -> None:
    """Refuse parameters without elements, which a size of 0 in config.json makes."""
    params = [param for layer in spec.layers for param in layer.params]
    empty = [f"{param.name} {param.shape}" for param in params if 0 in param.shape]
    if empty:
        raise ModelError(
            f"{spec.architecture}: config.json has a size of 0: {len(empty)} of {len(params)} "
            f"parameters are empty, the first is {empty[0]}."
        )


def _attention_width(config: PreTrainedConfig) -> int:
    """Heads of queries times their size; of latent attention times the mean of keys' and values'.

    There `head_dim` is the rotary part alone.
    """
    heads: int = getattr(config, "num_attention_heads", 1)
    if hasattr(config, "qk_nope_head_dim"):
        keys: int = config.qk_nope_head_dim + config.qk_rope_head_dim
        values: int = config.v_head_dim
        return heads * (keys + values) // 2
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * size


def _has_uneven_heads(config: PreTrainedConfig) -> bool:
    if not hasattr(config, "qk_nope_head_dim"):
        return False
    keys: int = config.qk_nope_head_dim + config.qk_rope_head_dim
    values: int = config.v_head_dim
    return keys != values


def _window(config: PreTrainedConfig) -> int | None:
    """The sliding window of layers that have one; Qwen names one that is switched off."""
    if not getattr(config, "use_sliding_window", True):
        return None
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int):
        return None
    if window < 1:
        raise ModelError(
            f"{_architecture(config)}: `sliding_window` is {window}: a token would not even see "
            "itself. Set it in config.json to null for no window, or to 1 or more."
        )
    return window


def _full_attention(config: PreTrainedConfig) -> set[int]:
    """Layers without the window, where a family has both kinds."""
    types = getattr(config, "layer_types", None) or ()
    return {index for index, name in enumerate(types) if name == "full_attention"}


def is_lookup(skeleton: Skeleton) -> bool:
    """Whether the prologue's backward reads none of its weights; looks at one token's graph."""
    prologue = Prologue(skeleton)
    # Fresh pages are zeros that cost nothing until they are touched; torch's own would be written.
    num_bytes = skeleton.layouts[0].numel * skeleton.dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError) as error:
        raise ModelError(
            f"{skeleton.spec.architecture}: this machine cannot even address an embedding of "
            f"{show_bytes(num_bytes)}. Look at the sizes in config.json."
        ) from error
    flat = torch.frombuffer(pages, dtype=skeleton.dtype)
    start, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    saved: list[bool] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(start <= tensor.data_ptr() < end)
        return tensor

    with (
        torch.random.fork_rng([]),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        prologue(prologue.leaves(flat), torch.zeros(1, 1, dtype=torch.int64))
    return not any(saved)


def _refuse_moving_rope(config: PreTrainedConfig) -> None:
    """Refuse rotary tables that a forward makes anew from the positions it is given.

    Their values depend on the batches before, and reading the longest position makes the host wait
    for the device.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for kind in {part.get("rope_type") for part in (rope, *nested)} & {"dynamic", "longrope"}:
        raise ModelError(
            f"{_architecture(config)} has the rope type `{kind}`, whose tables change with the "
            "length of the rows: such a model cannot be trained yet."
        )


def _layer_specs(
    path: str,
    layers: tuple[nn.Module, ...],
    names: dict[str, nn.Parameter],
    owners: Ownership,
    visited: dict[int, int],
    full: set[int],
) -> tuple[LayerSpec, ...]:
    def specs(owned: tuple[str, ...]) -> tuple[ParamSpec, ...]:
        return tuple(
            ParamSpec(name, tuple(names[name].shape), visited.get(id(names[name]), 0))
            for name in owned
        )

    decoder_layers = (
        LayerSpec(f"layer-{index:05d}", kind, specs(owned), f"{path}.{index}", index in full)
        for index, (kind, owned) in enumerate(zip(layer_kinds(layers), owners.layers, strict=True))
    )
    return (
        LayerSpec("embed", "embed", specs(owners.embed)),
        *decoder_layers,
        LayerSpec("head", "head", specs(owners.head)),
    )


def _architecture(config: PreTrainedConfig) -> str:
    causal: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return causal or _first(config.architectures or [])


def _first(architectures: list[str]) -> str:
    return architectures[0] if architectures else "a model without a named architecture"
