"""How fast checkpoints are written to a folder's disk, and read from it.

Layers are written by the code that does it in a run, on as many threads, and read by one that does
the same as a run: in large requests past the page cache, hashed on the way.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self, TypeVar

import xxhash

from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from megatrain_cli.checkpoint.layer_writer import LayerWriter
from megatrain_cli.checkpoint.parts import tile_parts
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import StorageError
from megatrain_cli.measure.stopwatch import Clock, Stopwatch
from megatrain_cli.plan.checkpoints import IO_CHUNK_BYTES, IO_CHUNKS
from megatrain_cli.plan.rates import DiskRates
from megatrain_cli.store.arena import Arena
from megatrain_cli.store.master import LayerTile, MasterStore
from megatrain_cli.units import round_up, show_bytes

T = TypeVar("T")

_DIRECT = getattr(os, "O_DIRECT", 0)
_SHARE_OF_FREE = 8
# Writing is what a run waits for; and a disk may take the first gigabytes faster than all others.
_SHARE_OF_READS = 0.25


def measure_disk(
    folder: Path, num_bytes: int, store: MasterStore, stopwatch: Stopwatch, budget: float
) -> DiskRates:
    """Write and read files without names, which vanish even if this process is killed.

    Args:
        folder: On the disk in question.
        num_bytes: Of all files; less where less is free, or where the disk is slow.
        store: Whose layers are written, as often as it takes; from `filled_store`.
        stopwatch: Whose clock counts.
        budget: Seconds for all.

    Raises:
        StorageError: The folder cannot be written, or has no room for a layer.
    """
    try:
        with _Nameless(folder) as fs:
            layer = sum(part.num_bytes for part in tile_parts(store.tiles[0]))
            free = shutil.disk_usage(folder).free
            count = min(num_bytes, free // _SHARE_OF_FREE) // layer
            if not count:
                least = show_bytes(layer * _SHARE_OF_FREE)
                raise StorageError(
                    f"{folder} has {show_bytes(free)} free, and {least} is needed, of which an "
                    "eighth is written. Name a folder on another disk with `--disk`."
                )
            writer = FileWriter(fs)
            tiles = [store.tiles[i % len(store.tiles)] for i in range(count)]
            clock, reads = stopwatch.clock, budget * _SHARE_OF_READS
            write = _write(fs, writer, tiles, clock, budget - reads)
            read = _read(fs, clock, reads)
            return DiskRates(write, read, direct=writer.mode != "buffered")
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}.") from error


class _TimeIsUp(Exception):  # noqa: N818  no error
    pass


class _Nameless(FileSystem):
    """Its files have no names, and stay open in its block.

    Attributes:
        written: Bytes in each file, by a descriptor of it.

    Args:
        folder: Of all files, whatever their paths say.
    """

    def __init__(self, folder: Path) -> None:
        self.written: dict[int, int] = {}
        self._folder = folder
        self._file: dict[int, int] = {}  # by the descriptor that is written to
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._open.close()

    def create(self, path: Path, direct: bool) -> int:
        """As that of any file system, but the path stays free."""
        del path
        file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  stays open
        self._open.enter_context(file)
        if direct:
            flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | _DIRECT)
        fd = os.dup(file.fileno())
        self._file[fd] = file.fileno()
        return fd

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        """As that of any file system."""
        taken = super().write(fd, buffer, offset)
        self.written[self._file[fd]] = offset + taken
        return taken


def _write(
    fs: _Nameless, writer: FileWriter, tiles: Iterable[LayerTile], clock: Clock, budget: float
) -> float:
    """Write layers, or begin one a thread and go on until the time is up; bytes a second."""
    end = clock() + budget

    def progress(num_bytes: int) -> None:
        del num_bytes
        if clock() >= end:
            raise _TimeIsUp

    layers = LayerWriter(writer, Path(), "", "", paranoid=False)

    def write(number: int, tile: LayerTile) -> None:
        if number < IO_CHUNKS or clock() < end:
            with suppress(_TimeIsUp):
                layers.write(tile, number, pending=False, progress=progress)

    began = clock()
    _on_threads(write, enumerate(tiles))
    for fd in fs.written:
        fs.sync(fd)  # those that were given up
    return sum(fs.written.values()) / (clock() - began)


def _read(fs: _Nameless, clock: Clock, budget: float) -> float:
    """Read what was written, or a chunk a thread and then until the time is up; bytes a second."""
    end = clock() + budget
    read: list[int] = []

    def read_one(number: int, file: tuple[int, int]) -> None:
        fd, written = file
        size, at = min(written, fs.status(fd).st_size), 0
        if number >= IO_CHUNKS and clock() >= end:
            return
        fs.drop_cache(fd, 0, size)
        buffer = memoryview(Arena(IO_CHUNK_BYTES).take(IO_CHUNK_BYTES).numpy().data)
        digest = xxhash.xxh3_128()
        while at < size and (not at or clock() < end):
            done = fs.read(fd, buffer[: round_up(size - at, BLOCK)], at)
            if not done:
                raise OSError(errno.EIO, "what was written is not there")
            digest.update(buffer[:done])
            at += done
        read.append(at)

    began = clock()
    _on_threads(read_one, enumerate(fs.written.items()))
    return sum(read) / (clock() - began)


def _on_threads(work: Callable[[int, T], None], items: Iterable[tuple[int, T]]) -> None:
    with ThreadPoolExecutor(IO_CHUNKS) as threads:
        for done in [threads.submit(work, *item) for item in items]:
            done.result()
