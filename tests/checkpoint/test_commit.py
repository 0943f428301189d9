"""A folder becomes a checkpoint at one moment; until then it is not there, and nothing is lost."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.commit import Commit, Committed, write_checkpoint, write_latest
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.remove import remove_checkpoint
from megatrain_cli.checkpoint.storage import make_nonce
from megatrain_cli.errors import DiskFullError, StorageError
from tests.checkpoint.crashes import RecordingFileSystem, tree_at
from tests.checkpoint.disks import FaultyFileSystem, on
from tests.checkpoint.saves import checkpoints_in, contents, fill, state_of


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def commit(
    fs: FileSystem, checkpoints: Path, step: int = 5, *, atomic_rename: bool = True
) -> Committed:
    return write_checkpoint(
        fs, checkpoints, step, lambda at: fill(fs, at, step, 9), atomic_rename=atomic_rename
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_has_its_files_and_a_manifest_of_them(checkpoints: Path) -> None:
    done = commit(FileSystem(), checkpoints)
    assert done == Committed(checkpoints / "step-00000005", ())
    tree = tree_at(done.folder)
    files = {name: data for name, data in tree.items() if data is not None}
    assert state_of(5, files) == "whole"
    assert {name: files[name] for name in contents(5, 9)} == contents(5, 9)
    assert names(checkpoints) == ["step-00000005"]


def test_until_it_is_published_it_is_only_known_by_a_name_that_is_never_read(
    checkpoints: Path,
) -> None:
    fs = FileSystem()
    one = Commit(fs, checkpoints, 5, "ab12")
    folder = one.begin()
    assert folder == checkpoints / ".tmp-step-00000005-ab12"
    assert names(folder) == ["training"]
    assert names(checkpoints) == [folder.name]
    assert one.publish(fill(fs, folder, 5, 9)) == one.final
    assert names(checkpoints) == ["step-00000005"]
    one.abandon()  # too late: it is committed
    assert names(checkpoints) == ["step-00000005"]


def test_what_is_abandoned_is_gone(checkpoints: Path) -> None:
    one = Commit(FileSystem(), checkpoints, 5, make_nonce())
    (one.begin() / "training" / "file").write_bytes(b"x")
    one.abandon()
    one.abandon()
    assert names(checkpoints) == []


@pytest.mark.parametrize("atomic_rename", [True, False])
@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), StorageError("mine")])
def test_what_the_files_writer_raises_passes_and_leaves_nothing(
    checkpoints: Path, error: BaseException, atomic_rename: bool
) -> None:
    calls: list[Path] = []

    def raise_it(folder: Path) -> bytes:
        calls.append(folder)
        (folder / "file").write_bytes(b"x")
        raise error

    with pytest.raises(type(error)) as caught:
        write_checkpoint(FileSystem(), checkpoints, 5, raise_it, atomic_rename=atomic_rename)
    assert caught.value is error
    assert len(calls) == 1
    assert names(checkpoints) == []


def test_a_disk_error_that_comes_wrapped_costs_one_more_try_too(checkpoints: Path) -> None:
    folders: list[Path] = []

    def fill_at_second_try(folder: Path) -> bytes:
        folders.append(folder)
        if len(folders) == 1:
            raise StorageError("wrapped") from OSError(errno.EIO, os.strerror(errno.EIO))
        assert not folders[0].exists()
        return fill(FileSystem(), folder, 5, 9)

    done = write_checkpoint(FileSystem(), checkpoints, 5, fill_at_second_try)
    assert done.notes == ("wrapped It was written once more.",)
    assert names(checkpoints) == ["step-00000005"]


@pytest.mark.parametrize("inside", [(), ("manifest.json",), ("model.safetensors",)])
def test_a_step_that_has_a_folder_is_refused_and_the_folder_left_as_it_is(
    checkpoints: Path, inside: tuple[str, ...]
) -> None:
    there = checkpoints / "step-00000005"
    there.mkdir()
    for name in inside:
        (there / name).write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"step-00000005 .*this step has a folder already"):
        commit(FileSystem(), checkpoints)
    assert names(there) == list(inside)
    assert names(checkpoints) == ["step-00000005"]


def test_a_folder_that_appears_meanwhile_is_not_replaced_though_it_is_empty(
    checkpoints: Path,
) -> None:
    fs = FileSystem()
    one = Commit(fs, checkpoints, 5, make_nonce())
    manifest = fill(fs, one.begin(), 5, 9)
    one.final.mkdir()
    with pytest.raises(StorageError, match="File exists"):
        one.publish(manifest)
    assert names(checkpoints) == ["step-00000005"]
    assert names(one.final) == []


def test_a_temporary_folder_of_the_same_name_is_not_touched(checkpoints: Path) -> None:
    other = checkpoints / ".tmp-step-00000005-ab12"
    other.mkdir()
    with pytest.raises(StorageError, match="File exists"):
        Commit(FileSystem(), checkpoints, 5, "ab12").begin()
    assert names(checkpoints) == [other.name]


@pytest.mark.parametrize("free", [999, 1000])
def test_too_little_room_is_refused_before_anything_is_written(
    checkpoints: Path, free: int
) -> None:
    class Small(FileSystem):
        def free_bytes(self, path: Path) -> int:
            return free

    one = Commit(Small(), checkpoints, 5, make_nonce(), num_bytes=1000)
    if free >= 1000:
        one.begin()
        return
    with pytest.raises(DiskFullError, match=r"step-00000005 needs 1000 B and 999 B is free"):
        one.begin()
    assert names(checkpoints) == []


class ResentRename(FileSystem):
    """NFS: the answer is lost, and the request sent again finds no source."""

    def __init__(self, before: Callable[[Path], None] = lambda target: None, works: bool = True):
        self.before = before
        self.works = works

    def rename_new(self, source: Path, target: Path) -> None:
        self.before(target)
        if self.works:
            super().rename_new(source, target)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))


def test_a_rename_that_worked_though_it_reports_an_error_is_seen(checkpoints: Path) -> None:
    assert commit(ResentRename(), checkpoints) == Committed(checkpoints / "step-00000005", ())
    assert checkpoints_in(tree_at(checkpoints.parent)) == {5: "whole"}


@pytest.mark.parametrize(
    "change",
    [lambda raw: raw[:-1], lambda raw: raw + b" ", lambda raw: raw[:-1] + b"x", None],
    ids=["shorter", "longer", "another", "none"],
)
def test_a_folder_of_someone_else_is_not_taken_for_a_rename_that_worked(
    checkpoints: Path, change: Callable[[bytes], bytes] | None
) -> None:
    fs = FileSystem()
    one: list[Commit] = []

    def vanish(target: Path) -> None:
        """The source is gone, and another's folder is at the target."""
        manifest = (one[0].folder / "manifest.json").read_bytes()
        one[0].folder.rename(checkpoints / "elsewhere")
        target.mkdir()
        if change is not None:
            (target / "manifest.json").write_bytes(change(manifest))

    one.append(Commit(ResentRename(vanish, works=False), checkpoints, 5, make_nonce()))
    manifest = fill(fs, one[0].begin(), 5, 9)
    with pytest.raises(StorageError, match="No such file"):
        one[0].publish(manifest)
    assert names(checkpoints) == ["elsewhere", "step-00000005"]


def test_what_was_renamed_and_could_not_be_synced_is_taken_back(checkpoints: Path) -> None:
    synced: list[Path] = []

    class Fails(FileSystem):
        def sync_folder(self, path: Path) -> None:
            if path == checkpoints:
                synced.append(path)
                if len(synced) == 1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().sync_folder(path)

    fs = Fails()
    one = Commit(fs, checkpoints, 5, make_nonce())
    with pytest.raises(StorageError, match="Input/output error"):
        one.publish(fill(fs, one.begin(), 5, 9))
    assert names(checkpoints) == []
    assert len(synced) == 2, "the removal is synced before a file goes"


@pytest.mark.parametrize("gone", ["checkpoints", "run"])
def test_a_folder_that_a_person_removed_is_made_again(checkpoints: Path, gone: str) -> None:
    fs = RecordingFileSystem(checkpoints.parents[1])
    checkpoints.rmdir()
    if gone == "run":
        checkpoints.parent.rmdir()
    done = commit(fs, checkpoints)
    assert done.notes == (f"{checkpoints} was gone and was made again",)
    assert checkpoints_in(tree_at(checkpoints.parent)) == {5: "whole"}
    made = [op.path for op in fs.log if op.kind == "make_folder"]
    synced = [op.path for op in fs.log if op.kind == "sync_folder"]
    assert {str(Path(path).parent) for path in made[: 1 + (gone == "run")]} <= {*synced, "."}


def test_a_folder_that_is_removed_during_a_save_costs_one_more_try(checkpoints: Path) -> None:
    calls: list[Path] = []

    def fill_and_remove(folder: Path) -> bytes:
        manifest = fill(FileSystem(), folder, 5, 9)
        calls.append(folder)
        if len(calls) == 1:
            checkpoints.rename(checkpoints.with_name("moved"))
        return manifest

    done = write_checkpoint(FileSystem(), checkpoints, 5, fill_and_remove)
    assert len(calls) == 2
    assert [("written once more" in note, "made again" in note) for note in done.notes] == [
        (True, False),
        (False, True),
    ]
    assert checkpoints_in(tree_at(checkpoints.parent)) == {5: "whole"}


class NoRename(FileSystem):
    """As some network and object stores: a folder keeps its name."""

    def rename_new(self, source: Path, target: Path) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_where_folders_cannot_be_renamed_the_manifest_comes_last(checkpoints: Path) -> None:
    fs = NoRename()
    one = Commit(fs, checkpoints, 5, make_nonce(), atomic_rename=False)
    assert one.begin() == one.final
    manifest = fill(fs, one.final, 5, 9)
    assert checkpoints_in(tree_at(checkpoints.parent)) == {5: "no manifest"}
    one.publish(manifest)
    assert checkpoints_in(tree_at(checkpoints.parent)) == {5: "whole"}
    with pytest.raises(StorageError, match="this step has a folder already"):
        commit(fs, checkpoints, atomic_rename=False)
    remove_checkpoint(fs, one.final)
    assert names(checkpoints) == []


def test_where_folders_cannot_be_renamed_an_unfinished_save_is_written_over(
    checkpoints: Path,
) -> None:
    fs = NoRename()
    fill(fs, Commit(fs, checkpoints, 5, make_nonce(), atomic_rename=False).begin(), 5, 9)
    commit(fs, checkpoints, atomic_rename=False)
    assert checkpoints_in(tree_at(checkpoints.parent)) == {5: "whole"}


def test_the_hint_names_the_newest_checkpoint_and_is_replaced_whole(checkpoints: Path) -> None:
    fs = RecordingFileSystem(checkpoints)
    for step in (5, 6):
        write_latest(fs, checkpoints / f"step-{step:08d}", f"sha256:{step}", attempt=3)
        hint = json.loads((checkpoints / "latest.json").read_bytes())
        assert hint == {"checkpoint": f"step-{step:08d}", "id": f"sha256:{step}", "attempt": 3}
    assert names(checkpoints) == ["latest.json"]
    kinds = [op.kind for op in fs.log]
    assert kinds[-3:] == ["sync", "rename", "sync_folder"]


@pytest.mark.parametrize("name", ["create", "write", "sync", "rename_over"])
def test_a_hint_that_cannot_be_written_stays_as_it_was(checkpoints: Path, name: str) -> None:
    write_latest(FileSystem(), checkpoints / "step-00000005", "sha256:5", attempt=1)
    before = tree_at(checkpoints)
    with pytest.raises(StorageError, match=r"latest\.json could not be written"):
        write_latest(
            FaultyFileSystem(errno.EIO, 0, only=on(name)), checkpoints / "step-00000006", "", 1
        )
    assert tree_at(checkpoints) == before
