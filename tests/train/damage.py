"""Tensors of a checkpoint changed by someone who signs the manifest anew: only bits can tell."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from megatrain_cli.checkpoint.elements import Bits, as_array, nearest_bf16, widen
from tests.checkpoint.signed import Json, change_in
from tests.checkpoint.tiles import manifest_of

Change = Callable[[Bits], Bits]
"""What becomes of a tensor's elements, flat; BF16 as `uint16`."""


def zeroed(elements: Bits) -> Bits:
    return np.zeros_like(elements)


def through_bf16(elements: Bits) -> Bits:
    """FP32 as a cast to BF16 and back leaves it."""
    return widen("BF16", nearest_bf16(elements.astype(np.float32)))


def with_one_bit(elements: Bits) -> Bits:
    """The last bit of an element in the middle flipped."""
    found = elements.copy()
    found.view(np.uint8)[len(found) // 2 * found.itemsize] ^= 1
    return found


def change_tensors(folder: Path, changes: dict[str, Change]) -> None:
    """Change every tensor whose name begins with a key, and sign the checkpoint anew."""
    written = dict.fromkeys(changes, False)
    for part in manifest_of(folder).parts:
        raw = bytearray((folder / part.file).read_bytes())
        for place in part.tensors:
            at = slice(part.data_start + place.start, part.data_start + place.end)
            for prefix, change in changes.items():
                if place.name.startswith(prefix):
                    before = bytes(raw[at])
                    raw[at] = change(as_array(place.dtype, before)).tobytes()
                    written[prefix] |= raw[at] != before
        (folder / part.file).write_bytes(raw)
    assert all(written.values()), f"nothing was changed: {written}"
    rehash(folder)


def read_tensor(folder: Path, name: str) -> Bits:
    """The elements of one tensor."""
    for part in manifest_of(folder).parts:
        for place in part.tensors:
            if place.name == name:
                raw = (folder / part.file).read_bytes()[part.data_start :]
                return as_array(place.dtype, raw[place.start : place.end])
    raise KeyError(name)


def rehash(folder: Path) -> None:
    """Write the hashes that the files have now into the manifest."""

    def write(manifest: Json) -> None:
        for shard in manifest["shards"]:
            for part in shard["parts"]:
                raw = (folder / part["file"]).read_bytes()
                part["xxh3_128"] = xxhash.xxh3_128_hexdigest(raw)

    change_in(folder, write)
