"""What was changed in a run's `config.yaml` and does nothing on `resume` is said, key by key."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from megatrain_cli.config.load import dump_config
from megatrain_cli.train.outlook import find_finished
from megatrain_cli.train.resume import ResumeRequest
from tests.plan.small import Sections
from tests.train.saved import make_run, saved_config
from tests.train.test_resume import FINISHED, FS, resume, step

EDITED: Sections = {"optimizer": {"learning_rate": 0.5}, "checkpoint": {"save_steps": 7}}


def write(run: Path, sections: Sections | None = None, at: Path | None = None) -> None:
    (run / "config.yaml").write_text(dump_config(saved_config(at or run, sections)))


def notes(run: Path, *overrides: str, **more: object) -> list[str]:
    with ExitStack() as stack:
        found = resume(stack, run, *overrides, **more)
        return [note for note in found.notes if "config.yaml" in note]


def test_each_key_that_differs_is_named_with_both_values_and_what_to_do(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    write(tmp_path, EDITED)
    (said,) = notes(tmp_path)
    assert f"{tmp_path}/config.yaml has no effect" in said
    assert "optimizer.learning_rate is 0.5 there and stays 2e-05" in said
    assert "checkpoint.save_steps is 7 there and stays null" in said
    assert "on the command line, as `optimizer.learning_rate=...`" in said


def test_a_run_that_has_ended_says_it_too(tmp_path: Path) -> None:
    """The file's new length is not heeded either."""
    make_run(tmp_path, [20])
    write(tmp_path, {"train": {"max_steps": 40}})
    said: list[str] = []
    assert find_finished(ResumeRequest(tmp_path), FS, said.append, {}) == FINISHED
    assert "train.max_steps is 40 there and stays 20" in said[-1]


def test_what_the_command_line_sets_is_not_asked_for_again(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    write(tmp_path, {"checkpoint": {"save_steps": 7}, "train": {"max_steps": 40}})
    assert notes(tmp_path, "checkpoint.save_steps=9", steps=30) == []


def test_a_change_that_is_allowed_and_not_made_is_said(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    with ExitStack() as stack:
        allowed = ("learning_rate", "data.train")
        found = resume(stack, tmp_path, "optimizer.eps=1e-8", allow_change=allowed).notes
    said = "--allow-change optimizer.learning_rate: the key stays 2e-05. Give it a new value, as"
    assert [note for note in found if "--allow-change" in note] == [
        f"{said} `optimizer.learning_rate=...`"
    ]
    with ExitStack() as stack:
        found = resume(
            stack, tmp_path, "optimizer.learning_rate=1", allow_change=("learning_rate",)
        ).notes
    assert not any("--allow-change" in note for note in found)


def test_an_evaluation_before_the_first_step_comes_too_late(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    with ExitStack() as stack:
        found = resume(stack, tmp_path, "eval.at_start=true", f"data.eval={tmp_path}").notes
    assert "eval.at_start: has no effect: the run is at step 3 already" in found


def test_the_file_as_the_run_wrote_it_or_none_is_no_edit(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    assert notes(tmp_path) == []
    write(tmp_path)
    assert notes(tmp_path) == []
    write(tmp_path, at=Path("/where/it/was"))
    assert notes(tmp_path) == []


@pytest.mark.parametrize("content", [b"train: [", b"\xff\xfe", b""])
def test_a_file_that_is_no_config_stops_nothing(content: bytes, tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    (tmp_path / "config.yaml").write_bytes(content)
    (said,) = notes(tmp_path)
    assert "no config any more" in said


def test_a_fork_does_not_look_at_it(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [3])
    write(tmp_path / "run", EDITED)
    assert notes(step(tmp_path / "run", 3), fork=tmp_path / "fork") == []
