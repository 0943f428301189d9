"""The real operations: what they refuse, and what they do where the system has less to offer."""

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from tests.checkpoint.disks import is_direct

LIBC = "megatrain_cli.checkpoint.fsio._libc"
FS = FileSystem()


def answering(code: int) -> SimpleNamespace:
    """A C library whose newer functions fail."""

    def fail(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    return SimpleNamespace(renameat2=fail, sync_file_range=fail, fallocate=fail)


LIBRARIES = {
    "as here": None,
    "an old library": SimpleNamespace(),
    "an old kernel": answering(errno.ENOSYS),
    "a file system without the flag": answering(errno.EINVAL),
}


@pytest.fixture(params=LIBRARIES)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = LIBRARIES[request.param]
    if library is not None:
        monkeypatch.setattr(LIBC, library)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("there", ["an empty folder", "a folder", "a file", "a dangling link"])
def test_a_rename_replaces_nothing(tmp_path: Path, there: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    if there == "a file":
        target.write_bytes(b"")
    elif there == "a dangling link":
        target.symlink_to(tmp_path / "none")
    else:
        (target if there == "an empty folder" else target / "inner").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        FS.rename_new(source, target)
    assert source.exists()
    target.rename(tmp_path / "away")
    FS.rename_new(source, target)
    assert not source.exists()
    assert target.is_dir()


def test_a_plain_rename_would_replace_an_empty_folder(tmp_path: Path) -> None:
    """Why `rename_new` exists."""
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "source" / "file").touch()
    (tmp_path / "source").rename(tmp_path / "target")
    assert (tmp_path / "target" / "file").exists()


@pytest.mark.usefixtures("_library")
def test_renaming_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FS.rename_new(tmp_path / "none", tmp_path / "target")


@pytest.mark.usefixtures("_library")
def test_the_page_cache_is_left_by_every_library(tmp_path: Path) -> None:
    fd = FS.create(tmp_path / "file", direct=False)
    FS.write(fd, memoryview(bytes(BLOCK)), 0)
    FS.drop_cache(fd, 0, BLOCK)
    FS.close(fd)


def test_an_error_of_the_write_back_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIBC, answering(errno.EIO))
    fd = FS.create(tmp_path / "file", direct=False)
    with pytest.raises(OSError, match="Input/output error"):
        FS.drop_cache(fd, 0, BLOCK)
    FS.close(fd)


def test_a_direct_file_takes_only_whole_blocks_until_it_is_told_otherwise(tmp_path: Path) -> None:
    fd = FS.create(tmp_path / "file", direct=True)
    assert is_direct(fd)
    with pytest.raises(OSError, match="Invalid argument"):
        FS.write(fd, memoryview(b"abc"), 0)
    FS.leave_direct(fd)
    assert FS.write(fd, memoryview(b"abc"), 0) == 3
    FS.close(fd)


def test_without_the_flag_direct_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain_cli.checkpoint.fsio._DIRECT", 0)
    with pytest.raises(OSError, match="no O_DIRECT") as caught:
        FS.create(tmp_path / "file", direct=True)
    assert caught.value.errno == errno.EINVAL
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("name", [*LIBRARIES, "a full disk"])
def test_room_is_reserved_where_it_can_be_and_only_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fd = FS.create(tmp_path / "file", direct=False)
    if name == "as here":
        FS.allocate(fd, 5 * BLOCK)
        assert FS.status(fd).st_size == 5 * BLOCK
        assert FS.status(fd).st_blocks * 512 >= 5 * BLOCK
    elif name == "a full disk":
        monkeypatch.setattr(LIBC, answering(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            FS.allocate(fd, BLOCK)
    else:
        monkeypatch.setattr(LIBC, LIBRARIES[name])
        FS.allocate(fd, BLOCK)
        assert FS.status(fd).st_size == 0
    FS.close(fd)


def test_files_are_opened_below_a_folder_that_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "training").mkdir(parents=True)
    (tmp_path / "real" / "training" / "file").write_bytes(b"abcdef")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = FS.open_folder(tmp_path / "link")
    for direct in (False, True):
        fd = FS.open_file(folder, "training/file", direct)
        assert is_direct(fd) == direct
        FS.close(fd)
    fd = FS.open_file(folder, "training/file", direct=False)
    room = memoryview(bytearray(4))
    assert FS.read(fd, room, 1) == 4
    assert bytes(room) == b"bcde"
    assert FS.read(fd, room, 4) == 2
    assert FS.read(fd, room, 6) == 0
    FS.close(fd)
    FS.close(folder)


@pytest.mark.parametrize(
    "name",
    ["file-link", "folder-link/file", "../outside", "/etc/hostname", "training/../file", "."],
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    top = tmp_path / "top"
    (top / "training").mkdir(parents=True)
    for path in (top / "file", top / "training" / "file", tmp_path / "outside"):
        path.write_bytes(b"x")
    (top / "file-link").symlink_to(top / "file")
    (top / "folder-link").symlink_to(top / "training")
    before = set(Path("/proc/self/fd").iterdir())
    folder = FS.open_folder(top)
    with pytest.raises(OSError):  # noqa: PT011  ELOOP, ENOTDIR or EINVAL
        FS.open_file(folder, name, direct=False)
    FS.close(folder)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_fifo_is_opened_without_waiting_for_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    folder = FS.open_folder(tmp_path)
    fd = FS.open_file(folder, "fifo", direct=False)
    FS.close(fd)
    FS.close(folder)


def test_free_room_is_what_this_user_may_take_and_not_what_root_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FS.free_bytes(tmp_path) > 0
    facts = SimpleNamespace(f_bavail=3, f_bfree=9, f_frsize=512, f_bsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    assert FS.free_bytes(tmp_path) == 3 * 512


def test_a_link_is_there_even_if_it_leads_nowhere_and_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    assert FS.exists(tmp_path / "dangling")
    assert FS.is_folder(tmp_path)
    assert not FS.is_folder(tmp_path / "link")
    assert FS.list_folder(tmp_path) == ["dangling", "link"]
