"""The files are never seen, all of them is written and read, and O_DIRECT may be refused."""

import errno
import fcntl
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from megatrain_cli.errors import StorageError
from megatrain_cli.measure.disk import measure_disk
from megatrain_cli.measure.filled import filled_store
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.plan.checkpoints import IO_CHUNKS
from megatrain_cli.plan.rates import DiskRates
from megatrain_cli.units import show_bytes

NUMEL = 1 << 20  # in sixteen layers, each with an odd end
LAYER = (NUMEL // 16 + 512) * 12


def measure(folder: Path, num_bytes: int = 20 * LAYER) -> DiskRates:
    with filled_store(NUMEL) as store:
        return measure_disk(folder, num_bytes, store, Stopwatch(60.0), 30.0)


@dataclass
class Requests:
    """What the disk was asked for: descriptor, offset and bytes of each request."""

    written: list[tuple[int, int, int]] = field(default_factory=list)
    read: list[tuple[int, int, int]] = field(default_factory=list)


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Requests:
    """All of them; nothing is ever seen in the test's folder."""
    found = Requests()
    write, read = FileSystem.write, FileSystem.read

    def seen_write(fs: FileSystem, fd: int, data: memoryview, offset: int) -> int:
        assert list(tmp_path.iterdir()) == []
        assert any(data[:64])
        taken = write(fs, fd, data, offset)
        found.written.append((os.fstat(fd).st_ino, offset, taken))
        return taken

    def seen_read(fs: FileSystem, fd: int, buffer: memoryview, offset: int) -> int:
        got = read(fs, fd, buffer, offset)
        found.read.append((os.fstat(fd).st_ino, offset, got))
        return got

    monkeypatch.setattr(FileSystem, "write", seen_write)
    monkeypatch.setattr(FileSystem, "read", seen_read)
    return found


@pytest.mark.parametrize("layers", [4, 23])
def test_all_layers_are_written_and_read_and_nothing_is_left(
    layers: int, tmp_path: Path, requests: Requests
) -> None:
    found = measure(tmp_path, layers * LAYER + LAYER // 2)
    assert found.write > 0
    assert found.read > 0
    files = {file for file, _, _ in requests.written}
    assert len(files) == 2 * layers  # weights, and what the optimizer has
    written = sum(taken for *_, taken in requests.written)
    read = sum(got for *_, got in requests.read)
    # Each has a header; past the page cache only whole blocks are written.
    assert layers * LAYER < read <= written < layers * LAYER + len(files) * 2 * BLOCK
    assert {file for file, _, _ in requests.read} == files
    assert list(tmp_path.iterdir()) == []


def test_what_is_timed_is_written_where_nothing_was(tmp_path: Path, requests: Requests) -> None:
    """As a checkpoint is: writing over what is there is quicker, and not what a save does."""
    measure(tmp_path)
    places = [(file, offset) for file, offset, _ in requests.written]
    assert len({*places}) == len(places)


@pytest.mark.parametrize("refuses", ["the flag", "the first request"])
def test_where_o_direct_is_refused_the_page_cache_serves_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    control, write = fcntl.fcntl, FileSystem.write

    def set_flags(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT and refuses == "the flag":
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(control(fd, command, flags))

    def refuse(fs: FileSystem, fd: int, data: memoryview, offset: int) -> int:
        if control(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fs, fd, data, offset)

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(FileSystem, "write", refuse)
    assert measure(tmp_path).direct is False


def test_what_passes_the_page_cache_by_does_so_when_it_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: list[bool] = []
    read = FileSystem.read

    def seen(fs: FileSystem, fd: int, buffer: memoryview, offset: int) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return read(fs, fd, buffer, offset)

    monkeypatch.setattr(FileSystem, "read", seen)
    found = measure(tmp_path)
    assert {*direct} == {found.direct}


def test_a_failure_that_is_no_refusal_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fs: FileSystem, fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystem, "write", full)
    with pytest.raises(StorageError, match="No space left"):
        measure(tmp_path)
    with pytest.raises(StorageError):
        measure(tmp_path / "none")


def test_a_disk_that_is_nearly_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 7 * LAYER  # an eighth of it is taken

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage)
    wanted = f"has {show_bytes(7 * LAYER)} free, and {show_bytes(8 * LAYER)} is needed"
    with pytest.raises(StorageError, match=wanted):
        measure(tmp_path)


def test_a_slow_disk_ends_with_its_budget(tmp_path: Path, requests: Requests) -> None:
    """Each look at the clock costs a second, so a thread sees a chunk or two of many."""
    now = iter(range(10**6))
    watch = Stopwatch(1e6, lambda: float(next(now)))
    with filled_store(NUMEL) as store:
        measure_disk(tmp_path, 100 * LAYER, store, watch, 10.0)
    assert IO_CHUNKS <= len(requests.written) < 20
    assert IO_CHUNKS <= len(requests.read) < 20
