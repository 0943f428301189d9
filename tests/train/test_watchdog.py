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


class Sleepy(Watched):
    """Waits that end when a test wants it; `times_out`: as if nobody had ended them."""

    times_out = False

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout) and not self.times_out


class Clock:
    """Time that passes only where a test says so, seen by a watchdog that looks at it then."""

    def __init__(self) -> None:
        self.now, self.progress = 0.0, 0
        self.hung = threading.Event()
        self.changed = Sleepy()
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

    def sleeps(self, seconds: float) -> None:
        """As `passes`, but the watchdog's own wait ends by itself, and so late."""
        self.changed.times_out = True
        self.passes(seconds)
        self.changed.times_out = False

    def settles(self) -> None:
        while not self.hung.is_set():
            if self.changed.waits.acquire(timeout=0.01):
                return


def test_it_acts_once_when_nothing_has_ended_for_so_long() -> None:
    clock = Clock()
    with clock.dog:
        clock.settles()
        clock.passes(SECONDS - 1)
        assert not clock.hung.is_set()
        clock.passes(1)
        assert clock.hung.wait(60)


def test_whatever_ends_sets_it_back() -> None:
    clock = Clock()
    with clock.dog:
        clock.settles()
        for _ in range(5):
            clock.passes(SECONDS - 1)
            clock.progress += 1
            clock.passes(0.5)
        assert not clock.hung.is_set()


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """Ctrl-Z for an hour, then `fg`: the wait of the watchdog itself took that long."""
    clock = Clock()
    with clock.dog:
        clock.settles()
        for _ in range(5):
            clock.sleeps(SECONDS * 9)
        assert not clock.hung.is_set()
        clock.passes(SECONDS)
        assert clock.hung.wait(20)


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
    assert "Nothing has ended for 1 s: a copy, a thread or a disk hangs. Saving what" in child.text
    assert "The state after step 2 is saved." in child.text
    assert checkpoints_of(run) == ["step-00000002"]
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["train.max_steps=1000"],  # a step waits for a tile that is being written
        ["train.max_steps=1000", "checkpoint.async_save=false"],  # the run waits for the save
        ["train.max_steps=2"],  # it is the last save
    ],
    ids=["in a step", "in a save", "at the end"],
)
def test_a_disk_that_hangs_ends_the_run_with_10_and_leaves_what_was_saved(
    overrides: list[str], workspace: Path, tmp_path: Path, server: Prepared
) -> None:
    run = tmp_path / "run"
    args: list[str | Path] = ["train", workspace]
    args += [f"train.output_dir={run}", "checkpoint.save_steps=1", *overrides]
    child = server.run(*args, broken=["tests.train.broken:second_save_hangs"])
    assert child.end() == 10, child.text
    assert re.search(r"disk hangs\. The checkpoint of step \d+ was being written\. Sav", child.text)
    assert "The disk does not answer: given up after 1 s." in child.text
    assert checkpoints_of(run) == ["step-00000001"]
    resume_here(run, steps=4)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")
