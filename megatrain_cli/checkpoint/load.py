"""Load a checkpoint into the tiles while the run begins to use what is there already.

Threads read chunks in the order in which they are needed: weights layer by layer, then the rest in
the order of updates. A tile is announced to the store's clock once all its bytes were read *and*
their hash is the manifest's, so nothing is ever computed from bytes that were not checked.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.layer_writer import check_finite, find_not_finite
from megatrain_cli.checkpoint.manifest import Shard
from megatrain_cli.checkpoint.part_reader import PartReader
from megatrain_cli.checkpoint.parts import TilePart, tile_parts
from megatrain_cli.errors import IncompatibleError, Stopped
from megatrain_cli.store.master import LayerTile, MasterStore
from megatrain_cli.units import MIB, show_number


@dataclass(frozen=True)
class LoadReport:
    """A checkpoint whose every byte is in the tiles and was checked.

    Attributes:
        num_bytes: That were read.
        seconds: From the start until the last layer was there.
        not_finite: Of each layer with weights that are not finite, the first such parameter.
    """

    num_bytes: int
    seconds: float
    not_finite: tuple[str, ...] = ()


class LazyLoader:
    """Reads a checkpoint into a store on threads of its own, from `start` on.

    The store's clock makes everybody wait for what is not there yet. A failure is raised there, at
    whoever waits, and by `wait`; nothing has been computed from the bad part then.

    Args:
        checkpoint: Open, and stays so until `wait` or `close` has returned.
        store: Its tiles hold zeros, or the same model's state; what they hold is overwritten.
        fs: What it is read with.
        update_order: Layers in the order of the first updates.
        use_order: Layers in the order in which their weights are first used; None is the model's.
        threads: That read.
        chunk_bytes: The most that is read at once; a multiple of 4096.
        window: Chunks that may be read ahead of those that are checked.
        direct: Read past the page cache where that can be done.
        before_layer: Called with each layer before its tile is first written, one at a time, as to
            page-lock it.
        finite: Refuse weights that are not finite, with `NumericsError`; they are reported if not.

    Raises:
        IncompatibleError: The checkpoint's layers are not the store's.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        store: MasterStore,
        *,
        fs: FileSystem,
        update_order: Sequence[int],
        use_order: Sequence[int] | None = None,
        threads: int = 8,
        chunk_bytes: int = 8 * MIB,
        window: int | None = None,
        direct: bool = True,
        before_layer: Callable[[int], None] | None = None,
        finite: bool = False,
    ) -> None:
        self._store, self._before_layer, self._finite = store, before_layer, finite
        self._readers: list[tuple[int, str, PartReader]] = []
        shards = checkpoint.manifest.shards
        targets = match_tiles(shards, store)
        for layer, kinds in _reading_order(use_order or range(len(shards)), update_order):
            for part, target in zip(shards[layer].parts, targets[layer], strict=True):
                if part.part in kinds:
                    reader = PartReader(
                        checkpoint, part, target, fs, chunk_bytes=chunk_bytes, direct=direct
                    )
                    self._readers.append((layer, part.part, reader))
        self._steps = [shard.layer_step for shard in shards]
        # All below is guarded by `_changed`.
        self._changed = threading.Condition(threading.Lock())
        self._queue = iter(
            [(i, n) for i, (_, _, r) in enumerate(self._readers) for n in range(len(r.chunks))]
        )
        self._free = window or 2 * threads
        self._parts_left = [len(shard.parts) - 1 for shard in shards]  # besides weights
        self._left = len(self._readers)
        self._num_bytes = 0
        self._not_finite: dict[int, str] = {}
        self._failure: BaseException | None = None
        self._ended: float | None = None
        self._prepared: set[int] = set()
        self._preparing = threading.Lock()  # one call of `before_layer` at a time
        self._began = time.perf_counter()
        self._threads = [
            threading.Thread(target=self._work, name=f"load-{i}", daemon=True)
            for i in range(threads)
        ]
        store.clock.await_arrival()

    @property
    def num_bytes(self) -> int:
        """Bytes that have been read so far."""
        with self._changed:
            return self._num_bytes

    def start(self) -> None:
        """Begin to read; returns at once."""
        for thread in self._threads:
            thread.start()

    def wait(self) -> LoadReport:
        """Return when all is there.

        Raises:
            CorruptError: The first part that is not what was saved, or cannot be read.
            NumericsError: A weight is not finite, and `finite` was asked for.
            Stopped: `close` came first.
            BaseException: What `before_layer` raised.
        """
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._ended is not None
        named = tuple(name for _, name in sorted(self._not_finite.items()))
        return LoadReport(self._num_bytes, self._ended - self._began, named)

    def close(self) -> None:
        """Stop reading; who still waits for a layer gets an error. No thread is left.

        Calling it again, or after the end, does nothing.
        """
        self._fail(Stopped("Loading the checkpoint was stopped before it was complete."))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _work(self) -> None:
        try:
            while (chunk := self._next()) is not None:
                self._load(*chunk)
        except BaseException as error:  # noqa: BLE001  raised by the clock and by `wait`
            self._fail(error)

    def _next(self) -> tuple[int, int] | None:
        """The next chunk once there is room in the window; None when there is no more."""
        with self._changed:
            while not self._free and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                return None
            chunk = next(self._queue, None)
            if chunk is not None:
                self._free -= 1
            return chunk

    def _load(self, index: int, number: int) -> None:
        layer, kind, reader = self._readers[index]
        self._prepare(layer)
        num_bytes = reader.read(number)
        with self._changed:
            self._num_bytes += num_bytes
        hashed, ended = reader.hash_read(number)
        if ended:
            self._announce(layer, kind)
        with self._changed:
            self._free += hashed
            self._changed.notify_all()

    def _prepare(self, layer: int) -> None:
        if self._before_layer is None or layer in self._prepared:
            return
        with self._preparing:
            if layer in self._prepared or self._failure is not None:
                return
            try:
                self._before_layer(layer)
            except BaseException as error:
                self._fail(error)  # before another thread prepares the next layer
                raise
            self._prepared.add(layer)

    def _announce(self, layer: int, kind: str) -> None:
        """Tell the clock what of a layer is there and right."""
        clock = self._store.clock
        if kind == "weights":
            tile = self._store.tiles[layer]
            if self._finite:
                check_finite(tile, "Go on from an earlier checkpoint, or add `--force`.")
            elif (name := find_not_finite(tile)) is not None:
                with self._changed:
                    self._not_finite[layer] = name
            clock.weights_arrived(layer)
        else:
            with self._changed:
                self._parts_left[layer] -= 1
                complete = not self._parts_left[layer]
            if complete:
                clock.state_arrived(layer, self._steps[layer])
        with self._changed:
            self._left -= 1
            if not self._left:
                self._ended = time.perf_counter()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is not None or self._ended is not None:
                return
            self._failure = error
            self._changed.notify_all()
        self._store.clock.fail(error)


def match_tiles(shards: Sequence[Shard], store: MasterStore) -> list[list[TilePart]]:
    """Where each part of each shard belongs.

    Raises:
        IncompatibleError: A layer, tensor, dtype or shape is not the store's.
    """
    names = [tile.layout.layer.name for tile in store.tiles]
    if [shard.name for shard in shards] != names:
        raise IncompatibleError(
            f"The checkpoint has {show_number(len(shards), 'layer')}, {shards[0].name} to "
            f"{shards[-1].name}, and the model {len(names)}, {names[0]} to {names[-1]}. Use the "
            "model it was made with."
        )
    return [_match(shard, tile) for shard, tile in zip(shards, store.tiles, strict=True)]


def _match(shard: Shard, tile: LayerTile) -> list[TilePart]:
    if shard.has_grads and tile.gradient is None:
        raise IncompatibleError(
            f"The checkpoint was made in the middle of an update: {shard.name} has a gradient that "
            "waits for it. Set `optimizer.update: deferred` to go on from there."
        )
    targets = tile_parts(tile, shard.has_grads)
    for part, target in zip(shard.parts, targets, strict=True):
        if part.tensors != target.tensors:
            wanted, found = next(
                (
                    (wanted, found)
                    for wanted, found in zip(target.tensors, part.tensors, strict=False)
                    if wanted != found
                ),
                (target.tensors[-1], part.tensors[-1]),
            )
            raise IncompatibleError(
                f"{part.file} has {show_number(len(part.tensors), 'tensor')}, as {found.name} "
                f"{found.dtype} {list(found.shape)}, where this run has {len(target.tensors)}, as "
                f"{wanted.name} {wanted.dtype} {list(wanted.shape)}. Use the model, `model.dtype` "
                "and `optimizer.master` that the checkpoint was made with."
            )
    return targets


def _reading_order(
    use_order: Sequence[int], update_order: Sequence[int]
) -> list[tuple[int, tuple[str, ...]]]:
    """Layers, each with the parts to read: all weights in order of use, then all the rest."""
    weights = [(layer, ("weights",)) for layer in use_order]
    return [*weights, *((layer, ("optim", "grads")) for layer in update_order)]
