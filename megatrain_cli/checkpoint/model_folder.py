"""Write a run's weights as a plain Hugging Face folder, whole or not at all.

One safetensors file a layer, an index, and every other file of the source folder as it was. The
folder is written under a temporary name, synced and renamed: a folder with its final name is
complete. Weights go from the tiles to the disk without a copy, so that saving needs no memory.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from megatrain_cli.checkpoint.headers import INDEX_NAME, make_header
from megatrain_cli.checkpoint.model_files import model_files
from megatrain_cli.checkpoint.parts import DTYPE_NAMES
from megatrain_cli.errors import NumericsError, StorageError
from megatrain_cli.store.master import LayerTile, MasterStore
from megatrain_cli.units import show_bytes

# Elements that are looked at and written at once. Looking makes a few temporaries of that size;
# a whole embedding of them would be gigabytes.
_PIECE = 1 << 22


def weights_bytes(store: MasterStore) -> int:
    """Bytes of the weight files, headers aside."""
    return sum(tile.layout.layer.numel * tile.weights.element_size() for tile in store.tiles)


def check_room(folder: Path, num_bytes: int) -> None:
    """Refuse a disk that cannot hold the weights, before the first step and not after the last.

    Raises:
        StorageError: The folder cannot be made or written, or has too little room.
    """
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
    if free < num_bytes:
        raise StorageError(
            f"{folder} has {show_bytes(free)} free and the weights need {show_bytes(num_bytes)}. "
            "Make room, or set `train.output_dir` to another disk."
        )


def save_model_folder(store: MasterStore, source: Path, target: Path) -> int:
    """Write all weights to `target`; no tile may change meanwhile.

    Args:
        store: Whose weights, in the compute dtype.
        source: Folder that the model's config and tokenizer came from.
        target: Folder to make; must not exist.

    Returns:
        Bytes of the weight files.

    Raises:
        NumericsError: A weight is not finite; nothing is left behind.
        StorageError: The disk refused; nothing is left behind.
    """
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        weight_map: dict[str, str] = {}
        for tile in store.tiles:
            name = f"model-{tile.layout.layer.name}.safetensors"
            _write_weights(tile, temporary / name)
            weight_map |= dict.fromkeys(tile.layout.by_name, name)
        total = weights_bytes(store)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (temporary / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for file, data in model_files(source, store.tiles[0].weights.dtype).items():
            (temporary / file).write_bytes(data)
        _sync(temporary.iterdir())
        _sync([temporary])
        temporary.rename(target)
        _sync([target.parent])
    except OSError as error:
        raise StorageError(
            f"Writing {target} failed: {error}. Nothing was left there; make "
            f"room for {show_bytes(weights_bytes(store))} and run again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return total


def _write_weights(tile: LayerTile, path: Path) -> None:
    """Write a layer's weights as one safetensors file, tensors by name."""
    entries = sorted(tile.layout.entries, key=lambda entry: entry.param.name)
    shapes = {entry.param.name: entry.param.shape for entry in entries}
    with path.open("wb") as file:
        file.write(make_header(DTYPE_NAMES[tile.weights.dtype], shapes))
        for entry in entries:
            for piece in tile.weights[entry.offset : entry.end].split(_PIECE):
                if not torch.isfinite(piece).all():
                    raise NumericsError(
                        f"{entry.param.name} has values that are not finite; the weights were not "
                        "written."
                    )
                file.write(piece.view(torch.uint8).numpy().data)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
