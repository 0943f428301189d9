"""Checkpoints of tiny models that transformers can load, made without training."""

import json
from pathlib import Path

import numpy as np
import torch

from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.model.discover import discover
from tests.checkpoint.made import F32, make_checkpoint
from tests.families import make_tiny
from tests.train.workspace import save_tokenizer

CONFIG = """\
model: {path: /somewhere/tiny, dtype: bfloat16}
data: {train: [{path: /rows/train.jsonl, format: null, weight: null}], max_length: 64}
train: {output_dir: /runs/one, max_steps: 20}
"""


def make_model_checkpoint(
    folder: Path,
    kind: str = "llama",
    *,
    tied: bool = False,
    master: str = "fp32_split",
    weights: str = "BF16",
    pending: int = 0,
    extra: dict[str, bytes] | None = None,
    told_tied: tuple[str, ...] | None = None,
) -> tuple[Manifest, dict[str, F32]]:
    """A checkpoint of a tiny model with a tokenizer, and its FP32 masters by name.

    Args:
        folder: To make.
        kind: Family, see `tests.families`.
        tied: Whether the embeddings are.
        master: As in `make_checkpoint`.
        weights: As in `make_checkpoint`.
        pending: As in `make_checkpoint`.
        extra: Files beside the model's own, or in their place.
        told_tied: Tied weights that the manifest names; None are the model's.
    """
    source = folder.with_name(f"{folder.name}-source")
    model = make_tiny(kind, tied=tied, layers=2, hidden=16)
    model.save_pretrained(source)
    save_tokenizer(source)
    skeleton = discover(source, dtype=torch.bfloat16, attention="sdpa")
    held = {name: param.detach().numpy() for name, param in model.named_parameters()}
    layers = {
        layer.name: {param.name: held[param.name] for param in layer.params}
        for layer in skeleton.spec.layers
    }
    aux = {
        path.name: path.read_bytes()
        for path in source.iterdir()
        if not path.name.startswith("model")
    }
    config = json.loads(aux["config.json"])
    config["dtype"] = {"BF16": "bfloat16", "F32": "float32"}[weights]
    aux["config.json"] = json.dumps(config).encode()
    manifest = make_checkpoint(
        folder,
        layers,
        master=master,
        weights=weights,
        pending=pending,
        aux=aux | {"training/config.yaml": CONFIG.encode()} | (extra or {}),
        model={
            "architecture": skeleton.spec.architecture,
            "config_sha256": "0" * 64,
            "num_layers": 2,
            "num_parameters": sum(
                value.size for values in layers.values() for value in values.values()
            ),
            "vocab_size": skeleton.spec.vocab_size,
            "tied": tuple(sorted(skeleton.aliases)) if told_tied is None else told_tied,
        },
    )
    return manifest, {name: np.array(held[name]) for values in layers.values() for name in values}
