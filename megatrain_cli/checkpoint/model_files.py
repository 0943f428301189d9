"""What a model's folder has besides weights, as a checkpoint takes it over."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue

from megatrain_cli.checkpoint.names import TEMPLATE_NAME
from megatrain_cli.errors import ModelError

GENERATION_NAME = "generation_config.json"

_TOKENIZER_NAME = "tokenizer_config.json"
# Where transformers keeps templates beside the ordinary one. A checkpoint has no such folder.
_MORE_TEMPLATES = "additional_chat_templates"

# Of config.json: what transformers takes into a generation config where a model has none.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Weights in any form stay behind; they are what was trained.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

# What a checkpoint's manifest can name. Hidden files, as of a version control, are no part of it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = ("manifest.json", "keep", "training")


def model_files(source: Path, dtype: torch.dtype, stop_ids: Sequence[int] = ()) -> dict[str, bytes]:
    """Tokenizer, templates and licence byte for byte; configs with what has become of the model.

    Args:
        source: A model's folder. Files whose names a checkpoint cannot have stay behind.
        dtype: Of the weights that go with the config.
        stop_ids: Tokens that the model has learnt to end with: the generation config names them
            too, or whoever lets the model write would not stop at them.

    Returns:
        Contents by name.

    Raises:
        ModelError: A config that must be changed is no JSON object.
    """
    files: dict[str, bytes] = {}
    for path in sorted(source.iterdir()):
        if path.name == "config.json":
            files[path.name] = _config(path.read_bytes(), str(dtype).removeprefix("torch."))
        elif path.is_file() and _belongs(path):
            files[path.name] = path.read_bytes()
    _add_templates(files, source)
    _add_stops(files, stop_ids)
    return files


def _add_templates(files: dict[str, bytes], source: Path) -> None:
    """Templates of other names, in the form that transformers reads from the tokenizer's config."""
    found = sorted(source.glob(f"{_MORE_TEMPLATES}/*.jinja"))
    more = {path.stem: path.read_text(encoding="utf-8") for path in found}
    if not more or _TOKENIZER_NAME not in files:
        return
    if TEMPLATE_NAME in files:
        more = {"default": files.pop(TEMPLATE_NAME).decode(), **more}
    config = _object(files[_TOKENIZER_NAME], _TOKENIZER_NAME)
    templates: JsonValue = [{"name": name, "template": text} for name, text in more.items()]
    files[_TOKENIZER_NAME] = _json({**config, "chat_template": templates})


def _add_stops(files: dict[str, bytes], stop_ids: Sequence[int]) -> None:
    """Name the tokens to stop at in the generation config; one that names them stays as it is."""
    raw = files.get(GENERATION_NAME)
    if raw is None:
        config = json.loads(files.get("config.json", b"{}"))
        values = {name: config[name] for name in _TOKENS if config.get(name) is not None}
    else:
        values = _object(raw, GENERATION_NAME)
    named = values.get("eos_token_id")
    known = named if isinstance(named, list) else [] if named is None else [named]
    new = [token for token in stop_ids if token not in known]
    if new:
        stops: JsonValue = [*known, *new]
        files[GENERATION_NAME] = _json({**values, "eos_token_id": stops})


def _object(raw: bytes, name: str) -> dict[str, JsonValue]:
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} of the model is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{name} of the model is no JSON object")
    return values


def _belongs(path: Path) -> bool:
    if path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
        return False
    return _NAME.fullmatch(path.name) is not None and path.name.casefold() not in _RESERVED


def _config(raw: bytes, dtype: str) -> bytes:
    config = json.loads(raw)
    if config.get("dtype", config.get("torch_dtype")) == dtype:
        return raw
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    return _json(config)


def _json(values: Mapping[str, JsonValue]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
