"""What a model's folder has besides weights, as a checkpoint takes it over."""

import json
import re
from pathlib import Path

import torch

# Weights in any form stay behind; they are what was trained.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

# What a checkpoint's manifest can name. Hidden files, as of a version control, are no part of it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = ("manifest.json", "keep", "training")


def model_files(source: Path, dtype: torch.dtype) -> dict[str, bytes]:
    """Tokenizer, templates, generation config and licence byte for byte; config with its dtype.

    Args:
        source: A model's folder. Files whose names a checkpoint cannot have stay behind.
        dtype: Of the weights that go with the config.

    Returns:
        Contents by name.
    """
    files: dict[str, bytes] = {}
    for path in sorted(source.iterdir()):
        if path.name == "config.json":
            files[path.name] = _config(path.read_bytes(), str(dtype).removeprefix("torch."))
        elif path.is_file() and _belongs(path):
            files[path.name] = path.read_bytes()
    return files


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
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
