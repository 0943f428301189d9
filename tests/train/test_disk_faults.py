"""Disks that fill up, fail, are emptied or taken away in the middle of a whole run."""

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.save import Saver
from megatrain_cli.errors import DiskFullError, LockedError, StorageError
from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.train import saving as saving_module
from tests.train.live import (
    Moments,
    Said,
    disk_waits,
    last_payloads,
    resume_here,
    saves_each_step,
    train_here,
)
from tests.train.test_run import checkpoints_of, journal_of


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saves_each_step(tmp_path_factory.mktemp("disks"))


class SickDisk:
    """Refuses one operation while a save of some step is written.

    Attributes:
        met: How often it refused.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        operation: str,
        code: int,
        ill: Callable[[str], bool],
    ) -> None:
        self.met = 0
        now = ""
        begin = FileSystem.make_folder

        def notice(fs: FileSystem, path: Path) -> None:
            nonlocal now
            if path.name.startswith(".tmp-step-"):
                now = path.name[len(".tmp-") :][: len("step-00000000")]
            begin(fs, path)

        patch.setattr(FileSystem, "make_folder", notice)
        real = getattr(FileSystem, operation)

        def refuse(fs: FileSystem, *args: object, **kwargs: object) -> object:
            if now and ill(now):
                self.met += 1
                raise OSError(code, os.strerror(code))
            return real(fs, *args, **kwargs)

        patch.setattr(FileSystem, operation, refuse)


@pytest.mark.parametrize("operation", ["make_folder", "create", "allocate", "write", "sync"])
def test_a_full_disk_ends_the_run_with_numbers_and_with_room_it_goes_on(
    operation: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        disk = SickDisk(patch, operation, errno.ENOSPC, lambda step: step == "step-00000003")
        wanted = (
            rf"{run}/checkpoints/step-00000003 .*needs \d+.* [KM]iB.* is free.*"
            "The newest checkpoint is of step 2; `resume` goes on from it"
        )
        with pytest.raises(DiskFullError, match=wanted) as end:
            train_here(workspace, f"train.output_dir={run}")
    assert disk.met
    assert end.value.exit_code == 7
    assert checkpoints_of(run) == ["step-00000001", "step-00000002"]
    assert not list(run.glob("checkpoints/.*")), "its room is free again"
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_a_disk_that_is_full_at_the_first_save_is_told_to_have_nothing(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SickDisk(monkeypatch, "write", errno.ENOSPC, lambda step: step == "step-00000001")
    with pytest.raises(DiskFullError, match=r"is free.* Nothing of this run is saved\."):
        train_here(workspace, f"train.output_dir={tmp_path / 'run'}")


def test_too_little_room_is_seen_before_a_save_is_begun(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        free = FileSystem.free_bytes
        patch.setattr(
            FileSystem,
            "free_bytes",
            lambda fs, path: 1000 if checkpoints_of(run) else free(fs, path),
        )
        wanted = r"step-00000002 needs \S+ [KM]iB and 1000 B is free\. Make room.* is of step 1;"
        with pytest.raises(DiskFullError, match=wanted):
            train_here(workspace, f"train.output_dir={run}")
    assert checkpoints_of(run) == ["step-00000001"]
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_saves_that_find_no_room_can_be_left_out(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    disk = SickDisk(
        monkeypatch, "write", errno.ENOSPC, lambda s: s in ("step-00000002", "step-00000003")
    )
    said = train_here(workspace, f"train.output_dir={run}", "checkpoint.on_disk_full=skip")
    assert disk.met
    assert len(re.findall(r"is free.*This save was left out; training goes on", said)) == 2
    assert checkpoints_of(run) == ["step-00000001", "step-00000004"]
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


@pytest.mark.parametrize("last", ["step-00000003", "step-00000004"])
def test_older_checkpoints_can_be_given_up_for_room(
    last: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest stays until the next is whole."""
    run = tmp_path / "run"
    disk = SickDisk(
        monkeypatch,
        "write",
        errno.ENOSPC,
        lambda step: step >= last and len(checkpoints_of(run)) >= 2,
    )
    said = train_here(workspace, f"train.output_dir={run}", "checkpoint.on_disk_full=prune")
    assert disk.met
    assert "removed checkpoints/step-00000001 to make room" in said
    assert checkpoints_of(run)[-1] == "step-00000004"
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_where_nothing_can_be_given_up_a_full_disk_ends_the_run(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    SickDisk(monkeypatch, "write", errno.ENOSPC, lambda step: step > "step-00000001")
    with pytest.raises(DiskFullError, match="step-00000002"):
        train_here(workspace, f"train.output_dir={run}", "checkpoint.on_disk_full=prune")
    assert checkpoints_of(run) == ["step-00000001"]


@pytest.mark.parametrize("operation", ["write", "sync", "sync_folder", "rename_new"])
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_disk_that_fails_for_good_ends_the_run_within_a_step(
    asynchronous: str,
    operation: str,
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    start = Saver._start

    def start_and_join(saver: Saver, work: Callable[[], None]) -> threading.Thread:
        thread = start(saver, work)
        thread.join()  # so that it has failed before the next step
        return thread

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "_start", start_and_join)
        disk = SickDisk(patch, operation, errno.EIO, lambda step: step >= "step-00000002")
        with pytest.raises(StorageError, match=r"Input/output error.*could not be saved") as end:
            train_here(
                workspace,
                f"train.output_dir={run}",
                f"checkpoint.async_save={asynchronous}",
                "checkpoint.save_steps=2",
            )
    assert disk.met >= 2
    assert end.value.exit_code == 7
    assert len(journal_of(run)) == (3 if asynchronous == "true" else 2)
    assert checkpoints_of(run) == []


def test_one_failed_save_can_be_borne_and_two_in_a_row_are_not(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn = "checkpoint.on_error=warn"
    with monkeypatch.context() as patch:
        SickDisk(patch, "sync", errno.EIO, lambda step: step in ("step-00000001", "step-00000003"))
        said = train_here(workspace, f"train.output_dir={tmp_path / 'a'}", warn)
    assert said.count("Training goes on (`checkpoint.on_error: warn`)") == 2
    assert checkpoints_of(tmp_path / "a") == ["step-00000002", "step-00000004"]
    SickDisk(monkeypatch, "sync", errno.EIO, lambda step: step >= "step-00000002")
    with pytest.raises(StorageError, match="step-00000003"):
        train_here(workspace, f"train.output_dir={tmp_path / 'b'}", warn)
    assert [record["step"] for record in journal_of(tmp_path / "b")] == [1, 2, 3]
    assert checkpoints_of(tmp_path / "b") == ["step-00000001"]


def test_a_folder_of_checkpoints_that_was_removed_is_made_again(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    moments = Moments(monkeypatch)
    moments.at(3, Kind.BACKWARD, lambda: shutil.rmtree(run / "checkpoints"))
    said = train_here(workspace, f"train.output_dir={run}")
    assert f"{run}/checkpoints was gone and was made again" in said
    assert checkpoints_of(run) == ["step-00000003", "step-00000004"]
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_a_slow_disk_is_said_once_with_what_it_does_and_an_interval_that_it_can_keep(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, moments = tmp_path / "run", Moments(monkeypatch)
    hear = saving_module.Saving._hear
    with disk_waits(monkeypatch) as (waits, go):

        def let_go() -> None:
            assert waits.wait(60)
            go.set()

        def hear_at_the_end(saving: saving_module.Saving, listen: object) -> None:
            if go.is_set():
                listen = saving.saver.wait
            hear(saving, listen)  # type: ignore[arg-type]

        monkeypatch.setattr(saving_module.Saving, "_hear", hear_at_the_end)
        moments.at(4, Kind.FORWARD, let_go)
        said = train_here(
            workspace,
            f"train.output_dir={run}",
            "train.max_steps=6",
            "checkpoint.async_save=true",
            f"checkpoint.bounce_pool={1 << 24}",
        )
    assert len(re.findall("checkpoint.save_steps", said)) == 1
    assert re.search(
        r"the save of step 1 took \d+\.\d s at \S+ [KM]iB/s, as long as 3 steps, and those due "
        r"meanwhile became one\. The disk keeps up with `checkpoint\.save_steps: 3` or more\.",
        said,
    )
    assert checkpoints_of(run)[:2] == ["step-00000001", "step-00000004"]


def test_a_save_that_outlasts_the_last_step_tells_no_interval(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many steps it would have taken is not known."""
    finish = saving_module.Saving.finish
    with disk_waits(monkeypatch) as (_, go):

        def let_go(saving: saving_module.Saving, step: int, left: None) -> bool:
            go.set()
            return finish(saving, step, left)

        monkeypatch.setattr(saving_module.Saving, "finish", let_go)
        said = train_here(
            workspace,
            f"train.output_dir={tmp_path / 'run'}",
            "checkpoint.async_save=true",
            f"checkpoint.bounce_pool={1 << 24}",
        )
    assert "saved" in said
    assert "checkpoint.save_steps" not in said


def test_a_run_whose_lock_was_taken_while_it_saved_publishes_nothing(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person removed the lock, and began another process in the folder."""
    run, said = tmp_path / "run", Said()
    allocate = FileSystem.allocate

    def steal_and_allocate(fs: FileSystem, fd: int, num_bytes: int) -> None:
        if [*run.glob("checkpoints/.tmp-step-00000002-*")]:
            (run / "run.lock").unlink(missing_ok=True)
            (run / "run.lock").write_text('{"pid": 7, "host": "other", "nonce": "0"}\n')
        allocate(fs, fd, num_bytes)

    monkeypatch.setattr(FileSystem, "allocate", steal_and_allocate)
    with pytest.raises(LockedError, match="was taken by process 7 on other") as end:
        train_here(workspace, f"train.output_dir={run}", said=said)
    assert end.value.exit_code == 6
    assert checkpoints_of(run) == ["step-00000001"]
    assert not list(run.glob("checkpoints/.*"))
    assert said.text.count("saved ") == 1
