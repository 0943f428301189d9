"""A fault at any operation of a save: what was saved before stays whole, and nothing torn appears.

SQLite's method: the n-th operation fails, for each n until a run meets no fault.
"""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.commit import Commit, write_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.remove import remove_leftovers
from megatrain_cli.checkpoint.storage import make_nonce
from megatrain_cli.errors import DiskFullError, StorageError
from tests.checkpoint.crashes import tree_at
from tests.checkpoint.disks import TAKES_ROOM, FaultyFileSystem, ReluctantFileSystem, on
from tests.checkpoint.saves import checkpoints_in, fill, save

FULL = (errno.ENOSPC, errno.EDQUOT)
# A moment's fault, and one that another try meets again.
PASSING = (errno.EIO, errno.ESTALE, errno.EINTR)
LASTING = (*FULL, errno.EROFS, errno.EACCES)
SIZE = 5000


def start(root: Path) -> Path:
    """A run with one checkpoint, of step 1."""
    checkpoints = root / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    save(FileSystem(), checkpoints, 1, lambda kind, step: None)
    return checkpoints


def once(fs: FileSystem, checkpoints: Path) -> None:
    """Save step 2, without a second try."""
    commit = Commit(fs, checkpoints, 2, make_nonce(), num_bytes=4 * SIZE)
    folder = commit.begin()
    try:
        manifest = fill(fs, folder, 2, SIZE)
    except OSError as error:
        raise commit.fail(error) from error
    commit.publish(manifest)


def with_retry(fs: FileSystem, checkpoints: Path) -> None:
    write_checkpoint(
        fs, checkpoints, 2, lambda folder: fill(fs, folder, 2, SIZE), num_bytes=4 * SIZE
    )


def run_into(
    fs: FaultyFileSystem, checkpoints: Path, act: Callable[[FileSystem, Path], None]
) -> bool:
    """Act on a faulty disk and check what is left; whether it succeeded."""
    fds = len(list(Path("/proc/self/fd").iterdir()))
    failure: StorageError | None = None
    try:
        act(fs, checkpoints)
    except StorageError as error:
        failure = error
    assert len(list(Path("/proc/self/fd").iterdir())) == fds, "a descriptor was left open"
    found = checkpoints_in(tree_at(checkpoints.parent))
    if failure is None:
        assert found == {1: "whole", 2: "whole"}
    else:
        assert found.pop(2, "whole") == "whole"
        assert found == {1: "whole"}
        assert fs.met
        text = str(failure)
        assert str(checkpoints / "step-00000002") in text or str(checkpoints) in text
        assert "needs 19.5 KiB" in text
        assert "is free" in text or "is unknown" in text
        assert "saved before is untouched" in text
        assert isinstance(failure, DiskFullError) == (fs.code in FULL)
    return failure is None


def leftovers(checkpoints: Path) -> list[str]:
    return [path.name for path in checkpoints.glob(".*")]


def tidy(checkpoints: Path) -> None:
    """What the next start does; then only checkpoints and the hint are there."""
    remove_leftovers(FileSystem(), checkpoints)
    assert leftovers(checkpoints) == []


@pytest.mark.parametrize("code", [*PASSING, *LASTING], ids=errno.errorcode.get)
def test_a_fault_at_any_operation_leaves_what_was_saved_and_removes_the_rest(
    code: int, tmp_path: Path
) -> None:
    succeeded = False
    for index in range(1000):
        checkpoints = start(tmp_path / str(index))
        fs = FaultyFileSystem(code, index)
        succeeded = run_into(fs, checkpoints, once)
        assert leftovers(checkpoints) == []
        if not fs.met:
            break
        assert 2 not in checkpoints_in(tree_at(checkpoints.parent)) or succeeded
    assert index > 40
    assert succeeded


@pytest.mark.parametrize("code", [*PASSING, *LASTING], ids=errno.errorcode.get)
def test_a_passing_fault_is_met_by_writing_all_once_more_and_a_lasting_one_is_not(
    code: int, tmp_path: Path
) -> None:
    for index in range(1000):
        checkpoints = start(tmp_path / str(index))
        fs = FaultyFileSystem(code, index)
        succeeded = run_into(fs, checkpoints, with_retry)
        assert leftovers(checkpoints) == []
        assert succeeded == (code in PASSING or not fs.met)
        if not fs.met:
            break
    assert index > 40


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_disk_that_fails_for_good_at_any_operation_costs_only_the_new_checkpoint(
    code: int, tmp_path: Path
) -> None:
    succeeded = False
    for index in range(1000):
        checkpoints = start(tmp_path / str(index))
        fs = FaultyFileSystem(code, index, lasting=True)
        succeeded = run_into(fs, checkpoints, with_retry)
        tidy(checkpoints)
        if not fs.met:
            break
    assert index > 40
    assert succeeded


@pytest.mark.parametrize("code", FULL, ids=errno.errorcode.get)
def test_a_full_disk_gets_its_room_back_at_once(code: int, tmp_path: Path) -> None:
    for index in range(1000):
        checkpoints = start(tmp_path / str(index))
        fs = FaultyFileSystem(code, index, lasting=True, only=on(*TAKES_ROOM))
        succeeded = run_into(fs, checkpoints, with_retry)
        assert leftovers(checkpoints) == []
        if succeeded:
            break
        assert list(checkpoints_in(tree_at(checkpoints.parent))) == [1]
    assert index > 10


@pytest.mark.parametrize("name", ["write", "sync", "close"])
def test_a_failed_file_is_never_synced_again_but_written_anew(name: str, tmp_path: Path) -> None:
    checkpoints = start(tmp_path)
    made: list[Path] = []

    class Recording(FaultyFileSystem):
        def create(self, path: Path, direct: bool) -> int:
            made.append(path)
            return super().create(path, direct)

    # The fault's file system itself refuses a second sync of a file for which one failed.
    fs = Recording(errno.EIO, 1, only=on(name))
    done = write_checkpoint(fs, checkpoints, 2, lambda folder: fill(fs, folder, 2, SIZE))
    assert fs.met
    folders = {path.relative_to(checkpoints).parts[0] for path in made}
    assert len(folders) == 2, "the second try has a folder of its own"
    assert len(done.notes) == 1
    assert "Input/output error" in done.notes[0]
    assert "written once more" in done.notes[0]


def test_a_fault_at_any_operation_of_a_removal_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path,
) -> None:
    for index in range(1000):
        checkpoints = start(tmp_path / str(index))
        save(FileSystem(), checkpoints, 2, lambda kind, step: None, keep=9)
        fs = FaultyFileSystem(errno.EIO, index)
        try:
            save(fs, checkpoints, 3, lambda kind, step: None, keep=2)
        except StorageError as error:
            assert "could not be" in str(error)  # noqa: PT017
        found = checkpoints_in(tree_at(checkpoints.parent))
        assert set(found.values()) == {"whole"}
        assert {2, 3} <= set(found)
        tidy(checkpoints)
        if not fs.met:
            break
    assert index > 60


def test_cleaning_up_that_is_cut_short_anywhere_can_be_done_again(tmp_path: Path) -> None:
    for index in range(1000):
        checkpoints = start(tmp_path / str(index))
        for name in (".tmp-step-00000002-aa/training", ".trash-step-00000000-bb/training"):
            (checkpoints / name).mkdir(parents=True)
            (checkpoints / name / "file").write_bytes(b"x")
            (checkpoints / name).with_name("manifest.json").write_bytes(b"x")
        (checkpoints / ".tmp-latest.json-cc").write_bytes(b"x")
        fs = FaultyFileSystem(errno.EIO, index, lasting=True)
        try:
            remove_leftovers(fs, checkpoints)
        except StorageError as error:
            assert "could not be removed" in str(error)  # noqa: PT017
        assert checkpoints_in(tree_at(checkpoints.parent)) == {1: "whole"}
        tidy(checkpoints)
        if not fs.met:
            break
    assert index > 10


def test_short_writes_and_interruptions_make_the_same_checkpoint(tmp_path: Path) -> None:
    checkpoints = start(tmp_path)
    troubles = dict.fromkeys(range(0, 30, 3), errno.EINTR)
    fs = ReluctantFileSystem(sizes=[1000, 4096, 1, 7000], troubles=troubles)
    once(fs, checkpoints)
    assert fs.calls > 15
    assert checkpoints_in(tree_at(checkpoints.parent)) == {1: "whole", 2: "whole"}
