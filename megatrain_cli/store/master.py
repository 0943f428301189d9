"""The parameters' home in host RAM: one tile a layer, cut from one arena.

Between steps the store is the only truth: weights, masters and moments live here and nowhere else.
"""

from dataclasses import dataclass

import torch

from megatrain_cli.errors import InternalError
from megatrain_cli.model.layout import Entry, LayerLayout
from megatrain_cli.plan.tiles import TileFormat, store_bytes, tile_regions
from megatrain_cli.store.arena import Arena
from megatrain_cli.store.clock import TileClock
from megatrain_cli.store.split import join_fp32, split_fp32

_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Conversions go piece by piece, so that their temporaries stay small beside a tile (here 16 MiB).
_PIECE = 1 << 22


@dataclass(frozen=True, eq=False)
class LayerTile:
    """One layer's part of the store: flat views `(numel,)` of one contiguous, page-aligned cut.

    The views share the arena's memory, gaps included, and the gaps of all of them are always zero.

    Attributes:
        index: The layer's place in the model, from 0.
        weights: Compute dtype. With `bf16` and `bf16_stochastic` the only copy there is.
        gradient: Compute dtype; None when gradients are used up before they reach the tile.
        remainder: `int16`, with `fp32_split` only.
        master: FP32, beside BF16 weights with `fp32` only.
        exp_avg: FP32, Adam's first moment.
        exp_avg_sq: FP32, Adam's second moment.
        linked: The pages of weights and gradient as `uint8`: all that crosses the link.
    """

    index: int
    layout: LayerLayout
    format: TileFormat
    weights: torch.Tensor
    gradient: torch.Tensor | None
    remainder: torch.Tensor | None
    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    linked: torch.Tensor

    def view(self, name: str) -> torch.Tensor:
        """The parameter's weights, in its shape; writes go to the tile."""
        entry = self._entry(name)
        return self.weights[entry.offset : entry.end].view(entry.param.shape)

    def write_master(self, name: str, values: torch.Tensor) -> None:
        """Set a parameter's master, and with it its weights.

        Args:
            name: The parameter's full name.
            values: Any floating dtype, in the parameter's shape. Exact in all modes that keep FP32;
                otherwise rounded to the nearest BF16, ties to even.
        """
        entry = self._entry(name)
        if tuple(values.shape) != entry.param.shape:
            raise InternalError(f"{name} is {entry.param.shape}, not {tuple(values.shape)}.")
        flat = values.detach().reshape(-1)
        for start in range(0, entry.param.numel, _PIECE):
            piece = flat[start : start + _PIECE].to(torch.float32)
            at = slice(entry.offset + start, entry.offset + start + piece.numel())
            if self.remainder is not None:
                self.weights[at], self.remainder[at] = split_fp32(piece)
            else:
                self.weights[at] = piece
                if self.master is not None:
                    self.master[at] = piece

    def read_master(self, name: str) -> torch.Tensor:
        """The parameter's master as a new FP32 tensor in its shape, exactly."""
        entry = self._entry(name)
        at = slice(entry.offset, entry.end)
        values = torch.empty(entry.param.numel, dtype=torch.float32)
        if self.remainder is not None:
            for start in range(0, entry.param.numel, _PIECE):
                piece = slice(entry.offset + start, min(entry.offset + start + _PIECE, entry.end))
                values[start : start + _PIECE] = join_fp32(
                    self.weights[piece], self.remainder[piece]
                )
        elif self.master is not None:
            values.copy_(self.master[at])
        else:
            values.copy_(self.weights[at])
        return values.view(entry.param.shape)

    def _entry(self, name: str) -> Entry:
        try:
            return self.layout.by_name[name]
        except KeyError as error:
            raise InternalError(f"{self.layout.layer.name} has no parameter {name}.") from error


class MasterStore:
    """All tiles, in the model's order, in one arena of exactly the planned size.

    Starts as zeros; `store.load` fills it.

    Attributes:
        clock: Says who may touch which tile when.

    Raises:
        PlanError: The system refused the memory.
    """

    def __init__(self, layouts: tuple[LayerLayout, ...], fmt: TileFormat) -> None:
        self.format = fmt
        self.num_bytes = sum(store_bytes(layouts, fmt).values())
        self._arena = Arena(self.num_bytes)
        self.tiles = tuple(
            make_tile(
                self._arena.take(sum(tile_regions(layout.numel, fmt).values())), index, layout, fmt
            )
            for index, layout in enumerate(layouts)
        )
        self.clock = TileClock([layout.layer.name for layout in layouts])

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked now: all linked ranges, or 0."""
        return self._arena.locked_bytes

    def register(self) -> None:
        """Page-lock weights and gradients of all tiles in place, or of none. Contents stay.

        Raises:
            DeviceError: One of the ranges was refused; nothing is locked. The store works as
                before, as pageable memory.
        """
        for tile in self.tiles:
            self.register_layer(tile.index)

    def register_layer(self, layer: int) -> None:
        """Page-lock weights and gradients of one tile in place; `register` does all of them.

        Raises:
            DeviceError: The driver refused; nothing of any layer is locked any more.
        """
        tile = self.tiles[layer]
        if tile.linked.numel():
            name = tile.layout.layer.name
            self._arena.register(tile.linked, name, "set `store.memory: pageable`")

    def close(self) -> None:
        """Unlock everything and let go of the memory. The tiles must not be used any more."""
        self._arena.close()
        self.tiles = ()


def make_tile(cut: torch.Tensor, index: int, layout: LayerLayout, fmt: TileFormat) -> LayerTile:
    """A tile over memory of exactly its size: `uint8`, page-aligned, contiguous."""
    regions = tile_regions(layout.numel, fmt)
    compute = _DTYPE[fmt.compute_dtype]
    offsets: dict[str, int] = {}
    offset = 0
    for name, num_bytes in regions.items():
        offsets[name] = offset
        offset += num_bytes

    def region(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        if name not in regions:
            return None
        start = offsets[name]
        return cut[start : start + layout.numel * dtype.itemsize].view(dtype)

    def needed(name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = region(name, dtype)
        assert tensor is not None
        return tensor

    return LayerTile(
        index=index,
        layout=layout,
        format=fmt,
        weights=needed("weights", compute),
        gradient=region("gradient", compute),
        remainder=region("remainder", torch.int16),
        master=region("master", torch.float32),
        exp_avg=needed("exp_avg", torch.float32),
        exp_avg_sq=needed("exp_avg_sq", torch.float32),
        linked=cut[: regions["weights"] + regions.get("gradient", 0)],
    )
