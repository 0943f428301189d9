"""Read an exported folder as others will, and compare it with what it was made from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from megatrain_cli.checkpoint.cast import CastWeight, cast_pieces
from megatrain_cli.checkpoint.elements import patterns
from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.headers import read_folder
from megatrain_cli.errors import StorageError

_BITS = {2: torch.int16, 4: torch.int32}


def check_written(checkpoint: OpenCheckpoint, folder: Path, weights: Sequence[CastWeight]) -> None:
    """Open the folder's files with the safetensors library; every bit must be the checkpoint's.

    Raises:
        CorruptError: The folder's files and its index do not agree.
        StorageError: A tensor is missing, is left over or has other bits.
    """
    places = {name: folder / file.name for file in read_folder(folder) for name in file.tensors}
    extra = places.keys() ^ {weight.name for weight in weights}
    if extra:
        raise StorageError(f"{folder}: {min(extra)} was written wrongly. Export again.")
    for weight in weights:
        path = places[weight.name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(weight.name)
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{path} cannot be read back: {error}. Export again.") from error
        if tuple(tensor.shape) != weight.place.shape:
            raise StorageError(f"{path}: {weight.name} was written in another shape. Export again.")
        bits = patterns(tensor.flatten().view(_BITS[tensor.element_size()]).numpy())
        start = 0
        for wanted in cast_pieces(checkpoint, weight):
            found = bits[start : start + wanted.size]
            if not np.array_equal(found, patterns(wanted)):
                raise StorageError(
                    f"{path}: {weight.name} does not read back as it was written: the disk or the "
                    "memory is failing. Nothing was kept; export to another disk."
                )
            start += wanted.size
