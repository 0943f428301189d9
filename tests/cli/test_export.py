"""`megatrain export`: from a run or a checkpoint to a model folder with a card."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from megatrain_cli.cli.app import app
from megatrain_cli.cli.export import parse_size
from megatrain_cli.report.journal import Journal
from megatrain_cli.report.records import StepRecord
from tests.checkpoint.made import make_checkpoint
from tests.checkpoint.made_model import make_model_checkpoint
from tests.train.workspace import load_whole


def export(*words: str | Path, code: int = 0) -> tuple[str, str, str]:
    """Stdout, stderr and the error's text."""
    result = CliRunner().invoke(app, ["export", *(str(word) for word in words)])
    found = getattr(result.exception, "exit_code", None) or result.exit_code
    assert found == code, result.output
    return result.stdout, result.stderr, str(result.exception)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a checkpoint of step 3 and a journal up to step 5."""
    make_model_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003", tied=True)
    with Journal(tmp_path / "run" / "metrics.jsonl") as journal:
        for step in range(1, 6):
            journal.write(StepRecord(step, 7.0 - step, 1e-3, 1.0, 10, 10.0, 1.0))
    return tmp_path / "run"


def test_of_a_run_the_checkpoint_that_resume_takes_is_exported(run: Path, tmp_path: Path) -> None:
    make_checkpoint(run / "checkpoints" / "step-00000009", step=9)
    (run / "checkpoints" / "step-00000009" / "model-head.safetensors").unlink()
    out, err, _ = export(run, tmp_path / "out", "--dtype", "fp32")
    assert out.startswith(f"exported {run / 'checkpoints' / 'step-00000003'} to {tmp_path}/out: 1")
    assert "step-00000009 is refused" in err
    assert {p.dtype for p in load_whole(tmp_path / "out").values()} == {torch.float32}


def test_the_card_tells_the_config_and_the_losses_up_to_the_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    export(run / "checkpoints" / "step-00000003", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "max_steps: 20" in card
    assert "`3 of 20`" in card
    assert "| 3 | 4.0000 |" in card
    assert "| 4 |" not in card
    for private in ("/somewhere", "/rows", "/runs"):
        assert private not in card


def test_a_damaged_journal_costs_the_card_its_losses_and_no_more(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").write_text("{}\n")
    _, err, _ = export(run, tmp_path / "out")
    assert "note: the model card has no losses" in err
    assert "## Loss" not in (tmp_path / "out" / "README.md").read_text()


def test_a_checkpoint_outside_a_run_has_no_losses(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-00000003").rename(tmp_path / "alone")
    export(tmp_path / "alone", tmp_path / "out")
    assert "## Loss" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("config", [b"- 1", b"a: [", None])
def test_a_config_that_is_none_is_left_out_or_refused(tmp_path: Path, config: bytes | None) -> None:
    aux = {} if config is None else {"training/config.yaml": config}
    make_checkpoint(tmp_path / "x", aux=aux)
    if config == b"a: [":
        _, _, error = export(tmp_path / "x", tmp_path / "out", code=3)
        assert "not YAML" in error
        assert not (tmp_path / "out").exists()
    else:
        export(tmp_path / "x", tmp_path / "out")


def test_small_files_are_made_with_an_index(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", "--max-shard-size", "10KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "lm_head.weight" not in index["weight_map"]  # tied: stored once
    load_whole(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("pending", 4, "megatrain resume"),
        ("exists", 7, "is there already"),
        ("damaged", 3, "xxh3-128"),
        ("absent", 5, "there is no such folder"),
        ("model", 5, "never finished"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_its_code(
    tmp_path: Path, change: str, code: int, words: str
) -> None:
    folder, out = tmp_path / "x", tmp_path / "out"
    if change != "absent":
        make_checkpoint(folder, pending=1 if change == "pending" else 0)
    if change == "exists":
        out.mkdir()
    if change == "model":
        (folder / "manifest.json").unlink()
    if change == "damaged":
        path = folder / "model-head.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    _, _, error = export(folder, out, code=code)
    assert words in error
    assert out.exists() == (change == "exists")


def test_nothing_is_exported_into_a_checkpoint_that_retention_removes(
    run: Path, tmp_path: Path
) -> None:
    folder = next((run / "checkpoints").glob("step-*"))
    _, _, error = export(run, folder / "a" / "out", code=7)
    assert f"would lie in the checkpoint {folder}" in error
    assert not (folder / "a").exists()


def test_a_journal_that_may_not_be_read_costs_the_card_its_losses_too(
    run: Path, tmp_path: Path
) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/proc/self/mem")  # a file of which no byte can be read
    _, err, _ = export(run, tmp_path / "out")
    assert "note: the model card has no losses" in err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 kb", 1500),
        ("4096", 4096),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "5XB", "0", "0.1", "1e9", "5 GB now", "9" * 400]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="wanted a size such as 5GB"):
        parse_size(text)


def test_a_wrong_size_leaves_with_2(tmp_path: Path) -> None:
    export(tmp_path, tmp_path / "out", "--max-shard-size", "big", code=2)
