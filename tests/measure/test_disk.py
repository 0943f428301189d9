"""The disk's file is never seen, all of it is written, and O_DIRECT may be refused."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from megatrain_cli.errors import StorageError
from megatrain_cli.measure.disk import measure_disk, set_direct
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.plan.rates import DiskRates
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import MIB


def measure(folder: Path, num_bytes: int = 48 * MIB) -> DiskRates:
    return measure_disk(folder, num_bytes, Stopwatch(60.0), 30.0)


def test_the_whole_file_is_written_and_read_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    read: list[int] = []
    pwrite, preadv = os.pwrite, os.preadv

    def seen_write(handle: int, data: memoryview, offset: int) -> int:
        assert list(tmp_path.iterdir()) == []
        assert any(data[:64])
        written.append(offset)
        return pwrite(handle, data, offset)

    def seen_read(handle: int, data: list[memoryview], offset: int) -> int:
        read.append(offset)
        return preadv(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", seen_write)
    monkeypatch.setattr(os, "preadv", seen_read)
    found = measure(tmp_path)
    assert found.write > 0
    assert found.read > 0
    offsets = {0, 16 * MIB, 32 * MIB}
    assert (set(written), set(read)) == (offsets, offsets)
    assert list(tmp_path.iterdir()) == []


def test_what_is_timed_is_written_where_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkpoint is: writing over what is there is quicker, and not what a save does."""
    pwrite, over = os.pwrite, []

    def seen(handle: int, data: memoryview, offset: int) -> int:
        over.append(os.fstat(handle).st_size > offset)
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", seen)
    # The request that tries O_DIRECT is not timed.
    measure_disk(tmp_path, 48 * MIB, Stopwatch(60.0), 30.0, lambda *_: False)
    assert over == [False] * 9


@pytest.mark.parametrize("refuses", ["the flag", "the first request"])
def test_where_o_direct_is_refused_the_page_cache_serves_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    control, pwrite = fcntl.fcntl, os.pwrite

    def is_direct(handle: int) -> bool:
        return bool(control(handle, fcntl.F_GETFL) & os.O_DIRECT)

    def set_flags(handle: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT and refuses == "the flag":
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(control(handle, command, flags))

    def write(handle: int, data: memoryview, offset: int) -> int:
        if is_direct(handle):
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(handle, data, offset)

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "pwrite", write)
    assert measure(tmp_path).direct is False


def test_a_failure_that_is_no_refusal_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        measure(tmp_path)
    with pytest.raises(StorageError):
        measure(tmp_path / "none")


def test_a_disk_that_is_nearly_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 100 * MIB

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage)
    with pytest.raises(StorageError, match=r"100\.0 MiB free, too little"):
        measure(tmp_path)


def test_a_slow_disk_ends_with_its_budget(tmp_path: Path) -> None:
    """Each look at the clock costs a second, so a pass sees a chunk or two of many."""
    now = iter(range(10**6))
    watch = Stopwatch(1e6, lambda: float(next(now)))
    found = measure_disk(tmp_path, 160 * MIB, watch, 10.0, lambda handle, data: False)
    assert found.direct is False
    assert next(now) < 40


def test_a_direct_file_is_one(tmp_path: Path) -> None:
    """Whatever `set_direct` answers is what the file is."""
    data = memoryview(Arena(16 * MIB).take(16 * MIB).numpy().data)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        answer = set_direct(file.fileno(), data)
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        assert bool(flags & os.O_DIRECT) == answer
