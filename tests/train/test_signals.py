"""Signals at any moment of a whole run: what is saved and said, and with which code it ends."""

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.save import Saver, SaveReport
from megatrain_cli.errors import Stopped, StoppedUnsaved
from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.signals import WISHES
from tests.train.live import (
    Moments,
    Said,
    disk_waits,
    last_payloads,
    resume_here,
    train_here,
)
from tests.train.test_run import checkpoints_of, journal_of
from tests.train.workspace import make_workspace

pytestmark = pytest.mark.usefixtures("heeds_hangup")

ENDING = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM]
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and in `whole` the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("signals")
    config = make_workspace(folder, train={"max_steps": 6}, schedule={"type": "cosine"})
    train_here(config, f"train.output_dir={folder / 'whole'}")
    return config


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Moments:
    return Moments(monkeypatch)


@ENDING
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, Kind.CLIP, Kind.UPDATE])
def test_a_signal_in_a_step_ends_the_run_after_it_and_resume_ends_as_if_there_was_none(
    number: signal.Signals, kind: Kind, workspace: Path, tmp_path: Path, moments: Moments
) -> None:
    run = tmp_path / "run"
    moments.at(3, kind, lambda: signal.raise_signal(number))
    with pytest.raises(Stopped, match=rf"Stopped by {number.name} after step 3 of 6; all") as end:
        train_here(workspace, f"train.output_dir={run}")
    assert end.value.exit_code == 75
    assert checkpoints_of(run) == ["step-00000003"]
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_a_limit_of_cpu_time_ends_a_run_with_all_saved(
    workspace: Path, tmp_path: Path, moments: Moments
) -> None:
    """As `ulimit -S -t` sets it; above a soft limit that is also the hard one it kills."""
    before = resource.getrlimit(resource.RLIMIT_CPU)

    def exceed_it() -> None:
        soft = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (soft, before[1]))
        while resource.getrlimit(resource.RLIMIT_CPU)[0] < soft + 1:  # the system raises it
            pass
        resource.setrlimit(resource.RLIMIT_CPU, before)  # else it ends the tests behind the run

    run = tmp_path / "run"
    moments.at(3, Kind.FORWARD, exceed_it)
    with pytest.raises(Stopped, match=r"Stopped by SIGXCPU after step 3 of 6; all is saved"):
        train_here(workspace, f"train.output_dir={run}")
    assert checkpoints_of(run) == ["step-00000003"]


def test_interrupt_and_terminate_in_one_instant_are_one_request(
    workspace: Path, tmp_path: Path, moments: Moments
) -> None:
    """As when a job is cancelled at its terminal: nothing is thrown away, and nothing odd said."""

    def both() -> None:
        numbers = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    run = tmp_path / "run"
    moments.at(3, Kind.FORWARD, both)
    with pytest.raises(Stopped, match=r"Stopped by SIG(INT|TERM) after step 3 of 6; all is saved"):
        train_here(workspace, f"train.output_dir={run}")
    assert checkpoints_of(run) == ["step-00000003"]


def test_too_little_grace_is_said_with_numbers_and_no_save_is_begun(
    workspace: Path, tmp_path: Path, moments: Moments
) -> None:
    run, said = tmp_path / "run", Said()
    moments.at(3, Kind.FORWARD, lambda: signal.raise_signal(signal.SIGTERM))
    changes = ["checkpoint.save_steps=2", "checkpoint.async_save=false"]
    wanted = (
        r"Stopped by SIGTERM after step 3 of 6\. A save takes about \d+ s and 0 s were left of "
        r"`checkpoint\.grace_seconds`, so none was begun\. The last one is of step 2\."
    )
    with pytest.raises(StoppedUnsaved, match=wanted) as end:
        train_here(
            workspace,
            f"train.output_dir={run}",
            *changes,
            "checkpoint.grace_seconds=1e-9",
            said=said,
        )
    assert end.value.exit_code == 143
    assert checkpoints_of(run) == ["step-00000002"]
    assert not list(run.glob("checkpoints/.*"))
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_a_save_of_this_step_that_is_under_way_is_waited_for_and_not_made_again(
    workspace: Path, tmp_path: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = tmp_path / "run", Said()
    wait = Saver.wait
    in_flight: list[bool] = []
    with disk_waits(monkeypatch) as (_, go):

        def wait_and_let_go(saver: Saver) -> list[SaveReport]:
            if saver.in_flight:
                in_flight.append(True)
                go.set()
            return wait(saver)

        monkeypatch.setattr(Saver, "wait", wait_and_let_go)
        moments.at(3, Kind.FORWARD, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped, match="all is saved") as end:
            train_here(workspace, f"train.output_dir={run}", "checkpoint.save_steps=3", said=said)
    assert end.value.exit_code == 75
    assert in_flight == [True], "it was under way, and nothing else was waited for"
    assert said.text.count("saved ") == 1
    assert checkpoints_of(run) == ["step-00000003"]


@pytest.mark.parametrize("number", WISHES)
def test_a_wish_for_a_checkpoint_is_met_and_the_run_goes_on(
    number: signal.Signals, workspace: Path, tmp_path: Path, moments: Moments
) -> None:
    run = tmp_path / "run"
    moments.at(2, Kind.BACKWARD, lambda: signal.raise_signal(number))
    said = train_here(workspace, f"train.output_dir={run}", "checkpoint.async_save=false")
    assert re.findall(r"saved \S+-(\d+) \(", said) == ["00000002", "00000006"]
    assert [record["step"] for record in journal_of(run)] == [1, 2, 3, 4, 5, 6]
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_wishes_that_come_while_a_checkpoint_is_written_make_one_more(
    workspace: Path, tmp_path: Path, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    threads: list[threading.Thread] = []
    start = Saver._start

    def remember(saver: Saver, work: object) -> threading.Thread:
        threads.append(start(saver, work))  # type: ignore[arg-type]
        return threads[-1]

    monkeypatch.setattr(Saver, "_start", remember)
    with disk_waits(monkeypatch) as (waits, go):

        def let_go() -> None:
            assert waits.wait(60)
            go.set()
            threads[0].join()

        ask = lambda: signal.raise_signal(signal.SIGUSR1)  # noqa: E731
        for step in (1, 2, 3):
            moments.at(step, Kind.FORWARD, ask)
        moments.at(5, Kind.FORWARD, let_go)
        said = train_here(workspace, f"train.output_dir={run}", f"checkpoint.bounce_pool={1 << 24}")
    assert re.findall(r"saved \S+-(\d+) \(", said) == ["00000001", "00000005", "00000006"]
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")
