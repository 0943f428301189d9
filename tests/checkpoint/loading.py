"""Load checkpoints with a disk that tells, refuses, holds up or shortens reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from megatrain_cli.checkpoint.load import LazyLoader, LoadReport
from megatrain_cli.store.master import MasterStore
from tests.checkpoint.tiles import ORDER


class ReadDisk(FileSystem):
    """Tells and may refuse, hold up or shorten each read.

    Attributes:
        reads: File, offset and length of each.
    """

    def __init__(self, at_read: Callable[[str, int, memoryview], int | None] | None = None) -> None:
        self._at_read = at_read or (lambda name, offset, buffer: None)
        self._names: dict[int, str] = {}
        self._direct: set[int] = set()
        self.reads: list[tuple[str, int, int, bool]] = []

    def open_file(self, folder_fd: int, name: str, direct: bool) -> int:
        fd = super().open_file(folder_fd, name, direct)
        self._names[fd] = name
        self._direct -= {fd}
        if direct:
            self._direct.add(fd)
        return fd

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        name = self._names[fd]
        self.reads.append((name, offset, buffer.nbytes, fd in self._direct))
        size = self._at_read(name, offset, buffer)
        return super().read(fd, buffer if size is None else buffer[:size], offset)


@contextmanager
def loading(
    folder: Path, store: MasterStore, fs: FileSystem | None = None, **options: Any
) -> Iterator[LazyLoader]:
    fs = fs or FileSystem()
    with open_checkpoint(folder, fs) as checkpoint:
        options = {"threads": 3, "chunk_bytes": BLOCK} | options
        loader = LazyLoader(checkpoint, store, fs=fs, update_order=ORDER, **options)
        try:
            yield loader
        finally:
            loader.close()


def load(
    folder: Path, store: MasterStore, fs: FileSystem | None = None, **options: Any
) -> LoadReport:
    with loading(folder, store, fs, **options) as loader:
        loader.start()
        return loader.wait()
