"""A tile as the parts of its shard: which tensors are in which file, and where their bytes lie.

The one place that knows how tiles and files correspond, for writing and for reading back. A file
has its tensors region by region, parameters in tile order, and no gaps; the tile's gaps are zero
and are not stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatrain_cli.checkpoint.places import TensorPlace
from megatrain_cli.checkpoint.shards import PartName
from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.store.master import LayerTile

DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int16: "I16"}


@dataclass(frozen=True, eq=False)
class TilePart:
    """One file of a layer's shard, as it lies in memory.

    Attributes:
        file: Name relative to the checkpoint.
        tensors: In the order of their bytes, counted from the beginning of the payload.
        pieces: The payload, in that order: writable views of the tile's memory, each as long as
            there is no gap.
    """

    part: PartName
    file: str
    tensors: tuple[TensorPlace, ...]
    pieces: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return self.tensors[-1].end


def part_file(part: PartName, layer_name: str) -> str:
    """Name of a part's file, relative to the checkpoint."""
    folder = "model" if part == "weights" else f"training/{part}"
    return f"{folder}-{layer_name}.safetensors"


def tile_parts(tile: LayerTile, pending: bool = False) -> list[TilePart]:
    """All parts of a layer's shard, over the tile's memory.

    Args:
        tile: Outlives what is returned.
        pending: Its gradient waits for an update and is a part too.

    Raises:
        InternalError: The tile has no room for a gradient that is said to wait in it.
    """
    optim = {
        "master_lo.": tile.remainder,
        "master.": tile.master,
        "exp_avg.": tile.exp_avg,
        "exp_avg_sq.": tile.exp_avg_sq,
    }
    parts = [
        _part("weights", tile.layout, {"": tile.weights}),
        _part("optim", tile.layout, {key: flat for key, flat in optim.items() if flat is not None}),
    ]
    if pending:
        if tile.gradient is None:
            raise InternalError(f"{tile.layout.layer.name} has no room for a pending gradient.")
        parts.append(_part("grads", tile.layout, {"grad.": tile.gradient}))
    return parts


def _part(part: PartName, layout: LayerLayout, regions: dict[str, torch.Tensor]) -> TilePart:
    tensors: list[TensorPlace] = []
    pieces: list[memoryview] = []
    end = 0
    for prefix, flat in regions.items():
        width = flat.element_size()
        for entry in layout.entries:
            param, start, end = entry.param, end, end + entry.param.numel * width
            name, dtype = f"{prefix}{param.name}", DTYPE_NAMES[flat.dtype]
            tensors.append(TensorPlace(name, dtype, param.shape, start, end))
        data = flat.view(torch.uint8).numpy().data
        pieces += [data[first * width : last * width] for first, last in _runs(layout)]
    return TilePart(part, part_file(part, layout.layer.name), tuple(tensors), tuple(pieces))


def _runs(layout: LayerLayout) -> Iterator[tuple[int, int]]:
    """Ranges of elements that parameters fill without a gap, in tile order."""
    first = 0
    for start, end in layout.gaps:
        yield first, start
        first = end
    if first < layout.numel:
        yield first, layout.numel
