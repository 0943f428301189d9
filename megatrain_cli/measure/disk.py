"""How fast a folder's disk is written and read, past the page cache where it allows that."""

import errno
import fcntl
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from megatrain_cli.errors import StorageError
from megatrain_cli.measure.memory import fill
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.plan.rates import DiskRates
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import MIB, show_bytes

# One request. Large, as a layer's file is written; whole pages of page-aligned memory, as O_DIRECT
# wants them.
_CHUNK = 16 * MIB
_PASSES = 3
_SHARE_OF_FREE = 8


def set_direct(handle: int, data: memoryview) -> bool:
    """Make an open file pass the page cache by; False where system or file system refuse.

    Some refuse the flag, others the first request. That one is made here, with `data`.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | direct)
        os.pwrite(handle, data, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)
        return False
    return True


def measure_disk(
    folder: Path,
    num_bytes: int,
    stopwatch: Stopwatch,
    budget: float,
    direct: Callable[[int, memoryview], bool] = set_direct,
) -> DiskRates:
    """Write and read a file without a name, which vanishes even if this process is killed.

    Args:
        folder: On the disk in question.
        num_bytes: Size of the file; less where less is free, or where the disk is slow.
        stopwatch: Whose clock counts.
        budget: Seconds for all.
        direct: Sets `O_DIRECT`, or says that it cannot.

    Raises:
        StorageError: The folder cannot be written, or has no room.
    """
    arena = Arena(_CHUNK)
    chunk = arena.take(_CHUNK)
    fill(chunk)
    data = memoryview(chunk.numpy().data)
    try:
        free = shutil.disk_usage(folder).free
        size = min(num_bytes, free // _SHARE_OF_FREE) // _CHUNK * _CHUNK
        if size < _CHUNK:
            raise StorageError(f"{folder} has {show_bytes(free)} free, too little to measure with.")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            handle = file.fileno()
            passed_by = direct(handle, data)
            written, write = _pass(os.pwrite, handle, data, size, stopwatch, budget / 2, new=True)
            _, read = _pass(_read, handle, data, written, stopwatch, budget / 2)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror or error}.") from error
    finally:
        arena.close()
    return DiskRates(write, read, passed_by)


def _read(handle: int, data: memoryview, offset: int) -> int:
    return os.preadv(handle, [data], offset)


def _pass(
    move: Callable[[int, memoryview, int], int],
    handle: int,
    data: memoryview,
    size: int,
    stopwatch: Stopwatch,
    budget: float,
    *,
    new: bool = False,
) -> tuple[int, float]:
    """Go through the file a few times: bytes of the shortest pass, median of bytes a second.

    Where `new`, each pass begins with an empty file, as a checkpoint is written: to write over what
    a file holds already is quicker, up to twice as quick.
    """
    end = stopwatch.clock() + budget
    rates: list[float] = []
    reached = size
    while len(rates) < _PASSES and (not rates or stopwatch.clock() < end):
        if new:
            os.ftruncate(handle, 0)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # where the cache was not passed by
        began = stopwatch.clock()
        at = 0
        while at < size and (at == 0 or stopwatch.clock() < end):
            moved = move(handle, data, at)
            if moved != len(data):
                raise OSError(f"{moved} of {len(data)} bytes were moved")
            at += moved
        os.fsync(handle)
        rates.append(at / (stopwatch.clock() - began))
        reached = min(reached, at)
    return reached, statistics.median(rates)
