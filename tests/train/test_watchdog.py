"""A run in which nothing ends any more is noticed, and nothing else is."""

import re
import threading
from pathlib import Path

import pytest

from megatrain_cli.train.watchdog import Watchdog
from tests.scheduler import Watched
from tests.train.live import last_payloads, resume_here, train_here
from tests.train.prepared import Prepared
from tests.train.test_run import checkpoints_of
from tests.train.workspace import make_workspace

SECONDS = 900.0


class Clock:
    """Time that passes only where a test says so, seen by a watchdog that looks at it then."""

    def __init__(self) -> None:
        self.now, self.progress = 0.0, 0
        self.hung = threading.Event()
        self.changed = Watched()
        self.dog = Watchdog(
            lambda: self.progress, self.hung.set, seconds=SECONDS, clock=lambda: self.now
        )
        self.dog._changed = self.changed

    def passes(self, seconds: float) -> None:
        """Let the watchdog look, after so long; returns when it waits again or has acted."""
        with self.changed:
            self.now += seconds
            self.changed.notify_all()
        self.settles()

    def settles(self) -> None:
        while not self.hung.is_set():
            if self.changed.waits.acquire(timeout=0.01):
                return


def test_it_acts_once_when_nothing_has_ended_for_so_long() -> None:
    clock = Clock()
    with clock.dog as dog:
        clock.settles()
        with dog.watching():
            clock.settles()
            clock.passes(SECONDS - 1)
            assert not clock.hung.is_set()
            clock.passes(1)
            assert clock.hung.wait(60)


def test_whatever_ends_sets_it_back() -> None:
    clock = Clock()
    with clock.dog as dog:
        clock.settles()
        with dog.watching():
            clock.settles()
            for _ in range(5):
                clock.passes(SECONDS - 1)
                clock.progress += 1
                clock.passes(0.5)
            assert not clock.hung.is_set()


def test_it_does_not_look_where_nothing_is_awaited() -> None:
    """Between steps, as while a checkpoint is written that the run waits for."""
    clock = Clock()
    with clock.dog as dog:
        clock.settles()
        for _ in range(2):
            clock.passes(SECONDS * 9)
            with dog.watching():
                clock.settles()
                clock.passes(SECONDS - 1)
            clock.settles()
        assert not clock.hung.is_set()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of 4 steps, and in `whole` its undisturbed run."""
    folder = tmp_path_factory.mktemp("hangs")
    config = make_workspace(folder, train={"max_steps": 4}, model={"layers": 2})
    train_here(config, f"train.output_dir={folder / 'whole'}")
    return config


@pytest.mark.slow
def test_a_run_that_hangs_shows_its_threads_saves_what_it_has_and_ends_with_10(
    workspace: Path, tmp_path: Path, server: Prepared
) -> None:
    run = tmp_path / "run"
    args: list[str | Path] = ["train", workspace, f"train.output_dir={run}"]
    child = server.run(*args, broken=["tests.train.broken:step_3_hangs"])
    assert child.end() == 10, child.text
    assert re.search(r"File .*broken\.py.* in _wait_for_ever", child.text), "the stacks"
    assert re.search(
        r"Nothing has ended for 900 s: .* hangs\. The state after step 2 is saved\.", child.text
    )
    assert checkpoints_of(run) == ["step-00000002"]
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


@pytest.mark.slow
def test_a_disk_that_hangs_ends_the_run_with_10_and_leaves_what_was_saved(
    workspace: Path, tmp_path: Path, server: Prepared
) -> None:
    """Training goes on until an update needs a tile that is being written."""
    run = tmp_path / "run"
    args: list[str | Path] = [
        "train",
        workspace,
        f"train.output_dir={run}",
        "checkpoint.save_steps=1",
        "train.max_steps=1000",  # so that it is a step that waits, and not the last save
    ]
    child = server.run(*args, broken=["tests.train.broken:second_save_hangs"])
    assert child.end() == 10, child.text
    assert "Nothing has ended for 1 s" in child.text
    assert checkpoints_of(run) == ["step-00000001"]
    resume_here(run, steps=4)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")
