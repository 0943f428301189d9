"""Only what this program left behind is removed, never through a link, and never in part."""

from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.remove import remove_checkpoint, remove_leftovers
from megatrain_cli.errors import StorageError
from tests.checkpoint.crashes import RecordingFileSystem, tree_at
from tests.checkpoint.saves import save

OURS = [
    ".tmp-step-00000007-ab",
    ".tmp-latest.json-ab",
    ".tmp-probe-ab",
    ".trash-step-00000007-ab",
]
OTHERS = [
    ".tmp-mine",
    ".trash",
    ".trash-mine",
    "tmp-step-1",
    "step-00000001",
    "latest.json",
    "KEEP",
]


def test_leftovers_are_known_by_our_names_alone(tmp_path: Path) -> None:
    for name in OURS + OTHERS:
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "file").write_bytes(b"x")
    assert remove_leftovers(FileSystem(), tmp_path) == sorted(OURS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(OTHERS)
    assert remove_leftovers(FileSystem(), tmp_path) == []


def test_a_whole_temporary_folder_is_removed_and_not_promoted(tmp_path: Path) -> None:
    save(FileSystem(), tmp_path, 7, lambda kind, step: None)
    (tmp_path / "step-00000007").rename(tmp_path / OURS[0])
    assert remove_leftovers(FileSystem(), tmp_path) == [OURS[0]]
    assert list(tmp_path.iterdir()) == [tmp_path / "latest.json"]


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"x")
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / OURS[0]).mkdir(parents=True)
    (checkpoints / OURS[0] / "inner").symlink_to(precious)
    (checkpoints / OURS[3]).symlink_to(precious)
    assert remove_leftovers(FileSystem(), checkpoints) == [OURS[0], OURS[3]]
    assert tree_at(precious) == {"file": b"x"}
    assert list(checkpoints.iterdir()) == []


def test_a_run_without_checkpoints_has_no_leftovers(tmp_path: Path) -> None:
    assert remove_leftovers(FileSystem(), tmp_path / "none") == []


def test_a_checkpoint_loses_its_name_for_good_before_its_first_file(tmp_path: Path) -> None:
    save(FileSystem(), tmp_path, 7, lambda kind, step: None)
    fs = RecordingFileSystem(tmp_path)
    remove_checkpoint(fs, tmp_path / "step-00000007")
    first, second, third, *_, last = fs.log
    assert (first.kind, first.path) == ("rename", "step-00000007")
    assert first.target.startswith(".trash-step-00000007-")
    assert (second.kind, second.path) == ("sync_folder", "")
    assert (third.kind, third.path) == ("remove", f"{first.target}/manifest.json")
    assert (last.kind, last.path) == ("remove", first.target)
    assert list(tmp_path.iterdir()) == [tmp_path / "latest.json"]


def test_a_checkpoint_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    remove_checkpoint(FileSystem(), tmp_path / "step-00000007")


def test_a_checkpoint_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    class Refuses(FileSystem):
        def rename_new(self, source: Path, target: Path) -> None:
            raise PermissionError(13, "Permission denied", str(source))

    save(FileSystem(), tmp_path, 7, lambda kind, step: None)
    before = tree_at(tmp_path)
    with pytest.raises(StorageError, match="step-00000007 could not be removed: Permission denied"):
        remove_checkpoint(Refuses(), tmp_path / "step-00000007")
    assert tree_at(tmp_path) == before
