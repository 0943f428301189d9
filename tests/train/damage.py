"""Tensors of a checkpoint changed by someone who signs the manifest anew: only bits can tell."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain_cli.checkpoint.elements import Bits, as_array, nearest_bf16, widen
from megatrain_cli.checkpoint.places import TensorPlace
from tests.checkpoint.signed import Json, change_in
from tests.checkpoint.tiles import manifest_of

Change = Callable[[str, Bits], Bits]
"""What becomes of a tensor, by its name in the file."""


def change_tensors(folder: Path, prefix: str, change: Change) -> int:
    """Change every tensor whose name begins so; how many bytes are others now."""
    hashes: dict[str, str] = {}
    changed = 0
    for part in manifest_of(folder).parts:
        raw = bytearray((folder / part.file).read_bytes())
        before = bytes(raw)
        for place in part.tensors:
            if place.name.startswith(prefix):
                at = slice(part.data_start + place.start, part.data_start + place.end)
                raw[at] = change(place.name, as_array(place.dtype, before[at])).tobytes()
        changed += int(np.count_nonzero(np.frombuffer(raw, np.uint8) != np.frombuffer(before, np.uint8)))
        (folder / part.file).write_bytes(raw)
        hashes[part.file] = xxhash.xxh3_128_hexdigest(raw)

    def rehash(manifest: Json) -> None:
        for shard in manifest["shards"]:
            for part in shard["parts"]:
                part["xxh3_128"] = hashes[part["file"]]

    change_in(folder, rehash)
    return changed
