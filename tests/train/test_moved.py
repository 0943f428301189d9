"""What a person does to a run's folder and its files while the run goes on costs no step."""

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import LockedError
from megatrain_cli.report.journal import Journal
from megatrain_cli.report.records import StepRecord
from megatrain_cli.train.saving import Saving
from tests.train.live import Said, last_payloads, resume_here, saves_each_step, train_here
from tests.train.test_run import checkpoints_of

Act = Callable[[], object]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saves_each_step(tmp_path_factory.mktemp("moved"))


def in_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Act) -> None:
    """Let something happen behind a step's line, before its save."""
    write = Journal.write

    def write_and_act(self: Journal, record: StepRecord) -> None:
        write(self, record)
        if record.step == step:
            act()

    monkeypatch.setattr(Journal, "write", write_and_act)


def in_save(monkeypatch: pytest.MonkeyPatch, step: int, act: Act) -> None:
    """Let something happen once, in the middle of a step's save."""
    allocate, done = FileSystem.allocate, False

    def act_and_allocate(fs: FileSystem, fd: int, num_bytes: int) -> None:
        nonlocal done
        place = Path(f"/proc/self/fd/{fd}").readlink()
        if not done and f".tmp-step-{step:08d}-" in str(place):
            done = True
            act()
        allocate(fs, fd, num_bytes)

    monkeypatch.setattr(FileSystem, "allocate", act_and_allocate)


def before_journal(monkeypatch: pytest.MonkeyPatch, step: int, act: Act) -> None:
    """As `in_save`, and the save's begin has not looked for the journal by then."""
    is_at, has_acted = Journal.is_at, threading.Event()
    saves = 0

    def act_and_tell() -> None:
        act()
        has_acted.set()

    def wait_and_look(self: Journal, path: Path) -> bool:
        nonlocal saves
        saves += 1
        assert saves != step or has_acted.wait(60)
        return is_at(self, path)

    in_save(monkeypatch, step, act_and_tell)
    monkeypatch.setattr(Journal, "is_at", wait_and_look)


def remove(run: Path) -> None:
    """All of it, again where a save has written beside: a folder is not empty then."""
    while run.exists():
        with suppress(OSError):
            shutil.rmtree(run)


def saved_in(when: Callable[..., None], *steps: int) -> list[str]:
    """The save that it breaks is made with the next step."""
    return [f"step-{step:08d}" for step in steps if step != 2 or when is in_step]


WHEN = pytest.mark.parametrize("when", [in_step, in_save, before_journal])


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@WHEN
def test_a_run_whose_folder_was_moved_goes_on_there(
    when: Callable[..., None], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    when(monkeypatch, 2, lambda: run.rename(moved))
    said = train_here(config, f"train.output_dir={run}")
    assert f"{run} was moved to {moved}; the run goes on there" in said
    assert not run.exists()
    assert not list(moved.glob("checkpoints/.tmp-*"))
    assert checkpoints_of(moved) == saved_in(when, 1, 2, 3, 4)
    assert last_payloads(moved) == last_payloads(config.parent / "whole")
    assert steps_of(moved) == [1, 2, 3, 4]


def test_a_run_whose_name_another_run_has_by_now_follows_its_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"

    def move_and_begin() -> None:
        monkeypatch.undo()
        run.rename(moved)
        train_here(config, f"train.output_dir={run}")

    in_step(monkeypatch, 2, move_and_begin)
    train_here(config, f"train.output_dir={run}")
    for one in (run, moved):
        assert last_payloads(one) == last_payloads(config.parent / "whole")
        assert steps_of(one) == [1, 2, 3, 4]


@WHEN
def test_a_run_whose_folder_was_removed_makes_it_again(
    when: Callable[..., None], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    when(monkeypatch, 2, lambda: remove(run))
    said = train_here(config, f"train.output_dir={run}", "train.max_steps=3")
    assert f"{run} was moved or removed while the run went on. It was made again" in said
    assert checkpoints_of(run) == saved_in(when, 2, 3)
    assert steps_of(run) == [1, 2, 3]
    monkeypatch.undo()
    resume_here(run, steps=4)
    assert last_payloads(run) == last_payloads(config.parent / "whole")


def test_a_run_whose_folder_was_removed_leaves_another_that_began_there_alone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def remove_and_begin() -> None:
        monkeypatch.undo()
        shutil.rmtree(run)
        train_here(config, f"train.output_dir={run}", "train.max_steps=1")

    in_step(monkeypatch, 2, remove_and_begin)
    with pytest.raises(LockedError, match="Another run is there by now"):
        train_here(config, f"train.output_dir={run}")
    assert checkpoints_of(run) == ["step-00000001"]
    assert steps_of(run) == [1]


@WHEN
def test_a_lock_that_was_removed_is_made_again(
    when: Callable[..., None], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a resumed run, which holds the folder of checkpoints too."""
    run = tmp_path / "run"
    train_here(config, f"train.output_dir={run}", "train.max_steps=1")
    when(monkeypatch, 2, (run / "run.lock").unlink)
    said = Said()
    resume_here(run, steps=4, said=said)
    assert f"{run}/run.lock is gone: this run's lock was removed. It was made again" in said.text
    assert last_payloads(run) == last_payloads(config.parent / "whole")


@pytest.mark.parametrize("by", ["nothing", "file", "folder"])
def test_a_journal_that_was_removed_or_replaced_is_written_anew(
    by: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    path = run / "metrics.jsonl"

    def replace() -> None:
        path.unlink()
        if by == "file":
            path.write_text("mine\n")
        elif by == "folder":
            path.mkdir()

    in_step(monkeypatch, 2, replace)
    said = train_here(config, f"train.output_dir={run}")
    how = "removed" if by == "nothing" else "replaced by another, which was moved to superseded/"
    assert f"{path} was {how}; it was written anew, with all its lines" in said
    assert steps_of(run) == [1, 2, 3, 4]
    aside = run / "superseded" / "metrics-1.jsonl"
    assert aside.is_dir() if by == "folder" else aside.exists() == (by == "file")


def test_the_last_checkpoint_is_made_again_if_it_was_removed_before_the_run_ends(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, after_step = tmp_path / "run", Saving.after_step

    def save_and_remove(self: Saving, step: int, loss: float, *, asked: bool = False) -> None:
        after_step(self, step, loss, asked=asked)
        if step == 4:
            shutil.rmtree(run / "checkpoints")

    monkeypatch.setattr(Saving, "after_step", save_and_remove)
    train_here(config, f"train.output_dir={run}")
    assert last_payloads(run) == last_payloads(config.parent / "whole")
