"""`inspect-ckpt` and `resume`: what a folder holds, and what it lacks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.cli.app import app
from megatrain_cli.errors import CorruptError, MegatrainError, NoCheckpointError
from tests.checkpoint.made import make_checkpoint, random_layers


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of an earlier version: one folder of two weight files and no optimizer state."""
    folder = tmp_path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros((4, 250), "float32")}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(24, "float16")}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 3."""
    for step in (2, 3):
        make_checkpoint(checkpoint(tmp_path, step), step=step)
    return tmp_path


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def inspect(*words: str | Path, code: int = 0) -> str:
    command = ["inspect-ckpt", *(str(word) for word in words)]
    result = CliRunner().invoke(app, command)
    found = getattr(result.exception, "exit_code", None) or result.exit_code
    assert found == code, result.output
    return result.stdout


def damage(path: Path, offset: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def output(*words: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def error(*words: str | Path) -> MegatrainError:
    with pytest.raises(MegatrainError) as caught:
        CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return caught.value


def test_a_model_folder_is_listed_and_called_no_checkpoint(run: Path) -> None:
    folder = checkpoint(run, 4)
    lines = [line.split() for line in output("inspect-ckpt", folder).splitlines()]
    assert lines[0] == [str(folder)]
    assert " ".join(lines[1]).startswith("a model folder, not a checkpoint: weights only")
    assert lines[2] == ["file", "tensors", "parameters", "dtypes", "bytes"]
    assert lines[3][:4] == ["model-00001-of-00002.safetensors", "1", "1k", "F32"]
    assert lines[4][:4] == ["model-00002-of-00002.safetensors", "1", "24", "F16"]
    assert lines[5][:3] == ["total", "2", "1.024k"]


@pytest.mark.parametrize("check", ["--full", "--numerics", "--open"])
def test_a_check_that_a_model_folder_cannot_have_is_refused(run: Path, check: str) -> None:
    """Left out in silence, it would read as passed."""
    result = CliRunner().invoke(app, ["inspect-ckpt", str(checkpoint(run, 4)), check])
    assert result.exit_code == 2
    assert "is no checkpoint and no run" in result.stderr


def test_json_of_a_model_folder_holds_exact_numbers(run: Path) -> None:
    values = json.loads(output("inspect-ckpt", checkpoint(run, 4), "--json"))
    assert values["kind"] == "model"
    assert values["total"]["parameters"] == 1024
    assert [file["dtypes"] for file in values["files"]] == [["F32"], ["F16"]]
    assert sum(file["bytes"] for file in values["files"]) == values["total"]["bytes"]


def test_a_damaged_file_of_a_model_folder_is_named(run: Path) -> None:
    path = checkpoint(run, 4) / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = error("inspect-ckpt", checkpoint(run, 4))
    assert isinstance(found, CorruptError)
    assert str(path) in str(found)
    assert "truncated" in str(found)


def test_a_run_with_weights_only_has_nothing_to_resume_and_says_how_to_go_on(run: Path) -> None:
    assert "weights only" in inspect(run, code=5)
    found = error("inspect-ckpt", run)
    assert f"model.path={checkpoint(run, 4)}" in str(found)


def test_a_good_checkpoint_is_told_and_leaves_with_0(saved: Path) -> None:
    text = inspect(checkpoint(saved, 3), "--full", "--numerics")
    assert "step         3 of 20" in text
    assert "good (checked: manifest, files, index, dtypes, every byte, every value)" in text
    assert "layer-00000..00001 each" in text
    assert "master.lm_head.weight" in text


@pytest.mark.parametrize(
    ("file", "offset", "options", "code"),
    [
        ("manifest.json", 100, [], 3),
        ("model-head.safetensors", 20, [], 3),
        ("model-head.safetensors", -1, [], 0),
        ("model-head.safetensors", -1, ["--full"], 3),
        ("tokenizer.json", 0, [], 0),
        ("tokenizer.json", 0, ["--full"], 3),
    ],
)
def test_damage_leaves_with_3_and_names_the_file(
    tmp_path: Path, file: str, offset: int, options: list[str], code: int
) -> None:
    make_checkpoint(tmp_path / "x", aux={"tokenizer.json": b"{}"})
    damage(tmp_path / "x" / file, offset)
    text = inspect(tmp_path / "x", *options, code=code)
    assert (f"problem: {tmp_path / 'x' / file}" in text) == (code == 3)
    values = json.loads(inspect(tmp_path / "x", *options, "--json", code=code))
    assert values["exit_code"] == code


def test_an_unfinished_checkpoint_leaves_with_5_though_a_model_could_be_loaded(saved: Path) -> None:
    (checkpoint(saved, 3) / "manifest.json").unlink()
    text = inspect(checkpoint(saved, 3), code=5)
    assert "never finished" in text
    temporary = saved / "checkpoints" / ".tmp-step-00000004-ab"
    shutil.copytree(checkpoint(saved, 2), temporary)
    (temporary / "manifest.json").unlink()
    shutil.rmtree(temporary / "training")
    inspect(temporary, code=5)


def test_values_that_are_not_finite_leave_with_8(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x", master="bf16")
    path = tmp_path / "x" / "model-head.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + b"\x80\x7f")  # infinity
    text = inspect(tmp_path / "x", "--numerics", code=8)
    assert "problem: 'lm_head.weight': 0 NaN and 1 infinite values of 128." in text
    values = json.loads(inspect(tmp_path / "x", "--numerics", "--json", code=8))
    (bad,) = (one for one in values["numerics"] if one["faults"])
    assert (bad["name"], bad["inf"]) == ("lm_head.weight", 1)


def test_of_a_run_all_checkpoints_are_listed_and_the_one_resume_takes_is_checked(
    saved: Path,
) -> None:
    text = inspect(saved)
    lines = text.splitlines()
    assert lines[0] == f"run {saved}"
    assert lines[2].startswith("step-00000003  good")
    assert lines[2].endswith("resume takes it")
    assert lines[3].startswith("step-00000002  good")
    assert f"checkpoint   {checkpoint(saved, 3)}" in text


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_taken(saved: Path) -> None:
    (checkpoint(saved, 3) / "model-head.safetensors").unlink()
    (saved / "checkpoints" / ".tmp-step-00000004-ab").mkdir()
    (saved / "checkpoints" / ".trash-step-00000001-ab").mkdir()
    values = json.loads(inspect(saved, "--json", code=3))
    assert [(row["name"], row["status"]) for row in values["checkpoints"]] == [
        ("step-00000003", "damaged"),
        ("step-00000002", "good"),
    ]
    assert values["resume"] == "step-00000002"
    assert values["inspected"]["status"] == "good"
    assert len(values["notes"]) == 2
    text = inspect(saved, code=3)
    assert "step-00000003: " in text
    assert "never finished" in text


def test_the_checks_asked_for_are_done_on_the_checkpoint_that_resume_takes(saved: Path) -> None:
    damage(checkpoint(saved, 3) / "model-head.safetensors")
    inspect(saved)
    assert "xxh3-128" in inspect(saved, "--full", code=3)


def test_a_checkpoint_under_another_steps_name_is_not_of_the_run(saved: Path) -> None:
    checkpoint(saved, 3).rename(checkpoint(saved, 9))
    values = json.loads(inspect(saved, "--json", code=4))
    assert values["checkpoints"][0]["status"] == "not of this run"
    assert values["resume"] == "step-00000002"


def test_an_unfinished_folder_beside_a_good_checkpoint_is_no_fault_of_the_run(saved: Path) -> None:
    (checkpoint(saved, 3) / "manifest.json").unlink()
    values = json.loads(inspect(saved, "--json"))
    assert [row["status"] for row in values["checkpoints"]] == ["incomplete", "good"]


@pytest.mark.parametrize("hint", ["../outside", "step-00000009", "[]", "\0not json", "3"])
def test_a_hint_that_leads_nowhere_changes_nothing(saved: Path, hint: str) -> None:
    text = json.dumps({"checkpoint": hint}) if "step" in hint or "out" in hint else hint
    (saved / "checkpoints" / "latest.json").write_text(text)
    assert json.loads(inspect(saved, "--json"))["resume"] == "step-00000003"


def test_where_no_checkpoint_is_good_the_run_leaves_with_5(saved: Path) -> None:
    for step in (2, 3):
        damage(checkpoint(saved, step) / "manifest.json", 50)
    assert "damaged" in inspect(saved, code=5)


def test_equal_checkpoints_leave_with_0_and_different_ones_with_1(saved: Path) -> None:
    text = inspect(checkpoint(saved, 3), "--diff", saved)
    assert "28 of 28 tensors are equal bit for bit" in text
    damage(checkpoint(saved, 2) / "model-head.safetensors")
    text = inspect(checkpoint(saved, 2), "--diff", checkpoint(saved, 3), code=1)
    row = next(line for line in text.splitlines() if line.startswith("lm_head.weight"))
    assert row.split() == ["lm_head.weight", "1", "128", "[15,", "7]"]
    assert "step: 2 and 3" in text
    values = json.loads(
        inspect(checkpoint(saved, 2), "--diff", checkpoint(saved, 3), "--json", code=1)
    )
    assert values["equal"] is False


def test_names_and_forms_that_differ_are_shown(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", master="fp32")
    losses = tuple((1 / step).hex() for step in range(1, 20))
    make_checkpoint(
        tmp_path / "b", weights="F32", master="fp32", aux={"LICENSE": b""}, losses_tail=losses
    )
    text = inspect(tmp_path / "a", "--diff", tmp_path / "b", code=1)
    assert "only left: master.lm_head.weight" in text
    assert "other form: lm_head.weight: BF16 [16, 8] and F32 [16, 8]" in text
    assert "losses_tail: other values\n" in text
    assert "other contents: LICENSE" in text


def test_of_many_names_some_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", random_layers(layers=9), master="fp32")
    make_checkpoint(tmp_path / "b", random_layers(layers=2), master="fp32")
    lines = inspect(tmp_path / "a", "--diff", tmp_path / "b", code=1).splitlines()
    named = [line for line in lines if line.startswith("only left: ")]
    assert len(named) == 21
    assert named[-1] == "only left: 36 more"


def test_notes_and_the_model_are_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "x")
    (tmp_path / "x" / "notes.txt").write_text("")
    text = inspect(tmp_path / "x", "--open", code=4)
    assert "note: 'notes.txt' is not in the manifest; ignored" in text
    assert "no model can be made of config.json" in text


def test_a_run_whose_checkpoints_are_no_folder_has_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    (tmp_path / "training").mkdir()
    inspect(tmp_path, code=5)


def test_comparing_takes_no_other_check(saved: Path) -> None:
    inspect(saved, "--diff", saved, "--full", code=2)


def test_looking_at_a_checkpoint_loads_no_torch(saved: Path) -> None:
    code = (
        "import sys\n"
        "from megatrain_cli.cli.app import main\n"
        f"sys.argv = ['megatrain', 'inspect-ckpt', {str(saved)!r}, '--full', '--numerics']\n"
        "try:\n    main()\n"
        "except SystemExit as left:\n    print(left.code)\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert result.stdout.endswith("0\n[]\n"), result.stderr


@pytest.mark.parametrize("command", ["inspect-ckpt", "resume"])
def test_a_path_that_is_not_there_or_holds_nothing_is_no_checkpoint(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "a-file").write_text("")
    for name, message in (("none", "there is no such folder"), (".", "no "), ("a-file", "no ")):
        found = error(command, tmp_path / name)
        assert isinstance(found, NoCheckpointError)
        assert message in str(found)


def test_no_check_makes_it_wrong_usage_that_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    for name in (".", "a-file"):
        found = error("inspect-ckpt", tmp_path / name, "--full")
        assert isinstance(found, NoCheckpointError)


def test_resume_says_how_to_train_on_from_weights(run: Path) -> None:
    found = error("resume", run)
    assert isinstance(found, NoCheckpointError)
    assert f"model.path={run / 'checkpoints' / 'step-00000004'}" in str(found)
    assert "\n" not in str(found)
