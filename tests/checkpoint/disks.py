"""File systems for tests: the real one, with each operation seen, refused or cut short."""

import fcntl
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem

OPERATIONS = [name for name in vars(FileSystem) if not name.startswith("_")]

# What takes room; the rest still works on a full disk.
TAKES_ROOM = {"make_folder", "create", "allocate", "write", "sync"}


class WatchedFileSystem(FileSystem, ABC):
    """The real file system; `before` is called ahead of each operation and may raise."""

    @abstractmethod
    def before(self, name: str, args: tuple[object, ...]) -> None:
        """May raise what the operation is to fail with."""


def _watched(name: str) -> Callable[..., object]:
    real = getattr(FileSystem, name)

    @functools.wraps(real)
    def call(self: WatchedFileSystem, *args: object, **kwargs: object) -> object:
        self.before(name, (*args, *kwargs.values()))
        return real(self, *args, **kwargs)

    return call


for _name in OPERATIONS:
    setattr(WatchedFileSystem, _name, _watched(_name))


class FaultyFileSystem(WatchedFileSystem):
    """Refuses the n-th of the operations that count, or all from there on.

    Attributes:
        calls: Operations that counted so far.
        failed_syncs: Descriptors whose sync was refused; a second sync of one is an error.
    """

    def __init__(
        self,
        code: int,
        at: int,
        *,
        lasting: bool = False,
        only: Callable[[str, tuple[object, ...]], bool] = lambda _name, _args: True,
    ) -> None:
        self.code = code
        self.at = at
        self.lasting = lasting
        self.only = only
        self.calls = 0
        self.failed_syncs: set[object] = set()

    @property
    def met(self) -> bool:
        """Whether the fault was reached."""
        return self.calls > self.at

    def before(self, name: str, args: tuple[object, ...]) -> None:
        if name == "sync":
            assert args[0] not in self.failed_syncs, "a failed sync was tried again"
        if name == "close":  # the number may be given to another file
            self.failed_syncs.discard(args[0])
        if not self.only(name, args):
            return
        index, self.calls = self.calls, self.calls + 1
        if index == self.at or (self.lasting and index > self.at):
            if name == "sync":
                self.failed_syncs.add(args[0])
            if name == "close":  # Linux has closed the file whatever it answers
                os.close(args[0])  # type: ignore[arg-type]
            raise OSError(self.code, os.strerror(self.code))


def on(*names: str) -> Callable[[str, tuple[object, ...]], bool]:
    """Count only these operations."""
    return lambda name, _args: name in names


class ReluctantFileSystem(FileSystem):
    """Takes fewer bytes than asked for, is interrupted, refuses memory or flags as told.

    Attributes:
        writes: Address, length and offset of each write that was not refused.
    """

    def __init__(
        self,
        *,
        troubles: Mapping[int, int] | None = None,
        sizes: Sequence[int] = (),
        open_error: int = 0,
        made_first: bool = False,
    ) -> None:
        """The troubles to come.

        Args:
            troubles: Error number by index of the write.
            sizes: Most bytes that each write takes, in turn.
            open_error: What an `O_DIRECT` open answers; 0 for none.
            made_first: The file is there after such an open, as Linux leaves it.
        """
        self.troubles = dict(troubles or {})
        self.sizes = tuple(sizes)
        self.open_error = open_error
        self.made_first = made_first
        self.calls = 0
        self.writes: list[tuple[int, int, int]] = []

    def create(self, path: Path, direct: bool) -> int:
        if direct and self.open_error:
            if self.made_first:
                path.touch(exist_ok=False)
            raise OSError(self.open_error, os.strerror(self.open_error))
        return super().create(path, direct)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        index, self.calls = self.calls, self.calls + 1
        if index in self.troubles:
            raise OSError(self.troubles[index], os.strerror(self.troubles[index]))
        self.writes.append((address(buffer), buffer.nbytes, offset))
        if not self.sizes:
            return super().write(fd, buffer, offset)
        size = min(self.sizes[index % len(self.sizes)], buffer.nbytes)
        # Past the page cache only whole blocks reach the disk, whatever is answered.
        kept = size - size % BLOCK if is_direct(fd) else size
        if kept:
            super().write(fd, buffer[:kept], offset)
        return size


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
