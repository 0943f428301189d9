"""A run is not called finished before every byte of its last checkpoint is what was saved."""

import json
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import ConfigError, CorruptError, NoCheckpointError
from megatrain_cli.train.outlook import find_device, find_finished
from megatrain_cli.train.resume import ResumeRequest
from tests.train.here import resume_here
from tests.train.saved import make_run, save_step
from tests.train.test_folder import snapshot

FS = FileSystem()


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def flip(file: Path, place: int = -1) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


def files_of(folder: Path) -> list[str]:
    found = json.loads((folder / "manifest.json").read_bytes())
    parts = [part["file"] for shard in found["shards"] for part in shard["parts"]]
    return [*parts, *(aux["file"] for aux in found["aux"])]


def test_a_flipped_byte_in_any_file_is_found_and_one_that_was_named_is_refused(
    tmp_path: Path,
) -> None:
    """F40, F75: a run that has ended loads nothing, so nothing else would look."""
    make_run(tmp_path, [20])
    folder = step(tmp_path, 20)
    assert len(files_of(folder)) > 6
    for name in files_of(folder):
        flip(folder / name)
        before = snapshot(tmp_path)
        with pytest.raises(CorruptError, match=Path(name).name):
            find_finished(ResumeRequest(folder), FS, lambda text: None, {})
        assert snapshot(tmp_path) == before
        flip(folder / name)
    said: list[str] = []
    assert find_finished(ResumeRequest(folder), FS, said.append, {}) is not None
    (line,) = said
    assert line.startswith(f"verifying {folder}: ")


def test_a_run_whose_last_checkpoint_is_damaged_has_not_ended(tmp_path: Path) -> None:
    """F54: whoever goes on is told what is known, and takes the one before."""
    run_id = make_run(tmp_path, [])
    save_step(tmp_path, 12, {"pipeline": {"device": "cpu"}}, run_id=run_id)
    save_step(tmp_path, 20, run_id=run_id)
    flip(step(tmp_path, 20) / "model-embed.safetensors")
    refused: dict[Path, str] = {}
    assert find_finished(ResumeRequest(tmp_path), FS, lambda text: None, refused) is None
    assert list(refused) == [step(tmp_path, 20)]
    assert "xxh3-128" in refused[step(tmp_path, 20)]
    assert find_device(ResumeRequest(tmp_path), FS, refused) == "cpu"


def test_a_run_that_had_ended_before_its_damaged_checkpoint_says_both(tmp_path: Path) -> None:
    """It was extended: the step before the damage is the end that was first asked for."""
    run_id = make_run(tmp_path, [20])
    save_step(tmp_path, 25, {"train": {"max_steps": 30}}, run_id=run_id)
    (step(tmp_path, 25) / "model-embed.safetensors").unlink()
    said: list[str] = []
    found = find_finished(ResumeRequest(tmp_path), FS, said.append, {})
    assert found is not None
    assert found.startswith("finished at step 20")
    assert any("step-00000025 is refused" in line for line in said)


def test_where_all_are_damaged_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    make_run(tmp_path, [20])
    flip(step(tmp_path, 20) / "model-embed.safetensors")
    with pytest.raises(NoCheckpointError, match="step-00000020 is refused"):
        find_finished(ResumeRequest(tmp_path), FS, lambda text: None, {})


def test_a_path_that_cannot_be_used_is_said_by_its_key_as_in_a_new_run(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    for name, why in (("x" * 300, "File name too long"), ("gone.jsonl", "there is no file")):
        with pytest.raises(ConfigError, match=rf"data\.train: .*{why}"):
            resume_here(tmp_path, f"data.train={tmp_path / name}")


def test_rows_that_are_gone_are_asked_for_on_the_command_line(tmp_path: Path) -> None:
    """The file that names them is the checkpoint's."""
    gone = str(tmp_path / "gone.jsonl")
    make_run(tmp_path / "run", [3], {"data": {"train": gone}})
    remedy = r"Say where the rows are now, as `data\.train=\.\.\.` on the command line"
    with pytest.raises(ConfigError, match=rf"there is no file `{gone}`\. {remedy}"):
        resume_here(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        resume_here(tmp_path / "run", f"data.train={tmp_path / 'too.jsonl'}")
    assert "Say where" not in str(caught.value)
