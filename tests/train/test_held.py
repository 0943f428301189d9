"""What a run holds on to while it saves again and again: files, threads."""

import threading
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.save import SaveReport
from megatrain_cli.train.saving import Saving
from megatrain_cli.train.watchdog import Watchdog
from tests.train.here import resume_here, train_here
from tests.train.workspace import make_workspace

FDS = Path("/proc/self/fd")


def held_files() -> list[str]:
    """Where each descriptor of this process leads to."""
    found = []
    for fd in FDS.iterdir():
        try:
            found.append(str(fd.readlink()))
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """Files and threads of this process at the report of each save."""
    found: list[tuple[list[str], int]] = []
    note = Saving._note

    def look(self: Saving, report: SaveReport) -> None:
        found.append((held_files(), threading.active_count()))
        note(self, report)

    monkeypatch.setattr(Saving, "_note", look)
    return found


SAVES = {"save_steps": 1, "keep_last": 1, "async_save": False}


def test_a_retired_checkpoint_gives_its_room_back_though_the_run_resumed_from_it(
    tmp_path: Path, seen: list[tuple[list[str], int]]
) -> None:
    train_here(make_workspace(tmp_path, train={"max_steps": 1}, checkpoint=SAVES))
    resume_here(tmp_path / "run", steps=3)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [
        "step-00000003"
    ]
    files, _ = seen[-1]
    assert [file for file in files if "step-" in file] == []


def test_files_and_threads_do_not_grow_with_the_saves(
    tmp_path: Path, seen: list[tuple[list[str], int]]
) -> None:
    train_here(make_workspace(tmp_path, train={"max_steps": 12}, checkpoint=SAVES))
    assert len(seen) == 12
    assert len({(len(files), threads) for files, threads in seen[1:]}) == 1


def test_a_save_that_goes_on_is_progress_to_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates wait for it: a large layer on a slow disk is no run that hangs."""
    watched: list[Watchdog] = []
    seen: list[object] = []
    enter, write = Watchdog.__enter__, FileSystem.write

    def note(self: Watchdog) -> Watchdog:
        watched.append(self)
        return enter(self)

    def look(self: FileSystem, fd: int, buffer: memoryview, offset: int) -> int:
        if threading.current_thread().name.startswith("save_"):  # writes a layer
            seen.append(watched[0]._progress())
        return write(self, fd, buffer, offset)

    monkeypatch.setattr(Watchdog, "__enter__", note)
    monkeypatch.setattr(FileSystem, "write", look)
    train_here(make_workspace(tmp_path, train={"max_steps": 1}, checkpoint=SAVES))
    assert len(set(seen)) > 1
