"""Small files are whole after a kill at any operation, and what a kill leaves is removed."""

import errno
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import DiskFullError, StorageError
from megatrain_cli.train.durable import remove_unfinished, replace_file
from tests.train.killed import Killed, MortalFileSystem, every_death

OLD, NEW = b"old\n", b"new" * 2_000_000


def test_after_a_kill_at_any_operation_the_file_is_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    seen = set()
    path.write_bytes(OLD)
    for _ in every_death(lambda fs, _: replace_file(fs, path, NEW)):
        assert path.read_bytes() in (OLD, NEW)
        seen.add(path.read_bytes() == NEW)
        path.write_bytes(OLD)
    assert path.read_bytes() == NEW
    assert seen == {False, True}  # deaths before and after the rename
    remove_unfinished(FileSystem(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_writing_in_place_is_torn_by_a_kill(tmp_path: Path) -> None:
    """The control: the same check, over the same deaths, finds what this module is for."""
    path = tmp_path / "file.json"

    def in_place(fs: FileSystem, _: int) -> None:
        path.unlink(missing_ok=True)
        fd = fs.create(path, False)
        fs.write(fd, memoryview(NEW)[: len(NEW) // 2], 0)
        fs.write(fd, memoryview(NEW)[len(NEW) // 2 :], len(NEW) // 2)
        fs.close(fd)

    found = set()
    for _ in every_death(in_place):
        found.add(path.read_bytes() if path.exists() else None)
    assert found - {OLD, NEW}


def test_a_file_may_become_empty(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(OLD)
    replace_file(FileSystem(), path, b"")
    assert path.read_bytes() == b""


class Full(FileSystem):
    """No room for a byte, and nothing can be removed either."""

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        del fd, buffer, offset
        raise OSError(errno.ENOSPC, "No space left on device")

    def unlink(self, path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))


def test_a_refusal_leaves_the_file_as_it_was_and_is_said(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(OLD)
    with pytest.raises(DiskFullError, match=r"file\.json could not be written: No space"):
        replace_file(Full(), path, NEW)
    assert path.read_bytes() == OLD
    with pytest.raises(StorageError, match="could not be removed: Read-only file system"):
        remove_unfinished(Full(), tmp_path)


def test_only_what_was_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(OLD)
    with pytest.raises(Killed):
        replace_file(MortalFileSystem(3), tmp_path / "file.json", NEW)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / ".tmp-mine").write_bytes(OLD)
    (tmp_path / ".tmp-folder").mkdir()
    remove_unfinished(FileSystem(), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"mine", ".tmp-mine", ".tmp-folder"}
