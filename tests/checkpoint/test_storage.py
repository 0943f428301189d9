"""What a disk cannot do is found before the first step, and nothing of the probe stays behind."""

import errno
import os
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.storage import StorageFacts, check_storage, ensure_folder
from megatrain_cli.errors import DiskFullError, StorageError
from tests.checkpoint.crashes import Op, RecordingFileSystem
from tests.checkpoint.disks import FaultyFileSystem, ReluctantFileSystem, on


class Sized(FileSystem):
    """A disk with a known room."""

    def free_bytes(self, path: Path) -> int:
        assert path.exists()
        return 5000


def test_a_good_disk_is_told_as_it_is(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    facts = check_storage(Sized(), checkpoints, 5000)
    assert facts == StorageFacts(free_bytes=5000, direct=True, atomic_rename=True)
    assert list(checkpoints.iterdir()) == []


def test_the_probe_writes_syncs_and_renames(tmp_path: Path) -> None:
    fs = RecordingFileSystem(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    check_storage(fs, tmp_path / "checkpoints", 0)
    assert fs.log[0] == Op("sync_folder", "")
    assert [op.kind for op in fs.log[1:] if op.kind not in ("truncate", "remove")] == [
        "make_folder",
        "create",
        "write",
        "sync",
        "sync_folder",
        "rename",
        "sync_folder",
    ]


def test_a_disk_with_too_little_room_is_refused_with_need_and_have(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=r"checkpoints needs 4\.88 KiB and 4\.88 KiB is free"):
        check_storage(Sized(), tmp_path / "checkpoints", 5001)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_room_that_the_run_can_make_itself_counts(tmp_path: Path) -> None:
    assert check_storage(Sized(), tmp_path / "checkpoints", 9000, 4000).free_bytes == 5000
    wanted = r"needs 8\.79 KiB and 4\.88 KiB is free, and 3\.91 KiB in older checkpoints\. Make"
    with pytest.raises(DiskFullError, match=wanted):
        check_storage(Sized(), tmp_path / "checkpoints", 9001, 4000)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
@pytest.mark.parametrize("name", ["make_folder", "create", "write", "sync", "sync_folder"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, code: int, name: str) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    fs = FaultyFileSystem(code, 0, lasting=True, only=on(name))
    with pytest.raises(StorageError, match=f"could not be written: {os.strerror(code)}"):
        check_storage(fs, checkpoints, 10)
    assert not list(tmp_path.rglob(".tmp*"))


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory"):
        check_storage(FileSystem(), tmp_path / "run" / "checkpoints", 10)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_disk_without_direct_writes_is_used_through_the_page_cache(
    tmp_path: Path, code: int
) -> None:
    fs = ReluctantFileSystem(open_error=code, made_first=True)
    assert not check_storage(fs, tmp_path, 0).direct


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV])
def test_a_disk_that_cannot_rename_folders_is_known_as_such(tmp_path: Path, code: int) -> None:
    fs = FaultyFileSystem(code, 0, only=on("rename_new"))
    assert not check_storage(fs, tmp_path, 0).atomic_rename
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_leaves_the_old_name_is_no_rename(tmp_path: Path) -> None:
    class Copies(FileSystem):
        def rename_new(self, source: Path, target: Path) -> None:
            target.mkdir()

    assert not check_storage(Copies(), tmp_path, 0).atomic_rename
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_fails_otherwise_is_refused(tmp_path: Path) -> None:
    fs = FaultyFileSystem(errno.EIO, 0, only=on("rename_new"))
    with pytest.raises(StorageError, match="Input/output error"):
        check_storage(fs, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_at_any_operation_of_the_probe_is_told(tmp_path: Path) -> None:
    for index in range(100):
        fs = FaultyFileSystem(errno.EIO, index)
        checkpoints = tmp_path / str(index) / "checkpoints"
        try:
            facts = check_storage(fs, checkpoints, 10)
        except StorageError as error:
            assert "could not be written: Input/output error" in str(error)  # noqa: PT017
            assert fs.met
            continue
        assert index > 15
        assert not fs.met
        assert facts.atomic_rename
        assert list(checkpoints.iterdir()) == []
        return
    pytest.fail("the probe never ran without a fault")


def test_folders_are_made_one_in_the_other_and_each_made_known(tmp_path: Path) -> None:
    fs = RecordingFileSystem(tmp_path)
    assert ensure_folder(fs, tmp_path / "a" / "b")
    assert not ensure_folder(fs, tmp_path / "a" / "b")
    assert [(op.kind, op.path) for op in fs.log] == [
        ("make_folder", "a"),
        ("sync_folder", ""),
        ("make_folder", "a/b"),
        ("sync_folder", "a"),
    ]


def test_a_disk_that_answers_nothing_does_not_lead_in_circles() -> None:
    class Blind(FileSystem):
        def exists(self, path: Path) -> bool:
            return False

        def make_folder(self, path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        ensure_folder(Blind(), Path("/none/such"))
