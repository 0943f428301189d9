"""One snapshot of a run: which step each tile is taken at, where copies are, and its files."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

from megatrain_cli.checkpoint.facts import Facts
from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.checkpoint.layer_writer import LayerWriter
from megatrain_cli.checkpoint.manifest import AuxFile, Shard
from megatrain_cli.checkpoint.parts import tile_parts
from megatrain_cli.checkpoint.pool import BouncePool, copy_tile
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.store.hold import HoldCancelled
from megatrain_cli.store.master import LayerTile, MasterStore

# Of a file's header, for the question whether there is room: a tensor takes about 150 bytes of it.
_HEADER_BYTES = 64 << 10


@dataclass(frozen=True)
class Snapshot:
    """What to save besides the tiles.

    Attributes:
        facts: Of the run, after the update of `facts.step`. With `facts.pending`, layers that have
            not begun that update are saved with their gradients; `facts.step` is then found anew.
        aux: Every file that is no tensor, by name; the index of weights is added.
    """

    facts: Facts
    aux: Mapping[str, bytes]


class Capture:
    """The claim of one save on all tiles.

    Args:
        store: Whose tiles.
        pool: Where updates may copy tiles to, for this save alone.
        facts: As in `Snapshot`.
        order: Layers in the order of the next updates.

    Attributes:
        num_chunks: Written so far. Several threads count, and some counts may be lost.

    Raises:
        MixedStateError: The layers do not belong to one step.
    """

    def __init__(
        self, store: MasterStore, pool: BouncePool, facts: Facts, order: Sequence[int]
    ) -> None:
        self._store, self._pool, self._facts = store, pool, facts
        self._copies: dict[int, LayerTile] = {}
        self.num_chunks = 0
        pending = facts.pending is not None
        step = facts.step if facts.pending is None else facts.pending.step
        self.hold = store.clock.hold(step, pending=pending, room=self._room, order=order)

    @property
    def facts(self) -> Facts:
        """The facts of the tiles as they were claimed."""
        waits = any(map(self._waits, self.hold.steps))
        pending = self._facts.pending if waits else None
        return self._facts.model_copy(update={"step": max(self.hold.steps), "pending": pending})

    @property
    def num_bytes(self) -> int:
        """Of all shards, with ample headers."""
        parts = [
            part
            for tile in self._store.tiles
            for part in tile_parts(tile, self._waits(self.hold.steps[tile.index]))
        ]
        return sum(part.num_bytes + _HEADER_BYTES for part in parts)

    def renew(self) -> bool:
        """Claim the same tiles once more; False if one has been updated."""
        return self._store.clock.renew(self.hold, self._forget)

    def end(self) -> None:
        """Let go of all tiles and copies."""
        self._store.clock.drop(self.hold)
        self._forget()

    def check(self) -> None:
        """Raise HoldCancelled if the save is to stop."""
        if self.hold.cancelled:
            raise HoldCancelled

    def write_layers(
        self, writer: LayerWriter, order: Sequence[int], workers: Executor, width: int
    ) -> list[Shard]:
        """Write all shards, each as soon as its tile is at its step.

        Args:
            writer: Where to.
            order: Of the layers.
            workers: Write layers.
            width: Layers that are written at the same time.

        Raises:
            HoldCancelled: The save is to stop.
            Exception: What the writing of a layer failed with; no layer is being written then.
        """
        failed = threading.Event()

        def write(layer: int, copied: bool) -> Shard:
            try:
                return self._write_layer(writer, layer, copied, failed)
            except BaseException:
                failed.set()  # the others stop at their next chunk
                raise

        futures: list[Future[Shard]] = []
        try:
            for layer in order:
                if len(futures) >= width:
                    futures[-width].exception()  # waits for it
                if failed.is_set():
                    break
                copied = self._store.clock.acquire(self.hold, layer)
                futures.append(workers.submit(write, layer, copied))
        finally:
            errors = [error for future in futures if (error := future.exception()) is not None]
        # Those that were stopped by the first failure are not its reason.
        for error in sorted(errors, key=lambda error: isinstance(error, HoldCancelled)):
            raise error
        return sorted((future.result() for future in futures), key=lambda shard: shard.index)

    def _write_layer(
        self, writer: LayerWriter, layer: int, copied: bool, failed: threading.Event
    ) -> Shard:
        def progress(num_bytes: int) -> None:
            self.num_chunks += 1
            self.check()
            if failed.is_set():
                raise HoldCancelled

        copy = self._copies[layer] if copied else None
        step = self.hold.steps[layer]
        tile = copy or self._store.tiles[layer]
        shard = writer.write(tile, step, pending=self._waits(step), progress=progress)
        if copy is not None:
            self._pool.give_back(copy)
        self._store.clock.release(self.hold, layer)
        return shard

    def _waits(self, step: int) -> bool:
        """Whether a layer at that step is saved with its gradient."""
        return self._facts.pending is not None and step < self._facts.pending.step

    def _room(self, layer: int, step: int) -> Callable[[], None] | None:
        """See `store.clock.Room`."""
        tile = self._store.tiles[layer]
        copy = self._pool.take(tile, gradient=self._waits(step))
        if copy is None:
            return None

        def make() -> None:
            copy_tile(tile, copy)
            self._copies[layer] = copy

        return make

    def _forget(self) -> None:
        self._copies.clear()
        self._pool.clear()


def write_aux(
    writer: FileWriter, folder: Path, aux: Mapping[str, bytes], shards: Sequence[Shard]
) -> list[AuxFile]:
    """Write all files that are no shards, and the index of the weights.

    Raises:
        OSError: The disk refused.
    """
    weights = [shard.weights for shard in shards]
    total = sum(part.bytes - part.data_start for part in weights)
    weight_map = {place.name: part.file for part in weights for place in part.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files = {**aux, INDEX_NAME: json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"}
    written = []
    for name in sorted(files):
        one = writer.write(folder / name, name, [files[name]])
        written.append(AuxFile(file=name, bytes=one.num_bytes, xxh3_128=one.xxh3_128))
    return written
