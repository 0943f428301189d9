"""`train --dry-run`: rows and plan as a run would have them; no weights, no folder."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatrain_cli.cli.app import main
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.profiles import find_profile
from megatrain_cli.train import assemble
from tests.train.workspace import make_workspace


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> object:
    monkeypatch.setattr(sys, "argv", ["megatrain", "train", *args, "--dry-run"])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


def test_it_shows_rows_and_plan_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_workspace(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()  # they may come later
    before = sorted(tmp_path.rglob("*"))
    assert not run(monkeypatch, str(config), "train.max_steps=7")
    said = capsys.readouterr().err
    assert "first row, [trained] in brackets" in said
    assert "\nFITS: " in said
    assert "dry run: 7 steps of " in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_weights_of_another_model_are_refused_before_data_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    config = make_workspace(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["megatrain", "train", str(config), *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / 'model'} does not fit LlamaForCausalLM: ")


def test_what_playing_the_plan_finds_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(assemble, "probe_machine", lambda device: find_profile("h200-1.5tb"))
    config = str(make_workspace(tmp_path))
    rows = ("train.micro_batch_size=100", "train.gradient_accumulation_steps=7")
    bf16 = ("model.dtype=bfloat16", "optimizer.master=fp32_split")
    assert not run(monkeypatch, config, *rows, *bf16, "train.num_epochs=null", "train.max_steps=2")
    said = capsys.readouterr().err
    assert "\nwarning: 7 micro-batches a step divide badly: with 100 rows in a layer " in said


def test_a_run_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = MachineSpec(2 << 20, "cgroup v2 /job, limit 2.00 MiB", 2, "cpu")
    monkeypatch.setattr(assemble, "probe_machine", lambda device: small)
    assert run(monkeypatch, str(make_workspace(tmp_path))) == 1
    assert "(cgroup v2 /job, limit 2.00 MiB)" in capsys.readouterr().err


def test_what_is_missing_once_the_rows_are_known_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (str(make_workspace(tmp_path)), "pipeline.activations=recompute")
    # Enough for rows of one token, so that all is read, and not for those that there are.
    needed = _least_host_bytes(monkeypatch, capsys, *config)
    short = MachineSpec(needed - 1, "MemAvailable", 2, "cpu")
    monkeypatch.setattr(assemble, "probe_machine", lambda device: short)
    assert run(monkeypatch, *config) == 1
    said = capsys.readouterr().err
    assert "\nDOES NOT FIT: " in said
    assert said.count("This run needs ") == 1


def _least_host_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *config: str
) -> int:
    """What a dry run plans, read off the plan's own figures."""
    machine = MachineSpec(1 << 40, "MemAvailable", 2, "cpu")
    monkeypatch.setattr(assemble, "probe_machine", lambda device: machine)
    monkeypatch.setattr(sys, "argv", ["megatrain", "plan", *config, "--json"])
    with pytest.raises(SystemExit):
        main()
    read = json.loads(capsys.readouterr().out)
    needed = [line["num_bytes"] for line in read["lines"] if line["place"] != "host mapped"]
    return sum(map(int, needed))


# Room for rows of 64 tokens, and not for a hundred of `data.max_length`.
_LONG = ("data.max_length=1000000", "train.micro_batch_size=100", "train.max_steps=1")


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_rows_that_are_short_fit_whatever_the_longest_might_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    roomy = MachineSpec(4 << 30, "MemAvailable", 2, "cpu")
    monkeypatch.setattr(assemble, "probe_machine", lambda device: roomy)
    config = make_workspace(tmp_path, rows=100, model={"max_position_embeddings": 1 << 20})
    monkeypatch.setattr(sys, "argv", ["megatrain", "train", str(config), *_LONG, *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code


def test_rows_that_cannot_be_used_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_workspace(tmp_path)
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"messages": 3}\n')
    assert run(monkeypatch, str(config), f"data.train={rows}") == 1
    assert "bad.jsonl:1" in capsys.readouterr().err
