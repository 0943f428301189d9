"""A disk that is nearly full when a run starts: what can make room counts, and the rest is told."""

import re
import shutil
from pathlib import Path

import pytest

from megatrain_cli.checkpoint import snapshot as snapshot_module
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import DiskFullError
from megatrain_cli.pipeline.ops import Kind
from tests.train.live import Moments, last_payloads, resume_here, saves_each_step
from tests.train.test_run import checkpoints_of


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saves_each_step(tmp_path_factory.mktemp("room"))


class SmallDisk:
    """Has room for so many checkpoints of a run, and for all else."""

    def __init__(self, patch: pytest.MonkeyPatch, run: Path, checkpoints: float) -> None:
        (folder, *_) = run.glob("checkpoints/step-*")
        self._run, self._one = run, _bytes_below(folder)
        self.checkpoints = checkpoints
        patch.setattr(FileSystem, "free_bytes", lambda fs, path: self.free)
        # What headers may take at most is more than the tensors of a model this small.
        patch.setattr(snapshot_module, "_HEADER_BYTES", 0)

    @property
    def free(self) -> int:
        return int(self.checkpoints * self._one) - _bytes_below(self._run / "checkpoints")


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def half(workspace: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    shutil.copytree(workspace.parent / "whole", tmp_path / "run")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    return tmp_path / "run"


def test_room_that_older_checkpoints_take_counts_where_they_may_be_removed(
    workspace: Path, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(monkeypatch, half, 2.5)
    size = r"\d+\.\d KiB"
    with pytest.raises(DiskFullError, match=rf"needs {size} and {size} is free\. Make room"):
        resume_here(half)
    assert checkpoints_of(half) == ["step-00000001", "step-00000002"]
    said = resume_here(half, "checkpoint.on_disk_full=prune")
    assert re.search(
        rf"has {size} free, and a checkpoint needs {size}: older ones of {size} will be removed "
        r"for the next \(`checkpoint\.on_disk_full: prune`\)",
        said,
    )
    assert "removed checkpoints/step-00000001 to make room" in said
    assert last_payloads(half) == last_payloads(workspace.parent / "whole")


@pytest.mark.parametrize("keeps", ["a mark", "a rewind"])
def test_what_may_not_be_removed_does_not_count(
    keeps: str, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, rewind = half, keeps == "a rewind"
    if rewind:
        start = half / "checkpoints/step-00000001"
    else:
        (half / "checkpoints/step-00000001/KEEP").touch()
    SmallDisk(monkeypatch, half, 2.5)
    with pytest.raises(DiskFullError, match=r"is free\. Make room"):
        resume_here(start, "checkpoint.on_disk_full=prune", rewind=rewind)
    assert checkpoints_of(half) == ["step-00000001", "step-00000002"]


def test_a_run_that_may_leave_saves_out_starts_without_room_and_saves_once_there_is(
    workspace: Path, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, moments = SmallDisk(monkeypatch, half, 2.5), Moments(monkeypatch)

    def make_room() -> None:
        disk.checkpoints = 9

    moments.at(2, Kind.FORWARD, make_room)  # of step 4; it comes once step 3 was not saved
    said = resume_here(half, "checkpoint.on_disk_full=skip")
    assert "none is saved until there is room (`checkpoint.on_disk_full: skip`)" in said
    assert said.count("This save was left out; training goes on") == 1
    assert checkpoints_of(half) == ["step-00000001", "step-00000002", "step-00000004"]
    assert last_payloads(half) == last_payloads(workspace.parent / "whole")


def test_what_a_save_that_was_cut_short_has_left_does_not_stop_the_next_start(
    workspace: Path, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(monkeypatch, half, 3.5)
    old = half / "checkpoints/step-00000002"
    shutil.copytree(old, old.with_name(".tmp-step-00000003-0a"))
    said = resume_here(half, "checkpoint.keep_last=1")
    assert "removed .tmp-step-00000003-0a" in said
    assert last_payloads(half) == last_payloads(workspace.parent / "whole")
