"""Runs that fail in the middle of a step: what they did until then is saved, and nothing worse."""

import math
import re
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from megatrain_cli.checkpoint.save import Saver, SaveReport
from megatrain_cli.errors import DeviceError, InternalError, NumericsError
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.crew import WorkSpan
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.pipeline.compute import Compute
from megatrain_cli.pipeline.moves import Moves
from megatrain_cli.pipeline.ops import Kind
from megatrain_cli.store.clock import TileClock
from megatrain_cli.store.hold import Hold
from megatrain_cli.store.master import LayerTile
from tests.train.live import Moments, disk_waits, last_payloads, resume_here, train_here
from tests.train.test_run import checkpoints_of, journal_of
from tests.train.workspace import make_workspace

DEVICE_OPS = [
    *(Kind.STREAM_IN, Kind.FORWARD, Kind.LOSS, Kind.BACKWARD, Kind.STREAM_OUT, Kind.REPORT),
]
EAGER = ["optimizer.update=eager", "optimizer.max_grad_norm=null"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of 5 steps, and in `whole` its undisturbed run."""
    folder = tmp_path_factory.mktemp("rescue")
    config = make_workspace(folder, train={"max_steps": 5}, model={"layers": 2})
    train_here(config, f"train.output_dir={folder / 'whole'}")
    return config


def lose_device() -> None:
    raise torch.AcceleratorError("CUDA error: device lost\nmore")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room for 3 GiB")


def goes_on_as_if_nothing_had_been(run: Path, workspace: Path) -> None:
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")
    assert [record["step"] for record in journal_of(run)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", DEVICE_OPS)
def test_a_lost_device_loses_no_step(
    kind: Kind, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        Moments(patch).at(4, kind, lose_device)
        wanted = rf"failed in {kind} .*device lost.* The state after step 3 is saved\."
        with pytest.raises(DeviceError, match=wanted) as end:
            train_here(workspace, f"train.output_dir={run}")
    assert end.value.exit_code == 9
    assert checkpoints_of(run) == ["step-00000003"]
    goes_on_as_if_nothing_had_been(run, workspace)


def test_a_device_without_memory_loses_no_step_and_says_what_to_change(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        Moments(patch).at(4, Kind.BACKWARD, out_of_memory)
        wanted = r"ran out of memory with \d+ rows?.*micro_batch_size.* after step 3 is saved\."
        with pytest.raises(DeviceError, match=wanted) as end:
            train_here(workspace, f"train.output_dir={run}")
    assert end.value.exit_code == 9
    goes_on_as_if_nothing_had_been(run, workspace)


def fail_update(patch: pytest.MonkeyPatch, step: int, after: int, *, torn: bool) -> None:
    """The optimizer fails in a step's update, after so many layers: before or in the next one."""
    submit = TileUpdater.submit
    done = 0

    def submit_or_fail(
        self: TileUpdater, tile: LayerTile, gradient: torch.Tensor, start: int, adam: AdamStep
    ) -> Future[WorkSpan]:
        nonlocal done
        if adam.step == step:
            done += 1
            if done > after:
                if torn:
                    tile.weights[: tile.weights.numel() // 2] += 1
                raise RuntimeError("no luck")
        return submit(self, tile, gradient, start, adam)

    patch.setattr(TileUpdater, "submit", submit_or_fail)


def lose_before_an_update(patch: pytest.MonkeyPatch, after: int) -> None:
    """The device is lost in step 4, after so many of its updates."""
    landed = Moves.landed
    seen = 0

    def lose_after(moves: Moves, *args: object) -> object:
        nonlocal seen
        seen += 1
        if seen == 3 * 4 + after + 1:  # four layers in each of three steps
            lose_device()
        return landed(moves, *args)  # type: ignore[arg-type]

    patch.setattr(Moves, "landed", lose_after)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_device_lost_between_two_updates_of_a_step_leaves_an_update_that_resume_finishes(
    after: int, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        lose_before_an_update(patch, after)
        with pytest.raises(DeviceError, match=r"in update of .*Step 4 was saved in the middle of"):
            train_here(workspace, f"train.output_dir={run}")
    assert checkpoints_of(run) == [f"step-0000000{4 if after else 3}"]
    assert len(list(run.glob("checkpoints/*/training/grads-*"))) == 4 - after
    resume_here(run)
    assert last_payloads(run) == last_payloads(workspace.parent / "whole")


def test_an_update_that_no_layer_has_had_is_not_called_saved_behind_a_step_that_is(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    saves = ("checkpoint.save_steps=1", "checkpoint.async_save=false")
    with monkeypatch.context() as patch:
        lose_before_an_update(patch, after=0)
        with pytest.raises(DeviceError, match=r"in update of .*The state after step 3 is saved\."):
            train_here(workspace, f"train.output_dir={run}", *saves)
    assert checkpoints_of(run) == ["step-00000002", "step-00000003"]
    goes_on_as_if_nothing_had_been(run, workspace)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("changes", [[], EAGER])
def test_layers_of_no_one_step_are_not_saved_and_what_was_saved_before_stays(
    changes: list[str],
    after: int,
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        fail_update(patch, 4, after, torn=True)
        wanted = r"no luck.* was not saved: .*belong to no one step: .*go on from the last"
        with pytest.raises(InternalError, match=wanted):
            train_here(workspace, f"train.output_dir={run}", "checkpoint.save_steps=2", *changes)
    assert checkpoints_of(run) == ["step-00000002"]
    if not changes:
        goes_on_as_if_nothing_had_been(run, workspace)


def test_a_save_that_was_under_way_is_not_lost_where_the_state_in_memory_is(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cancel, wait = tmp_path / "run", TileClock.cancel, Saver.wait
    with monkeypatch.context() as patch, disk_waits(patch) as (_, go):

        def cancel_and_let_go(clock: TileClock, hold: Hold) -> None:
            cancel(clock, hold)
            go.set()

        def let_go_and_wait(saver: Saver) -> list[SaveReport]:
            go.set()
            return wait(saver)

        patch.setattr(TileClock, "cancel", cancel_and_let_go)
        patch.setattr(Saver, "wait", let_go_and_wait)
        fail_update(patch, 4, 1, torn=True)
        pool = f"checkpoint.bounce_pool={1 << 24}"
        with pytest.raises(InternalError, match="belong to no one step"):
            train_here(workspace, f"train.output_dir={run}", "checkpoint.save_steps=2", pool)
    assert checkpoints_of(run) == ["step-00000002"]
    goes_on_as_if_nothing_had_been(run, workspace)


def test_a_loss_that_is_not_finite_is_never_learnt_nor_saved_as_a_step(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil_report(patch, 4, -1)
        wanted = r"Step 4 was refused: the loss is nan\. No update was applied.*step 3 is saved\."
        with pytest.raises(NumericsError, match=wanted) as end:
            train_here(workspace, f"train.output_dir={run}")
    assert end.value.exit_code == 8
    assert checkpoints_of(run) == ["step-00000003"]
    assert [record["step"] for record in journal_of(run)] == [1, 2, 3]
    goes_on_as_if_nothing_had_been(run, workspace)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_gradient_that_is_not_finite_never_enters_the_moments(
    layer: int, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil_report(patch, 4, layer)
        wanted = r"Step 4 was refused: the gradient of \S+ is not finite\..*step 3 is saved\."
        with pytest.raises(NumericsError, match=wanted) as end:
            train_here(workspace, f"train.output_dir={run}")
    assert end.value.exit_code == 8
    goes_on_as_if_nothing_had_been(run, workspace)


def spoil_report(patch: pytest.MonkeyPatch, step: int, index: int) -> None:
    """Put NaN where a step reports its loss (-1) or a layer's squared norm."""
    report = Compute.report
    count = 0

    def spoiled(compute: Compute) -> None:
        nonlocal count
        count += 1
        report(compute)
        if count == step:
            compute._buffers.host_totals[index] = math.nan

    patch.setattr(Compute, "report", spoiled)


@pytest.mark.parametrize("step", [2, 5])
def test_weights_that_are_not_finite_are_not_published(
    step: int, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    submit = TileUpdater.submit

    def spoil(
        self: TileUpdater, tile: LayerTile, gradient: torch.Tensor, start: int, adam: AdamStep
    ) -> Future[WorkSpan]:
        done = submit(self, tile, gradient, start, adam)
        done.result()
        if adam.step == step and tile.index == 1:
            tile.weights[0] = math.inf
        return done

    with monkeypatch.context() as patch:
        patch.setattr(TileUpdater, "submit", spoil)
        with pytest.raises(NumericsError, match=r"not finite") as end:
            train_here(
                workspace,
                f"train.output_dir={run}",
                "checkpoint.save_steps=1",
                "checkpoint.async_save=false",
                "checkpoint.keep_last=9",
            )
    assert end.value.exit_code == 8
    assert checkpoints_of(run)[-1] == f"step-0000000{step - 1}"
    assert not re.search("Traceback", str(end.value))
    goes_on_as_if_nothing_had_been(run, workspace)
