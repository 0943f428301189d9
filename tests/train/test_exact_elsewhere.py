"""Bit-exact resume from another folder, on another path, with other buffers, and as another run."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain_cli.errors import CorruptError, Stopped
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.probe.machine import probe_machine
from megatrain_cli.train import assemble
from tests.checkpoint.tiles import manifest_of
from tests.train.same_runs import checkpoints, differences, differing_tensors, steps_of
from tests.train.test_outlook import flip
from tests.train.whole_runs import SPLIT, Died, Runs, die, stop
from tests.train.workspace import make_workspace

TOTAL = 6
KEEP = "checkpoint.save_steps=2", "checkpoint.keep_last=9", "checkpoint.async_save=false"


def workspace(
    folder: Path,
    steps: int = TOTAL,
    schedule: Mapping[str, object] | None = None,
    **optimizer: object,
) -> Runs:
    config = make_workspace(
        folder,
        "qwen3",
        tied=True,
        model={"layers": 2},
        data={"shuffle": True},
        train={"max_steps": steps, "micro_batch_size": 2},
        optimizer=optimizer,
        schedule=schedule or {"type": "cosine"},
    )
    return Runs(config, SPLIT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return workspace(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    return runs.train("whole", *KEEP)


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def test_a_fork_goes_the_way_of_its_origin_and_leaves_it_alone(runs: Runs, whole: Path) -> None:
    origin = Path(shutil.copytree(whole, whole.parent / "origin"))
    fork = whole.parent / "fork"
    runs.resume(folder_of(origin, 2), fork=fork, after={4: stop}, ends=Stopped)
    runs.resume(fork)
    assert not differences(whole, origin)
    assert differing_tensors(folder_of(whole, TOTAL), folder_of(fork, TOTAL)) == ()
    assert steps_of(fork) == steps_of(whole)[2:]
    last = manifest_of(folder_of(fork, TOTAL))
    assert last.run_id != manifest_of(folder_of(whole, TOTAL)).run_id


def test_a_rewound_run_goes_the_same_way_again(runs: Runs, whole: Path) -> None:
    run = Path(shutil.copytree(whole, whole.parent / "rewound"))
    runs.resume(folder_of(run, 2), rewind=True, after={3: stop}, ends=Stopped)
    assert [path.name for path in checkpoints(run)] == ["step-00000002", "step-00000003"]
    runs.resume(run)
    assert not differences(whole, run)


def test_a_run_is_all_that_is_needed_wherever_it_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    """P18. The model's folder and the config file are gone; the data lies where it was."""
    runs = workspace(tmp_path)
    run = runs.train("run", after={3: stop}, ends=Stopped)
    moved = tmp_path / "archive" / "moved"
    moved.parent.mkdir()
    run.rename(moved)
    shutil.rmtree(tmp_path / "model")
    runs.config.unlink()
    monkeypatch.chdir(moved.parent)
    runs.resume(Path("moved"), after={4: stop}, ends=Stopped)
    again = tmp_path / "again"
    moved.rename(again)
    (tmp_path / "train.jsonl").rename(tmp_path / "rows.jsonl")
    runs.resume(Path("../again"), "data.train=../rows.jsonl", here=moved.parent)
    found = differences(whole, again)
    assert (found.step, found.tensors) == (None, ())
    assert all("data.sources" in fact for fact in found.facts)


def test_other_slabs_slots_threads_and_saves_load_the_same_state_and_end_the_same(
    runs: Runs, whole: Path
) -> None:
    """F71: what divides the work among buffers and threads is no part of the result."""
    run = runs.train("buffers", "checkpoint.paranoid=true", after={2: stop}, ends=Stopped)
    first = "pipeline.grad_slabs=1", "pipeline.staging_buffers=1", "optimizer.threads=2"
    said = runs.resume(run, *first, "checkpoint.bounce_pool=0", after={3: stop}, ends=Stopped)
    assert "not bit-exact" not in said
    second = "pipeline.grad_slabs=5", "pipeline.staging_buffers=4", "optimizer.threads=1"
    runs.resume(run, *second, "checkpoint.save_steps=1", after={5: stop}, ends=Stopped)
    runs.resume(run, "checkpoint.bounce_pool=1000000", "pipeline.grad_slabs=2")
    assert not differences(whole, run)


def test_memory_that_has_come_free_changes_no_bit(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `auto` had kept for backward is what it keeps, on the same kind of device."""
    with monkeypatch.context() as patch:
        with_little_room(patch)
        run = runs.train("little", after={2: stop}, ends=Stopped)
    assert manifest_of(folder_of(run, 2)).numerics["keep_layers"] == 0
    said = runs.resume(run)
    assert "not bit-exact" not in said
    assert manifest_of(folder_of(run, TOTAL)).numerics["keep_layers"] == 0


def with_little_room(patch: pytest.MonkeyPatch) -> None:
    """Room for a run that keeps nothing, and none to spare."""
    needs = 1 << 30  # of such a small model, with program and libraries

    def small(device: str) -> MachineSpec:
        found = probe_machine(device)
        return replace(found, host_bytes=found.program_bytes + needs)

    patch.setattr(assemble, "probe_machine", small)


def test_what_may_change_bits_is_said(runs: Runs) -> None:
    run = runs.train("said", after={2: stop}, ends=Stopped)
    said = runs.resume(run, "pipeline.activations=recompute")
    assert "not bit-exact from here on: keep_layers 2 -> 0" in said


def test_a_damaged_last_checkpoint_is_made_again_from_the_one_before(
    runs: Runs, whole: Path
) -> None:
    """F54 of a run that has ended: named it is refused, of the run the one before goes on."""
    run = Path(shutil.copytree(whole, whole.parent / "damaged"))
    assert "finished at step 6" in runs.resume(run)
    flip(folder_of(run, TOTAL) / "training" / "optim-layer-00000.safetensors")
    began = len(runs.taken)
    runs.resume(folder_of(run, TOTAL), ends=CorruptError)
    assert len(runs.taken) == began
    said = runs.resume(run)
    assert f"verifying {folder_of(run, TOTAL)}" in said
    assert f"step-00000006 is refused: {folder_of(run, TOTAL)}/training/optim-layer-00000" in said
    assert [step for step, _ in runs.taken[began:]] == [5, 6]
    assert not differences(whole, run)
    assert "finished at step 6" in runs.resume(run)


def test_a_damaged_checkpoint_is_passed_over_while_a_run_goes_on(runs: Runs, whole: Path) -> None:
    """F54: found while it is loaded, when nothing has changed yet."""
    run = runs.train("passed", *KEEP, after={5: die}, ends=Died)
    flip(folder_of(run, 4) / "model-layer-00001.safetensors")
    said = runs.resume(run)
    assert "step-00000004 is refused" in said
    assert not differences(whole, run)


@pytest.mark.parametrize(
    ("warmup", "stopped", "rates"),
    [
        (0, 5, [1e-5, 9e-6, 8e-6, 7e-6, 6e-6, 5e-6, 4e-6, 3e-6, 2e-6, 1e-6]),
        (
            4,
            2,
            [0, 2.5e-6, 5e-6, 7.5e-6, 1e-5, 1e-5 * 5 / 6, 1e-5 * 4 / 6, 5e-6, 1e-5 / 3, 1e-5 / 6],
        ),
    ],
)
def test_the_learning_rate_goes_on_where_it_was(
    warmup: int, stopped: int, rates: list[float], tmp_path: Path
) -> None:
    """RES-01: a function of the step's number, as used by that step."""
    schedule = {"type": "linear", "warmup_steps": warmup}
    runs = workspace(tmp_path, 10, schedule, learning_rate=1e-5)
    run = runs.train("run", after={stopped: stop}, ends=Stopped)
    runs.resume(run)
    found = [float.fromhex(str(record["learning_rate"])) for record in steps_of(run)]
    assert found == pytest.approx(rates, rel=1e-12)
    whole = runs.train("whole")
    assert [r["learning_rate"] for r in steps_of(run)] == [
        r["learning_rate"] for r in steps_of(whole)
    ]


def test_updates_too_small_for_bf16_add_up_over_resumes(tmp_path: Path) -> None:
    """With masters that a resume rounds to BF16 a rate this low would change nothing."""
    runs = workspace(tmp_path, TOTAL, {"type": "constant"}, learning_rate=1e-6)
    whole = runs.train("whole", "checkpoint.save_steps=1", "checkpoint.keep_last=9")
    run = runs.train("run", after={1: stop}, ends=Stopped)
    for step in range(2, TOTAL):
        runs.resume(run, after={step: stop}, ends=Stopped)
    runs.resume(run)
    assert not differences(whole, run)
    moved = differing_tensors(checkpoints(whole)[0], checkpoints(whole)[-1])
    names = {line.partition(":")[0] for line in moved}
    weights = {p.name for part in manifest_of(checkpoints(whole)[0]).parts for p in part.tensors}
    assert {name for name in weights if name.startswith("master_lo.")} <= names
