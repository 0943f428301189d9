"""Whether a checkpoint opens as the model that its config describes: names, shapes, tokenizer.

Nothing is allocated: the model stands on the meta device. Needs torch and transformers, unlike all
else that inspects.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.places import short
from megatrain_cli.errors import CorruptError, IncompatibleError, MegatrainError, ModelError
from megatrain_cli.model.discover import make_skeleton, read_config
from megatrain_cli.model.spec import ModelSpec

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_opens(checkpoint: OpenCheckpoint) -> Iterator[MegatrainError]:
    """Build the model of config.json and compare; load the tokenizer if there is one.

    Yields:
        IncompatibleError: The model has other layers, names, shapes or tied weights than the
            checkpoint, or transformers cannot make it, or the tokenizer.
        CorruptError: A file that is read for this is damaged.
    """
    try:
        for file in checkpoint.manifest.aux:
            if "/" not in file.file:
                checkpoint.read_aux(file.file)  # what transformers is about to parse
    except CorruptError as error:
        yield error
        return
    folder, manifest = checkpoint.folder, checkpoint.manifest
    try:
        dtype = _DTYPES.get(manifest.dtypes.get("weights") or "", torch.float32)
        skeleton = make_skeleton(read_config(folder), dtype=dtype, attention="sdpa")
    except ModelError as error:
        yield IncompatibleError(f"{folder}: no model can be made of config.json: {error}")
        return
    for difference in _differences(skeleton.spec, tuple(sorted(skeleton.aliases)), manifest):
        yield IncompatibleError(f"{folder}: not the model of its config.json: {difference}.")
    yield from _tokenizer(folder, manifest, skeleton.spec.vocab_size)


def _differences(spec: ModelSpec, tied: tuple[str, ...], manifest: Manifest) -> Iterator[str]:
    wanted = {layer.name: {p.name: p.shape for p in layer.params} for layer in spec.layers}
    held = {
        shard.name: {place.name: place.shape for place in shard.weights.tensors}
        for shard in manifest.shards
    }
    if list(wanted) != list(held):
        yield f"it has the layers {short(list(wanted))}, the checkpoint {short(list(held))}"
        return
    for layer, shapes in wanted.items():
        for name in sorted(shapes.keys() | held[layer].keys()):
            ours, theirs = shapes.get(name), held[layer].get(name)
            if ours != theirs:
                yield f"{short(name)} has the shape {ours} there and {theirs} here (None: absent)"
    if tied != tuple(sorted(manifest.model.tied)):
        yield f"tied weights are {short(tied)} there and {short(manifest.model.tied)} here"


def _tokenizer(folder: Path, manifest: Manifest, vocab_size: int) -> Iterator[IncompatibleError]:
    if not {file.file for file in manifest.aux} & set(_TOKENIZER_FILES):
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        yield IncompatibleError(f"{folder}: the tokenizer does not load: {reason}")
        return
    if len(tokenizer) > vocab_size:
        yield IncompatibleError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}."
        )
