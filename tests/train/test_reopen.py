"""A run that goes on: the same run in the same folder, wherever that lies, one writer at a time."""

import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.names import folder_name
from megatrain_cli.errors import (
    ConfigError,
    CorruptError,
    IncompatibleError,
    LockedError,
    NoCheckpointError,
)
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.identity import Origin, read_identity
from tests.train.test_folder import snapshot

ID = "sha256:" + "1" * 64


def go_on(folder: RunFolder, run_id: str, step: int = 2, *superseded: Path) -> int:
    return folder.go_on(run_id=run_id, step=step, checkpoint_id=ID, seen=0, superseded=superseded)


def begin(path: Path, steps: int = 4) -> str:
    """A run that ended after some steps; its identity."""
    with RunFolder(path) as folder:
        lines = (json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
        folder.metrics.write_text("".join(lines))
        (folder.checkpoints / folder_name(steps)).mkdir(parents=True)
        return folder.run_id


def test_a_new_run_has_an_identity_and_counts_its_first_attempt(tmp_path: Path) -> None:
    run_id = begin(tmp_path / "run")
    identity = read_identity(tmp_path / "run")
    assert identity is not None
    assert (identity.run_id, identity.parent) == (run_id, None)
    [line] = (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()
    assert (json.loads(line)["attempt"], json.loads(line)["run_id"]) == (1, run_id)


def test_a_run_keeps_its_identity_and_counts_on_and_its_journal_has_each_step_once(
    tmp_path: Path,
) -> None:
    run_id = begin(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")  # P18
    for attempt in (2, 3):
        with RunFolder.reopen(tmp_path / "moved") as folder:
            assert folder.attempt == 0
            assert go_on(folder, run_id) == (2 if attempt == 2 else 0)
            assert (folder.attempt, folder.run_id, folder.parent) == (attempt, run_id, None)
            steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
            assert steps == [1, 2]
            folder.lock.check()
    assert (tmp_path / "moved" / "superseded" / "metrics-2.jsonl").exists()


def test_checkpoints_of_later_steps_are_set_aside(tmp_path: Path) -> None:
    run_id = begin(tmp_path)
    with RunFolder.reopen(tmp_path) as folder:
        go_on(folder, run_id, 2, folder.checkpoints / folder_name(4))
    assert (tmp_path / "superseded" / "step-00000004-2").is_dir()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_journal_that_cannot_be_read_is_refused_before_anything_has_changed(
    tmp_path: Path,
) -> None:
    run_id = begin(tmp_path)
    with RunFolder.reopen(tmp_path) as folder:
        folder.metrics.write_bytes(b"\0" * 100 + b"\n")  # as after a power loss
        before = snapshot(tmp_path)
        with pytest.raises(CorruptError, match="Move the file away to go on"):
            go_on(folder, run_id, 2, folder.checkpoints / folder_name(4))
        assert snapshot(tmp_path) == before


def test_a_folder_with_checkpoints_alone_takes_their_identity(tmp_path: Path) -> None:
    run_id = begin(tmp_path)
    for name in ("run.json", "attempts.jsonl", "metrics.jsonl"):
        (tmp_path / name).unlink()
    with RunFolder.reopen(tmp_path) as folder:
        assert folder.parent is None
        folder.go_on(run_id=run_id, step=4, checkpoint_id=ID, seen=5, superseded=())
        assert (folder.run_id, folder.attempt) == (run_id, 6)
    identity = read_identity(tmp_path)
    assert identity is not None
    assert identity.run_id == run_id


def test_a_checkpoint_of_another_run_does_not_go_on_in_this_folder(tmp_path: Path) -> None:
    begin(tmp_path)
    before = {k: v for k, v in snapshot(tmp_path).items() if k != "run.lock"}
    with RunFolder.reopen(tmp_path) as folder, pytest.raises(IncompatibleError, match="--fork"):
        go_on(folder, "f" * 32)
    assert {k: v for k, v in snapshot(tmp_path).items() if k != "run.lock"} == before


def test_a_fork_is_another_run_that_knows_where_it_comes_from(tmp_path: Path) -> None:
    run_id = begin(tmp_path / "run")
    origin = Origin(run_id, ID, 4)
    with RunFolder(tmp_path / "fork", origin) as folder:
        assert folder.run_id != run_id
        assert (folder.parent, folder.attempt) == (origin, 1)
    with RunFolder.reopen(tmp_path / "fork") as folder:
        assert folder.parent == origin
    with pytest.raises(ConfigError, match=f"megatrain resume {tmp_path / 'run'}"):
        RunFolder(tmp_path / "run", origin)


def test_there_must_be_a_folder_to_go_on_in(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="there is no such run folder"):
        RunFolder.reopen(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").write_text("x")
    with pytest.raises(Exception, match="is no JSON"):
        RunFolder.reopen(tmp_path)
    (tmp_path / "run.json").unlink()
    RunFolder.reopen(tmp_path).lock.close()  # the lock was given back


def resume(path: Path, run_id: str, end: Connection) -> None:
    try:
        with RunFolder.reopen(path) as folder:
            go_on(folder, run_id)
            end.send("goes on")
            end.recv()
    except LockedError as error:
        end.send(str(error))


def test_of_two_resumes_at_once_the_second_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    """F76; F68: once the first has died, however, the next takes over."""
    run_id = begin(tmp_path)
    context = multiprocessing.get_context("spawn")
    ends = []  # a process whose other end is gone would stop by itself

    def launch() -> tuple[multiprocessing.process.BaseProcess, str]:
        here, there = context.Pipe()
        ends.append(here)
        process = context.Process(target=resume, args=(tmp_path, run_id, there), daemon=True)
        process.start()
        return process, here.recv()

    first, said = launch()
    assert said == "goes on"
    before = snapshot(tmp_path)
    second, said = launch()
    assert f"in use by process {first.pid} on " in said
    second.join()
    assert snapshot(tmp_path) == before
    first.kill()
    first.join()
    third, said = launch()
    assert said == "goes on"
    third.kill()
    third.join()
    attempts = (tmp_path / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in attempts] == [1, 2, 3]
