"""What a run saves when it fails while a save, updates and the next step are all under way."""

import threading
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import InternalError, StorageError
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.report.journal import Journal
from megatrain_cli.report.records import StepRecord
from megatrain_cli.store.clock import TileClock
from megatrain_cli.train.saving import Saving
from megatrain_cli.train.step import StepUpdate
from tests.checkpoint.tiles import manifest_of, payloads
from tests.train.failing import FAILS, fail_update
from tests.train.here import resume_here, train_here
from tests.train.threaded import use_threads
from tests.train.workspace import make_workspace


def test_a_save_that_waits_for_an_update_that_never_comes_does_not_keep_the_state_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_workspace(tmp_path, checkpoint={"save_steps": FAILS})
    train_here(config, "train.output_dir=whole")
    use_threads(monkeypatch)
    begun = threading.Event()
    begin = Saving._begin

    def tell(self: Saving, step: int, left: StepUpdate | None = None) -> None:
        begin(self, step, left)
        if step == FAILS:
            begun.set()

    settle = TileClock.settle

    def settle_slowly(self: TileClock) -> None:
        settle(self)
        for thread in threading.enumerate():
            if thread.name == "saver":
                thread.join(60)  # it may be the first to act on it

    monkeypatch.setattr(Saving, "_begin", tell)
    monkeypatch.setattr(TileClock, "settle", settle_slowly)
    with monkeypatch.context() as patch:
        fail_update(patch, 2, lambda: begun.wait(60))
        with pytest.raises(InternalError, match="Step 2 was saved in the middle of its update"):
            train_here(config, "train.output_dir=run")
    pending = manifest_of(tmp_path / "run" / "checkpoints" / "step-00000002").pending
    assert pending is not None
    assert pending.step == FAILS
    resume_here(tmp_path / "run")
    ends = [payloads(tmp_path / run / "checkpoints" / "step-00000003") for run in ("whole", "run")]
    assert ends[0] == ends[1]


def test_a_journal_that_cannot_be_written_loses_no_update_that_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch)
    halted = threading.Event()
    halt, write = CudaLanes.halt, Journal.write

    def halt_and_tell(self: CudaLanes) -> None:
        halted.set()
        halt(self)

    def refuse(self: Journal, record: StepRecord) -> None:
        if record.step == FAILS:
            raise StorageError("no luck.")
        write(self, record)

    monkeypatch.setattr(CudaLanes, "halt", halt_and_tell)
    monkeypatch.setattr(Journal, "write", refuse)
    fail_update(monkeypatch, 2, lambda: halted.wait(60))
    with pytest.raises(StorageError, match=r"no luck\. Step 2 was saved in the middle of its"):
        train_here(make_workspace(tmp_path))


def test_a_save_of_the_step_before_is_ended_when_an_eager_step_fails_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = {"update": "eager", "max_grad_norm": None}
    config = make_workspace(tmp_path, optimizer=eager, checkpoint={"save_steps": 1})
    failed = threading.Event()
    write = FileSystem.sync

    def wait_for_failure(self: FileSystem, fd: int) -> None:
        if threading.current_thread().name == "saver":  # the manifest, once all layers are written
            assert failed.wait(60)
        write(self, fd)

    monkeypatch.setattr(FileSystem, "sync", wait_for_failure)
    fail_update(monkeypatch, 2, failed.set)
    with pytest.raises(InternalError, match="no luck"):
        train_here(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == [
        "step-00000001"
    ]
