"""`resume`: its options, and what it says of a run that has ended."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatrain_cli.cli.app import app
from megatrain_cli.errors import ConfigError, IncompatibleError
from tests.train.saved import make_run, save_step
from tests.train.test_folder import snapshot
from tests.train.test_stop_at_once import unchanged


def resume(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["resume", *map(str, words)], catch_exceptions=False)


def test_a_run_that_has_ended_is_told_with_exit_0_and_nothing_is_written(tmp_path: Path) -> None:
    """F75."""
    run_id = make_run(tmp_path, [])
    save_step(tmp_path, 20, run_id=run_id, finished=True)
    before = snapshot(tmp_path)
    result = resume(tmp_path)
    assert result.exit_code == 0
    assert result.stdout == (f"{tmp_path}: finished at step 20; `--steps M` goes on to step M\n")
    assert snapshot(tmp_path) == before


def test_options_and_overrides_go_together(tmp_path: Path) -> None:
    make_run(tmp_path, [20])
    words = "--train.seed", "7", "optimizer.eps=1e-6"
    with pytest.raises(IncompatibleError, match=r"train\.seed: 42 -> 7") as caught:
        resume(tmp_path, *words, "--allow-change", "eps")
    assert "optimizer.eps" not in str(caught.value)
    assert resume(tmp_path, *words, "--allow-change", "eps,train.seed").exit_code == 0
    repeated = "--allow-change", "eps", "--allow-change", "seed"
    assert resume(tmp_path, *words, *repeated).exit_code == 0
    with pytest.raises(ConfigError, match="a fork gives up nothing"):
        resume(tmp_path, "--rewind", "--fork", tmp_path / "new")


def test_a_fork_of_a_run_that_has_ended_asks_for_more_steps(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [20])
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"run finished at step 20.*Add `--steps M` with M above"):
        resume(tmp_path / "run", "--fork", tmp_path / "new")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_a_pipe_in_the_place_of_data_is_refused_and_nothing_is_changed(
    key: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", [3])
    os.mkfifo(tmp_path / "rows.jsonl")
    before = unchanged(tmp_path / "run")
    change = f"{key}={tmp_path / 'rows.jsonl'}"
    with pytest.raises(ConfigError, match=rf"{key}.*: `.*` is a pipe, where a file"):
        resume(tmp_path / "run", change, "--allow-change", "data.train")
    assert unchanged(tmp_path / "run") == before


@pytest.mark.parametrize("words", [["--steps", "0"], ["--steps", "x"], ["nonsense"]])
def test_wrong_usage_ends_with_2(words: list[str], tmp_path: Path) -> None:
    make_run(tmp_path, [20])
    assert resume(tmp_path, *words).exit_code == 2


def test_the_help_names_every_option() -> None:
    text = resume("--help").stdout
    for option in ("--allow-change", "--steps", "--rewind", "--fork", "--force"):
        assert option in text
