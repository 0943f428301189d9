"""A disk that fails, waits or acts when a save comes to one of its files."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain_cli.checkpoint.fsio import FileSystem


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []  # noqa: PTH208  hidden files too


class Disk(FileSystem):
    """Fails, waits or acts at some of its operations."""

    def __init__(self, **before: Callable[[Any], None]) -> None:
        self._before = before
        self.names: dict[int, str] = {}

    def create(self, path: Path, direct: bool) -> int:
        self._do("create", path.name)
        fd = super().create(path, direct)
        self.names[fd] = path.name
        return fd

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._do("write", self.names[fd])
        return super().write(fd, buffer, offset)

    def sync(self, fd: int) -> None:
        self._do("sync", self.names[fd])
        super().sync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._do("close", self.names.get(fd, "a folder"))

    def sync_folder(self, path: Path) -> None:
        self._do("sync_folder", path.name)
        super().sync_folder(path)

    def _do(self, operation: str, name: str) -> None:
        if operation in self._before:
            self._before[operation](name)


def fails(code: int, name: str, times: int = 1) -> Callable[[str], None]:
    left = [times]

    def fail(at: str) -> None:
        if name in at and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))

    return fail


@contextmanager
def stopped_at(name: str) -> Iterator[tuple[Disk, threading.Event, threading.Event]]:
    """A disk that waits when it is to write a file; the events: it waits, and it may go on."""
    waits, go = threading.Event(), threading.Event()

    def wait(at: str) -> None:
        if name in at:
            waits.set()
            assert go.wait(60)

    try:
        yield Disk(write=wait), waits, go
    finally:
        go.set()
