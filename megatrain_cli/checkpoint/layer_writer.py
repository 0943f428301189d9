"""Write one layer's shard: look at its weights, then put each part into its file."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatrain_cli.checkpoint.headers import make_padded_header
from megatrain_cli.checkpoint.manifest import Part, Shard
from megatrain_cli.checkpoint.parts import TilePart, tile_parts
from megatrain_cli.checkpoint.write import FileWriter, Piece
from megatrain_cli.errors import InternalError, NumericsError
from megatrain_cli.store.master import LayerTile

# Elements that are looked at at once, on each thread that saves or loads: few enough for the cores'
# caches.
_LOOK = 1 << 18

_ADVICE = "The weights were not written. Go on from the last checkpoint with a lower learning rate."


@dataclass(frozen=True)
class LayerWriter:
    """Writes the shards of one save.

    Attributes:
        folder: Of the checkpoint, with `training/` in it.
        paranoid: Compare a tile's hash before and after it was written.
    """

    writer: FileWriter
    folder: Path
    run_id: str
    save_id: str
    paranoid: bool

    def write(
        self, tile: LayerTile, step: int, *, pending: bool, progress: Callable[[int], None]
    ) -> Shard:
        """Write all parts; nobody may change the tile meanwhile.

        Args:
            tile: The layer's, or a copy of it.
            step: Updates that it has had.
            pending: Its gradient waits for an update and is saved too.
            progress: Called with the bytes written so far of a file, after each chunk; may raise
                to stop.

        Raises:
            NumericsError: A weight is not finite.
            InternalError: The tile changed all the same.
            OSError: The disk refused.
        """
        name = tile.layout.layer.name
        check_finite(tile, _ADVICE)
        parts = []
        for part in tile_parts(tile, pending):
            metadata = {
                "megatrain.format": "1",
                "megatrain.run_id": self.run_id,
                "megatrain.save_id": self.save_id,
                "megatrain.step": str(step),
                "megatrain.shard": name,
                "megatrain.part": part.part,
            }
            header = make_padded_header(part.tensors, metadata)
            parts.append(self._write_part(part, header, progress))
        return Shard(name=name, index=tile.index, layer_step=step, parts=tuple(parts))

    def _write_part(self, part: TilePart, header: bytes, progress: Callable[[int], None]) -> Part:
        pieces: list[Piece] = [header, *part.pieces]
        before = _hash(pieces) if self.paranoid else None
        written = self.writer.write(self.folder / part.file, part.file, pieces, progress)
        if before is not None and not before == written.xxh3_128 == _hash(pieces):
            raise InternalError(f"{part.file} changed while it was written.")
        return Part(
            part=part.part,
            file=part.file,
            bytes=written.num_bytes,
            data_start=len(header),
            xxh3_128=written.xxh3_128,
            tensors=part.tensors,
        )


def check_finite(tile: LayerTile, advice: str) -> None:
    """Refuse weights that are infinite or not a number.

    Args:
        tile: Whose weights.
        advice: What to do then.

    Raises:
        NumericsError: Names the first parameter that has one.
    """
    name = find_not_finite(tile)
    if name is not None:
        raise NumericsError(f"{name} has values that are not finite. {advice}")


def find_not_finite(tile: LayerTile) -> str | None:
    """The first parameter whose weights are infinite or not a number somewhere."""
    for entry in tile.layout.entries:
        for piece in tile.weights[entry.offset : entry.end].split(_LOOK):
            # Both are NaN where there is one. `isfinite` takes 18 times as long in BF16, a quarter
            # of what the threads of a save did (500M on two cores).
            if not all(math.isfinite(extreme) for extreme in piece.aminmax()):
                return entry.param.name
    return None


def _hash(pieces: list[Piece]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
