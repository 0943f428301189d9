"""Which checkpoint is gone on from: the newest of a run, or exactly the one that was named."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    IncompatibleError,
    MegatrainError,
    NoCheckpointError,
)
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.identity import Origin
from megatrain_cli.train.position import Position, position_of
from megatrain_cli.train.target import Choice, Target, choose, find_target
from tests.train.saved import make_run, save_step
from tests.train.test_folder import snapshot

FS = FileSystem()


def chosen(path: Path, *, rewind: bool = False, fork: bool = False, **more: object) -> Choice:
    found = choose(find_target(path, FS), FS, rewind=rewind, fork=fork, **more)  # type: ignore[arg-type] # `refused`
    found.checkpoint.close()
    return found


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def test_a_run_a_checkpoint_and_a_checkpoint_out_of_its_run_are_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, [3])
    assert find_target(run, FS) == Target(run, None)
    assert find_target(step(run, 3), FS) == Target(run, step(run, 3))
    copied = tmp_path / "copied"
    step(run, 3).rename(copied)
    assert find_target(copied, FS) == Target(None, copied)
    unfinished = tmp_path / "step-00000004"
    unfinished.mkdir()
    assert find_target(unfinished, FS) == Target(None, unfinished)


def test_what_cannot_be_looked_at_is_not_called_absent(tmp_path: Path) -> None:
    """Whoever asks: `inspect-ckpt` and `export` use the same look."""
    closed = tmp_path / "closed"
    make_run(closed / "run", [3])
    closed.chmod(0)
    with as_nobody(), pytest.raises(ClosedError, match=r"run cannot be looked at: Permission"):
        find_target(closed / "run", FS)
    closed.chmod(0o700)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, why in (("x" * 300, "File name too long"), ("circle", "Too many levels")):
        with pytest.raises(NoCheckpointError, match=f"cannot be looked at: {why}"):
            find_target(tmp_path / name, FS)


def test_a_run_whose_one_checkpoint_is_closed_says_so() -> None:
    """Not that it has weights alone, nor nothing."""
    with TemporaryDirectory() as folder:  # anybody may come to it, unlike to `tmp_path`
        run = Path(folder)
        run.chmod(0o755)
        make_run(run, [3])
        step(run, 3).chmod(0)
        with as_nobody(), pytest.raises(ClosedError, match="step-00000003 may be whole"):
            chosen(run)
        step(run, 3).chmod(0o700)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions do not bind root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_is_neither_is_said_and_nothing_is_opened(tmp_path: Path) -> None:
    """F50, F55: never from scratch."""
    with pytest.raises(NoCheckpointError, match="there is no such folder"):
        find_target(tmp_path / "missing", FS)
    (tmp_path / "state.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(NoCheckpointError, match="it is a file, not a run folder"):
        find_target(tmp_path / "state.pt", FS)
    with pytest.raises(NoCheckpointError, match=r"not a run, which has a folder .checkpoints.*$"):
        find_target(tmp_path, FS)
    (tmp_path / "runs" / "first" / "checkpoints").mkdir(parents=True)
    with pytest.raises(NoCheckpointError, match=r"Did you mean .*runs/first\?$"):
        find_target(tmp_path / "runs", FS)
    (tmp_path / "runs" / "first" / "checkpoints" / "step-00000003").mkdir()
    with pytest.raises(NoCheckpointError, match=r"Did you mean .*runs/first\?$"):
        find_target(tmp_path / "runs" / "first" / "checkpoints", FS)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NoCheckpointError, match="has weights and no optimizer state"):
        find_target(tmp_path, FS)


def test_a_run_that_saved_nothing_says_how_it_begins_again(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.metrics.write_text('{"step": 1}\n')
        for _ in range(2):  # without a folder of checkpoints, and with an empty one
            with pytest.raises(NoCheckpointError, match="`megatrain train` begins it again in"):
                find_target(tmp_path / "run", FS)
            folder.checkpoints.mkdir(exist_ok=True)
    with RunFolder(tmp_path / "fork", Origin("run-1", "sha256:1", 7)):
        again = r"`--fork .*fork` from step 7 of run run-1 begins it again in"
        with pytest.raises(NoCheckpointError, match=again):
            find_target(tmp_path / "fork", FS)


def test_a_run_of_weights_alone_says_how_to_train_on(tmp_path: Path) -> None:
    weights = tmp_path / "checkpoints" / "step-00000004"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (weights / "model-embed.safetensors").write_bytes(b"")
    with pytest.raises(NoCheckpointError, match=f"with model.path={weights}$"):
        find_target(tmp_path, FS)
    make_run(tmp_path / "run", [3])  # beside one that is whole, nothing is said of it
    weights.rename(step(tmp_path / "run", 4))
    assert chosen(tmp_path / "run").checkpoint.folder == step(tmp_path / "run", 3)


def test_a_run_goes_on_from_its_newest_and_a_named_one_must_be_that(tmp_path: Path) -> None:
    make_run(tmp_path, [99, 100])  # F47: as text, 99 is the last
    assert chosen(tmp_path).checkpoint.folder == step(tmp_path, 100)
    assert chosen(step(tmp_path, 100)).superseded == ()
    with pytest.raises(ConfigError, match=r"step-00000100 is\. Resume.*--rewind.*--fork NEW_RUN"):
        chosen(step(tmp_path, 99))
    back = chosen(step(tmp_path, 99), rewind=True)
    assert not any("--rewind" in note for note in back.notes)
    [note] = chosen(step(tmp_path, 100), rewind=True).notes
    assert note == "--rewind: has no effect: step-00000100 is the newest checkpoint of its run"
    assert back.superseded == (step(tmp_path, 100),)
    assert chosen(step(tmp_path, 99), fork=True).superseded == ()


def test_no_clock_is_asked_which_is_the_newest(tmp_path: Path) -> None:
    """F69: a clock that jumped, or a copy that gave all files other times."""
    make_run(tmp_path, [3, 4])
    for path in step(tmp_path, 3).rglob("*"):
        os.utime(path, (4e9, 4e9))
    for path in step(tmp_path, 4).rglob("*"):
        os.utime(path, (1, 1))
    assert chosen(tmp_path).checkpoint.folder == step(tmp_path, 4)


def test_a_run_falls_back_and_says_so_and_a_named_one_does_not(tmp_path: Path) -> None:
    """F54; the broken folder is set aside, or the next save of its step would meet it."""
    make_run(tmp_path, [3, 4])
    (step(tmp_path, 4) / "model-embed.safetensors").unlink()
    found = chosen(tmp_path)
    assert found.checkpoint.folder == step(tmp_path, 3)
    assert found.superseded == (step(tmp_path, 4),)
    [note] = [note for note in found.notes if "step-00000004" in note]
    assert "step-00000003" in note
    with pytest.raises(CorruptError, match="missing"):
        chosen(step(tmp_path, 4))
    (step(tmp_path, 3) / "manifest.json").unlink()
    with pytest.raises(NoCheckpointError):
        chosen(tmp_path)


def test_one_found_damaged_while_it_was_read_is_passed_over(tmp_path: Path) -> None:
    make_run(tmp_path, [3, 4])
    found = chosen(tmp_path, refused={step(tmp_path, 4): "a bad shard"})
    assert found.checkpoint.folder == step(tmp_path, 3)
    assert any("a bad shard" in note for note in found.notes)


def test_a_higher_step_of_an_earlier_attempt_is_not_newer_and_is_set_aside(tmp_path: Path) -> None:
    """F48: else the run would jump to the branch that was given up, or its save would fail."""
    run_id = make_run(tmp_path, [])
    save_step(tmp_path, 9, run_id=run_id, attempt=1)
    save_step(tmp_path, 5, run_id=run_id, attempt=2)
    for path in (tmp_path, step(tmp_path, 5)):
        found = chosen(path)
        assert found.checkpoint.folder == step(tmp_path, 5)
        assert found.superseded == (step(tmp_path, 9),)
        assert found.seen == 2


def test_an_update_under_way_counts_as_made(tmp_path: Path) -> None:
    run_id = make_run(tmp_path, [])
    save_step(tmp_path, 5, run_id=run_id, pending=4)  # no layer has had it: the folder is 4's
    step(tmp_path, 5).rename(step(tmp_path, 4))
    save_step(tmp_path, 6, run_id="other")
    found = chosen(tmp_path)
    assert found.checkpoint.manifest.step == 4
    assert position_of(found.checkpoint.manifest) == Position(5, 20)
    assert found.superseded == (step(tmp_path, 6),)


@pytest.mark.parametrize(
    ("rewind", "fork", "named", "message"),
    [
        (True, True, True, "a fork gives up nothing"),
        (True, False, False, "name the checkpoint to go back to"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    rewind: bool, fork: bool, named: bool, message: str, tmp_path: Path
) -> None:
    make_run(tmp_path, [3])
    with pytest.raises(ConfigError, match=message):
        chosen(step(tmp_path, 3) if named else tmp_path, rewind=rewind, fork=fork)


def test_a_checkpoint_in_no_run_or_in_another_needs_a_fork(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, [3])
    save_step(tmp_path / "x", 7, run_id="f" * 32)
    stranger = step(run, 7)
    step(tmp_path / "x", 7).rename(stranger)
    assert chosen(run).checkpoint.folder == step(run, 3)
    with pytest.raises(IncompatibleError, match=r"is of run f{32}.*--fork"):
        chosen(stranger)
    assert chosen(stranger, fork=True).checkpoint.folder == stranger
    alone = tmp_path / "alone"
    stranger.rename(alone)
    with pytest.raises(ConfigError, match="lies in no run folder"):
        chosen(alone)
    assert chosen(alone, fork=True).checkpoint.folder == alone


def test_choosing_changes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, [3, 4])
    before = snapshot(tmp_path)
    chosen(step(tmp_path, 3), rewind=True)
    for bad in (step(tmp_path, 3), step(tmp_path, 5)):
        with pytest.raises(MegatrainError):
            chosen(bad)
    assert snapshot(tmp_path) == before


def test_a_damaged_file_without_tensors_is_found_before_anything_is_made_of_it(
    tmp_path: Path,
) -> None:
    """F40, F54: no loader reads these, and config or tokenizer would be used as they are."""
    make_run(tmp_path, [3, 4])
    newest = step(tmp_path, 4)
    names = [aux["file"] for aux in json.loads((newest / "manifest.json").read_bytes())["aux"]]
    assert len(names) > 2
    for name in names:
        whole = (newest / name).read_bytes()
        (newest / name).write_bytes(whole[:-1] + b"~")
        found = chosen(tmp_path)
        assert found.checkpoint.folder == step(tmp_path, 3), name
        assert any("step-00000004 is refused" in note for note in found.notes)
        with pytest.raises(CorruptError, match=Path(name).name):
            chosen(newest)
        with pytest.raises(CorruptError, match=Path(name).name):
            chosen(newest, fork=True)
        (newest / name).write_bytes(whole)
    assert chosen(tmp_path).checkpoint.folder == newest
