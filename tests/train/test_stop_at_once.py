"""Processes that are stopped where nothing can be saved, or where nobody wants to wait for it."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.train.live import last_payloads, resume_here, train_here
from tests.train.prepared import Prepared
from tests.train.test_folder import snapshot
from tests.train.test_run import checkpoints_of
from tests.train.workspace import make_workspace

BROKEN = "tests.train.broken:"
BOTH = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config; `whole` is its run of 4 steps, `half` the same up to step 2."""
    folder = tmp_path_factory.mktemp("at-once")
    config = make_workspace(folder, train={"max_steps": 4})
    train_here(config, f"train.output_dir={folder / 'whole'}", "checkpoint.save_steps=2")
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoints" / "step-00000004")
    return config


@pytest.fixture
def half(workspace: Path, tmp_path: Path) -> Path:
    shutil.copytree(workspace.parent / "half", tmp_path / "half")
    return tmp_path / "half"


def unchanged(run: Path) -> object:
    """All of a run folder but who holds it."""
    return {name: facts for name, facts in snapshot(run).items() if name != "run.lock"}


@pytest.mark.slow
@pytest.mark.parametrize("number", BOTH)
def test_a_signal_in_the_warm_up_ends_at_once_and_the_run_can_be_started_again(
    number: signal.Signals, workspace: Path, tmp_path: Path, server: Prepared
) -> None:
    run = tmp_path / "run"
    args: list[str | Path] = ["train", workspace, f"train.output_dir={run}"]
    child = server.start(*args, broken=[f"{BROKEN}warm_up_never_ends"])
    child.wait_for("waits now")
    child.send(number)
    assert child.end() in (128 + number, -number)  # a shell shows both as 128 + number
    assert "Traceback" not in child.text
    assert not (run / "checkpoints").exists()
    assert not (run / "metrics.jsonl").exists()
    train_here(workspace, f"train.output_dir={run}")
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_wish_before_the_first_step_is_met_after_it(
    command: str, workspace: Path, half: Path, tmp_path: Path, server: Prepared
) -> None:
    """As by a scheduler that warns all jobs of a time limit, whatever they are at."""
    run = half if command == "resume" else tmp_path / "run"
    train: list[str | Path] = ["train", workspace, f"train.output_dir={run}"]
    args = ["resume", half, "checkpoint.save_steps=null"] if command == "resume" else train
    child = server.run(*args, broken=[f"{BROKEN}warm_up_gets_a_wish"])
    assert child.end() == 0, child.text
    first, had = (3, [2]) if command == "resume" else (1, [])
    assert checkpoints_of(run) == [f"step-{step:08d}" for step in [*had, first, 4][-2:]]
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [*BOTH, signal.SIGHUP])
def test_a_signal_while_a_checkpoint_is_loaded_ends_at_once_and_changes_nothing(
    number: signal.Signals, workspace: Path, half: Path, server: Prepared
) -> None:
    before = unchanged(half)
    child = server.start("resume", half, broken=[f"{BROKEN}loading_never_ends"])
    child.wait_for("waits now")
    child.send(number)
    assert child.end() == 128 + number, child.text
    assert f"Stopped by {number.name} before anything had changed." in child.text
    assert unchanged(half) == before
    resume_here(half)
    assert last_payloads(half) == last_payloads(workspace.parent / "whole")


@pytest.mark.slow
def test_the_second_interrupt_gives_up_the_save_and_the_next_start_removes_its_traces(
    workspace: Path, half: Path, server: Prepared
) -> None:
    # So many steps that the save can only be that of the stop: the first signal was seen then.
    broken = [f"{BROKEN}no_save_ever_begins"]
    child = server.start("resume", half, "--steps", "100000", broken=broken)
    child.wait_for("targets/s")
    child.send(signal.SIGINT)
    child.wait_for("waits now")
    child.send(signal.SIGINT)
    assert child.end() == 130, child.text
    assert "Stopped by a second signal, SIGINT: the last checkpoint stays." in child.text
    assert "Traceback" not in child.text
    assert checkpoints_of(half) == ["step-00000002"]
    assert list(half.glob("checkpoints/.tmp-step-*"))
    resume_here(half)
    assert not list(half.glob("checkpoints/.*"))
    assert last_payloads(half) == last_payloads(workspace.parent / "whole")


@pytest.mark.slow
def test_one_process_at_a_time_goes_on_with_a_run(
    workspace: Path, half: Path, server: Prepared
) -> None:
    first = server.start("resume", half, broken=[f"{BROKEN}loading_never_ends"])
    first.wait_for("waits now")
    before = snapshot(half)
    commands: list[list[str | Path]] = [
        ["resume", half],
        ["train", workspace, f"train.output_dir={half}"],
    ]
    for args in commands:
        second = server.run(*args)
        assert second.end() == 6, second.text
        assert f"is in use by process {first.pid} on " in second.text
        assert "Traceback" not in second.text
    assert snapshot(half) == before
    first.send(signal.SIGKILL)
    first.end()
    third = server.run("resume", half)  # the lock file of the dead process is no lock
    assert third.end() == 0, third.text
    assert last_payloads(half) == last_payloads(workspace.parent / "whole")
