"""What a user finds after a run: its folder, its exit code, its words.

Runs through the command line cost seconds each, so tests share them; faults that nobody can cause
from outside are injected into a run of this process.
"""

import json
import math
import signal
import subprocess
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.config.load import load_config
from megatrain_cli.errors import InternalError, NumericsError, PlanError, StorageError
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.crew import WorkSpan
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.report.console import RunConsole
from megatrain_cli.store.master import LayerTile
from megatrain_cli.train import assemble as assemble_module
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.session import train
from tests.train.command import run_command
from tests.train.here import train_here
from tests.train.prepared import Prepared
from tests.train.test_folder import snapshot
from tests.train.workspace import load_whole, make_workspace, start

STEPS = 4
NOBODY_READS = "tests.train.broken:nobody_reads_what_it_says"


def journal_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints_of(run: Path) -> list[str]:
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The workspace of a run that went well, and what the command said."""
    folder = tmp_path_factory.mktemp("finished")
    config = make_workspace(folder, tied=True, train={"max_steps": STEPS})
    return folder, run_command("train", config, "schedule.warmup_steps=2")


@pytest.mark.slow
class TestAFinishedRun:
    Finished = tuple[Path, subprocess.CompletedProcess[str]]

    def test_leaves_with_0_and_says_all_on_stderr(self, finished: Finished) -> None:
        folder, done = finished
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert f"saved {folder}/run/checkpoints/step-0000000{STEPS} (" in done.stderr
        steps = [line for line in done.stderr.splitlines() if line.startswith("step ")]
        shown = [line.split()[1] for line in steps]
        assert shown[-STEPS:] == [f"{n}/{STEPS}" for n in range(1, STEPS + 1)]

    def test_writes_no_escapes_or_carriage_returns_into_a_pipe(self, finished: Finished) -> None:
        assert not set(finished[1].stderr) & {"\x1b", "\r", "\b"}

    def test_has_config_journal_lock_and_weights_in_its_folder(self, finished: Finished) -> None:
        run = finished[0] / "run"
        names = sorted(path.name for path in run.iterdir())
        assert names == [
            *("attempts.jsonl", "checkpoints", "config.yaml", "metrics.jsonl"),
            *("run.json", "run.lock"),
        ]
        assert checkpoints_of(run) == [f"step-0000000{STEPS}"]

    def test_records_the_config_with_its_overrides(self, finished: Finished) -> None:
        folder = finished[0]
        written = load_config(folder / "run" / "config.yaml").config
        assert written == load_config(folder / "config.yaml", ["schedule.warmup_steps=2"]).config

    def test_records_every_step(self, finished: Finished) -> None:
        records = journal_of(finished[0] / "run")
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        assert [record["learning_rate"] for record in records] == [0, 5e-4, 1e-3, 1e-3]
        for record in records:
            keys = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second"}
            assert record.keys() >= keys | {"seconds", "phases", "epoch", "rows"}
            assert math.isfinite(record["loss"])
            assert record["grad_norm"] > 0
            assert record["rows"] == 4
            assert record["epoch"] == pytest.approx(record["step"] * 4 / 12)

    def test_its_weights_are_those_of_the_same_run_in_another_process(
        self, finished: Finished
    ) -> None:
        folder = finished[0]
        written = load_whole(folder / "run" / "checkpoints" / f"step-0000000{STEPS}")
        with start(folder / "config.yaml", ["schedule.warmup_steps=2"]) as run:
            losses = [record.loss for record in run.steps()]
            wanted = run.by_name(lambda tile: tile.weights)
        assert losses == [record["loss"] for record in journal_of(folder / "run")]
        assert written.keys() == wanted.keys()
        for name, weights in wanted.items():
            assert torch.equal(written[name], weights), name

    def test_its_tokenizer_is_the_models_byte_for_byte(self, finished: Finished) -> None:
        folder = finished[0]
        written = folder / "run" / "checkpoints" / f"step-0000000{STEPS}"
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (written / name).read_bytes() == (folder / "model" / name).read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(written)
        assert (
            tokenizer("red").input_ids
            == AutoTokenizer.from_pretrained(folder / "model")("red").input_ids
        )

    def test_is_not_touched_by_another_run_in_its_folder(
        self, finished: Finished, server: Prepared
    ) -> None:
        folder = finished[0]
        before = snapshot(folder / "run")
        second = server.run("train", folder / "config.yaml")
        assert second.end() == 1
        assert "holds a run already" in second.text
        assert "Traceback" not in second.text
        assert snapshot(folder / "run") == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_a_whole_step_with_its_weights(
    number: signal.Signals, tmp_path: Path, server: Prepared
) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 100_000, "micro_batch_size": 1})
    child = server.start("train", config)
    child.wait_for("step 3/")
    child.send(number)
    assert child.end() == 75
    records = journal_of(tmp_path / "run")
    done = len(records)
    assert f"Stopped by {number.name} after step {done} of 100000" in child.text
    assert "Traceback" not in child.text
    assert checkpoints_of(tmp_path / "run") == [f"step-{done:08d}"]
    with start(config, [f"train.max_steps={done}"]) as run:
        assert [record.loss for record in run.steps()] == [r["loss"] for r in records]
        written = load_whole(tmp_path / "run" / "checkpoints" / f"step-{done:08d}")
        for name, weights in run.by_name(lambda tile: tile.weights).items():
            assert torch.equal(written[name], weights), name


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_says(tmp_path: Path, server: Prepared) -> None:
    """As with `2>&1 | true`: the words are lost, the run and its exit code are not."""
    child = server.run("train", make_workspace(tmp_path), broken=[NOBODY_READS])
    assert (child.end(), child.text) == (0, "")
    assert checkpoints_of(tmp_path / "run") == ["step-00000003"]


@pytest.mark.slow
def test_a_folder_in_use_is_refused_with_6(tmp_path: Path, server: Prepared) -> None:
    config = make_workspace(tmp_path)
    with RunFolder(tmp_path / "run"):
        before = snapshot(tmp_path / "run")
        refused = server.run("train", config)
        assert snapshot(tmp_path / "run") == before
    assert refused.end() == 6
    assert "is in use by process" in refused.text
    assert "Traceback" not in refused.text


def put_nan_into(config: Path, name: str) -> None:
    path = config.parent / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors[name][1, 1] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.slow
def test_a_weight_that_is_not_finite_ends_the_run_with_8_and_a_name(
    tmp_path: Path, server: Prepared
) -> None:
    config = make_workspace(tmp_path)
    put_nan_into(config, "model.layers.2.mlp.up_proj.weight")
    refused = server.run("train", config)
    assert refused.end() == 8
    assert "Step 1 was refused: the loss is nan, and layer-00002 has weights" in refused.text
    assert "get the model again. Nothing was learnt before it, and nothing was" in refused.text
    assert "checkpoint" not in refused.text.splitlines()[-1]  # there is none to go on from
    assert "Traceback" not in refused.text
    assert checkpoints_of(tmp_path / "run") == []


def never(*args: object) -> None:
    raise AssertionError("the store was made")


@pytest.mark.parametrize("update", ["deferred", "eager"])
def test_weights_that_were_thrown_far_away_end_the_run(update: str, tmp_path: Path) -> None:
    """LOOP-05: the last weights that were whole are written, if they are finite at all."""
    overrides = ["optimizer.max_grad_norm=null", f"optimizer.update={update}"]
    config = make_workspace(tmp_path)
    with pytest.raises(NumericsError, match=r"Step 2 was refused: .* is not finite|Step 2 .* nan"):
        train_here(config, *overrides, "optimizer.learning_rate=1e30")
    assert [record["step"] for record in journal_of(tmp_path / "run")] == [1]
    assert checkpoints_of(tmp_path / "run") == ["step-00000001"]
    for name, weights in load_whole(tmp_path / "run" / "checkpoints" / "step-00000001").items():
        assert torch.isfinite(weights).all(), name


def test_weights_that_are_not_finite_are_not_written_and_both_facts_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = TileUpdater.submit

    def overflow(
        self: TileUpdater, tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep
    ) -> Future[WorkSpan]:
        done = apply(self, tile, gradient, start, step)
        done.result()
        tile.weights[0] = math.inf
        return done

    monkeypatch.setattr(TileUpdater, "submit", overflow)
    with pytest.raises(NumericsError, match=r"Step 2 was refused: .*The weights were not written"):
        train_here(make_workspace(tmp_path))
    assert checkpoints_of(tmp_path / "run") == []


def test_a_disk_without_room_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_workspace(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "free_bytes", lambda self, path: 1000)
        patch.setattr(assemble_module, "MasterStore", never)
        with pytest.raises(StorageError, match=r"needs .* and 1000 B is free"):
            train_here(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    train_here(config, "train.max_steps=1")  # once there is room, the folder serves
    assert checkpoints_of(tmp_path / "run") == ["step-00000001"]


@pytest.mark.parametrize("update", ["deferred", "eager"])
def test_a_failing_update_stops_the_run_with_its_layer(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = TileUpdater.submit

    def fail_at_layer_1(
        self: TileUpdater, tile: LayerTile, gradient: torch.Tensor, start: int, step: AdamStep
    ) -> Future[WorkSpan]:
        if tile.layout.layer.name == "layer-00001" and step.step == 2:
            raise RuntimeError("no luck")
        return apply(self, tile, gradient, start, step)

    monkeypatch.setattr(TileUpdater, "submit", fail_at_layer_1)
    config = make_workspace(tmp_path)
    with pytest.raises(InternalError, match="update of layer-00001 failed: no luck"):
        train_here(config, "optimizer.max_grad_norm=null", f"optimizer.update={update}")
    assert checkpoints_of(tmp_path / "run") == []


def test_a_run_that_does_not_fit_allocates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "cgroup v2 /job, limit 2.00 GiB"
    machine = MachineSpec(1 << 20, group, 2, "cpu")
    monkeypatch.setattr(assemble_module, "probe_machine", lambda device: machine)
    monkeypatch.setattr(assemble_module, "MasterStore", never)
    config = make_workspace(tmp_path)
    with pytest.raises(
        PlanError, match=rf"needs .* of host RAM and 1\.00 MiB may be taken \({group}"
    ):
        train_here(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_first_loss_of_random_weights_is_near_that_of_guessing(tmp_path: Path) -> None:
    """LOOP-02: a loss that is N times too high shows here."""
    config = make_workspace(tmp_path, model={"initializer_range": 0.02, "hidden": 32})
    for split in (["train.micro_batch_size=12"], ["train.gradient_accumulation_steps=3"]):
        with start(config, ["model.init=random", "train.max_steps=1", *split]) as run:
            (record,) = run.steps()
            assert record.loss == pytest.approx(math.log(260), rel=0.02)


def test_epochs_take_every_row_as_often_as_asked_and_divide_by_their_own_tokens(
    tmp_path: Path,
) -> None:
    config = make_workspace(tmp_path, rows=10)
    epochs = ["train.max_steps=null", "train.num_epochs=1.4", "optimizer.learning_rate=0"]
    with start(config, epochs) as run:
        records = list(run.steps())
        examples = run.rows.examples
    # 14 rows, of which the last step has two: rows 2 and 3 of the second epoch.
    assert [record.rows for record in records] == [4, 4, 4, 2]
    assert records[-1].epoch == pytest.approx(1.4)
    rows = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3]]
    for record, taken in zip(records, rows, strict=True):
        assert record.tokens == examples.targets[list(taken)].sum()
        assert record.tokens_per_second * record.seconds == pytest.approx(record.tokens)
    # The loss of the last two rows alone, from a run that has nothing else.
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_text("".join(lines[2:4]))
    alone = ["data.train=two.jsonl", "train.max_steps=1", "train.micro_batch_size=2"]
    with start(config, [*alone, "optimizer.learning_rate=0"]) as run:
        (record,) = run.steps()
    assert (record.loss, record.grad_norm) == (records[-1].loss, records[-1].grad_norm)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_step_writes_the_weights_that_were_read(kind: str, dtype: str, tmp_path: Path) -> None:
    """Random norms and biases: what was loaded and what was left at its start would differ."""
    config = make_workspace(tmp_path, kind, model={"seed": 3})
    master = "fp32" if dtype == "float32" else "fp32_split"
    changes = ["train.max_steps=0", f"model.dtype={dtype}", f"optimizer.master={master}"]
    train(load_config(config, changes), RunConsole())
    before = load_file(tmp_path / "model" / "model.safetensors")
    folder = tmp_path / "run" / "checkpoints" / "step-00000000"
    after = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(getattr(torch, dtype))), name
