"""One run folder, one run, one writer."""

import multiprocessing
import os
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatrain_cli.errors import ConfigError, CorruptError, LockedError, StorageError
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.identity import Origin
from tests.checkpoint.made import make_checkpoint
from tests.train.saved import make_run


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file's time and bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def test_a_folder_is_made_with_its_parents_and_names_its_parts(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a" / "b") as folder:
        folder.write_config("x: 1\n")
        assert (tmp_path / "a" / "b" / "config.yaml").read_text() == "x: 1\n"
        assert folder.metrics == tmp_path / "a" / "b" / "metrics.jsonl"
        assert folder.checkpoints == tmp_path / "a" / "b" / "checkpoints"


@pytest.mark.parametrize(
    "part",
    [
        "checkpoints/step-00000003/config.json",
        "checkpoints/best/manifest.json",
        "superseded/step-00000003-2/config.json",
        "attempts.jsonl",
    ],
)
def test_a_folder_in_which_a_run_has_saved_is_refused_and_left_as_it_is(
    part: str, tmp_path: Path
) -> None:
    with RunFolder(tmp_path):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).write_text('{"checkpoint": "sha256:1"}\n')
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a run already.*nothing in it was changed"):
        RunFolder(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_config_in_the_folder_is_never_written_over(tmp_path: Path) -> None:
    """`train.output_dir: .` names the folder of the config itself, with all its comments."""
    (tmp_path / "config.yaml").write_text("# mine\n")
    with pytest.raises(ConfigError, match=r"would write its config over .*Name another folder"):
        RunFolder(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "# mine\n"
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config("a: 1\n")
    with RunFolder(tmp_path / "run") as folder:  # its own it may replace
        folder.write_config("a: 2\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == "a: 2\n"


@pytest.mark.parametrize("name", ["run.json", "attempts.jsonl", "metrics.jsonl", "config.yaml"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    run_id = make_run(tmp_path, [3])
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    expected = (
        nullcontext()
        if name == "config.yaml"
        else pytest.raises(StorageError, match="it is a pipe, not a file")
    )
    with expected, RunFolder.reopen(tmp_path) as folder:
        folder.go_on(run_id=run_id, step=3, checkpoint_id="x", seen=1, superseded=())
        folder.write_config("a: 1\n")


@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        "checkpoints",
        "checkpoints/step-00000004",
        "checkpoints/step-00000003",
        "checkpoints/step-00000003/a/b",
        "superseded/c",
    ],
)
def test_no_run_begins_among_the_checkpoints_of_another(
    place: str, fork: bool, tmp_path: Path
) -> None:
    """Retention would remove it with them, and its files would be taken for theirs."""
    make_run(tmp_path, [3])
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"Name a folder outside of it") as caught:
        RunFolder(tmp_path / place, Origin("a", "sha256:b", 1) if fork else None)
    assert str(caught.value).startswith("--fork: " if fork else "train.output_dir: ")
    assert snapshot(tmp_path) == before


def test_a_checkpoint_alone_has_no_run_in_it_either(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "alone")
    with pytest.raises(ConfigError, match=r"alone is a checkpoint"):
        RunFolder(tmp_path / "alone" / "run")
    with RunFolder(tmp_path / "checkpoints" / "run"):  # a folder of runs may be called so
        pass


def test_checkpoints_on_a_disk_that_is_not_there_are_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder(tmp_path)


def test_a_run_that_saved_nothing_begins_again_and_its_steps_are_set_aside(tmp_path: Path) -> None:
    """Else neither `train` nor `resume` could go on, as where a scheduler starts a job again."""
    lines = '{"step": 1}\n{"step": 2}\n'
    run_ids: set[str] = set()
    notes: list[str] = []
    for attempt in (1, 2, 3):
        with RunFolder(tmp_path) as folder:
            assert folder.attempt == attempt
            notes += folder.notes
            assert len(notes) == attempt - 1
            run_ids.add(folder.run_id)
            assert not folder.metrics.exists() or folder.metrics.read_text() == ""
            folder.metrics.write_text(lines + '{"st')
            # A disk of its own has this one.
            (folder.checkpoints / "lost+found").mkdir(parents=True, exist_ok=True)
    assert len(run_ids) == 1
    aside = sorted((tmp_path / "superseded").iterdir())
    assert [path.name for path in aside] == ["metrics-2.jsonl", "metrics-3.jsonl"]
    assert [path.read_text() for path in aside] == [lines, lines]
    assert "begins again; its 2 lines of metrics.jsonl were moved to superseded/" in notes[0]


def test_a_journal_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(CorruptError, match=r"metrics\.jsonl:1: not a step record"):
        RunFolder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "run.lock"}


def test_a_run_that_ended_before_its_first_step_is_no_obstacle(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.write_config("")
        folder.metrics.touch()
        # As a process leaves it that was killed while it looked what the disk can do.
        (folder.checkpoints / ".tmp-probe-0a1b2c3d").mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("keep")
    with RunFolder(tmp_path):
        assert (tmp_path / "mine.txt").read_text() == "keep"


def hold(path: Path, end: Connection) -> None:
    with RunFolder(path):
        end.send("held")
        end.recv()


def test_a_lock_names_its_process_and_ends_with_it_however_it_ends(tmp_path: Path) -> None:
    """PRC-02: a lock that outlives a killed process would block the folder for ever."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, there))
    process.start()
    assert here.recv() == "held"
    before = snapshot(tmp_path)
    with pytest.raises(LockedError, match=f"in use by process {process.pid} on "):
        RunFolder(tmp_path)
    assert snapshot(tmp_path) == before
    process.kill()
    process.join()
    with RunFolder(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run")
    with RunFolder(tmp_path / "run") as folder:
        (tmp_path / "run" / "config.yaml").mkdir()
        with pytest.raises(StorageError, match=r"config\.yaml could not be written"):
            folder.write_config("")
