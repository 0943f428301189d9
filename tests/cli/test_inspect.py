"""`inspect-ckpt` and `resume`: what a folder holds, and what it lacks."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.cli.app import app
from megatrain_cli.errors import CorruptError, MegatrainError, NoCheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint of two weight files."""
    folder = tmp_path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros((4, 250), "float32")}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(24, "float16")}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def output(*words: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def error(*words: str | Path) -> MegatrainError:
    with pytest.raises(MegatrainError) as caught:
        CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return caught.value


def test_a_table_shows_each_file_and_the_total(run: Path) -> None:
    lines = [line.split() for line in output("inspect-ckpt", run).splitlines()]
    assert lines[0] == [str(run / "checkpoints" / "step-00000004")]
    assert lines[1] == ["file", "tensors", "parameters", "dtypes", "bytes"]
    assert lines[2][:4] == ["model-00001-of-00002.safetensors", "1", "1k", "F32"]
    assert lines[3][:4] == ["model-00002-of-00002.safetensors", "1", "24", "F16"]
    assert lines[4][:3] == ["total", "2", "1.024k"]


def test_json_holds_exact_numbers(run: Path) -> None:
    values = json.loads(output("inspect-ckpt", run, "--json"))
    assert values["total"]["parameters"] == 1024
    assert [file["dtypes"] for file in values["files"]] == [["F32"], ["F16"]]
    assert sum(file["bytes"] for file in values["files"]) == values["total"]["bytes"]


def test_a_damaged_file_is_named(run: Path) -> None:
    path = run / "checkpoints" / "step-00000004" / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = error("inspect-ckpt", run)
    assert isinstance(found, CorruptError)
    assert str(path) in str(found)
    assert "truncated" in str(found)


@pytest.mark.parametrize("command", ["inspect-ckpt", "resume"])
def test_a_path_that_is_not_there_or_holds_nothing_is_no_checkpoint(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "a-file").write_text("")
    for name, message in (("none", "there is no such folder"), (".", "no "), ("a-file", "no ")):
        found = error(command, tmp_path / name)
        assert isinstance(found, NoCheckpointError)
        assert message in str(found)


def test_resume_says_how_to_train_on_from_weights(run: Path) -> None:
    found = error("resume", run)
    assert isinstance(found, NoCheckpointError)
    assert f"model.path={run / 'checkpoints' / 'step-00000004'}" in str(found)
    assert "\n" not in str(found)
