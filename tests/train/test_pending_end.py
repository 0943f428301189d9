"""A run that goes on in the middle of an update, and makes no step after it, still ends whole."""

from pathlib import Path

import pytest

from megatrain_cli.checkpoint.save import Saver
from megatrain_cli.errors import DiskFullError, InternalError, LockedError
from megatrain_cli.train.saving import Saving
from megatrain_cli.train.step import StepUpdate
from tests.checkpoint.tiles import manifest_of, payloads
from tests.train.failing import FAILS, leave_half_updated
from tests.train.here import resume_here, train_here
from tests.train.threaded import use_threads
from tests.train.workspace import make_workspace

NAME = f"step-{FAILS:08d}"


def lose_the_lock(*args: object) -> None:
    raise LockedError("taken")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps was left in the middle of the second's update."""
    use_threads(monkeypatch)
    made = make_workspace(tmp_path)
    leave_half_updated(made, monkeypatch)
    return made


def test_its_last_checkpoint_is_whole_where_the_update_was_all_that_was_left(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_here(config, "train.output_dir=whole", f"train.max_steps={FAILS}")
    run = tmp_path / "run"
    with monkeypatch.context() as patch:  # as a process that dies before its save
        patch.setattr(Saving, "finish", lose_the_lock)
        with pytest.raises(LockedError):
            resume_here(run, steps=FAILS)
    resume_here(run, steps=FAILS)
    manifest = manifest_of(run / "checkpoints" / NAME)
    assert (manifest.pending, manifest.finished) == (None, True)
    whole = payloads(tmp_path / "whole" / "checkpoints" / NAME)
    assert payloads(run / "checkpoints" / NAME) == whole
    assert manifest_of(run / "superseded" / f"{NAME.replace('-', '-0')}-3").pending is not None


def test_a_fork_that_fails_at_its_first_step_has_what_it_was_forked_from(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: StepUpdate, loss: float, squared_norms: object) -> None:
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(StepUpdate, "clip", fail)
        with pytest.raises(InternalError, match="The state after step 2 is saved"):
            resume_here(tmp_path / "run", fork=tmp_path / "fork")
    assert manifest_of(tmp_path / "fork" / "checkpoints" / NAME).pending is None
    resume_here(tmp_path / "fork")


def test_what_it_goes_on_from_is_not_denied_where_its_last_checkpoint_finds_no_room(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Saver, *args: object) -> None:
        raise DiskFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "wait", refuse)
        with pytest.raises(DiskFullError, match=rf"no room The newest .* is of step {FAILS};"):
            resume_here(tmp_path / "run", steps=FAILS)
    resume_here(tmp_path / "run", steps=FAILS)
