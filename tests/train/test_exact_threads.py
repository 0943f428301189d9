"""Whole runs on the threads of a device: saves, loads, stops and failures beside them.

The device is a fake that is done with an op when it is issued; all threads are real. What they
save while they train is what lanes without threads save when everything waits (B5), and a load
that trickles in changes nothing (B6).
"""

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.errors import Stopped
from megatrain_cli.pipeline.executor import Executor, IssuedStep
from megatrain_cli.train import attempt, session
from megatrain_cli.train.step import StepUpdate
from tests.checkpoint.loading import ReadDisk
from tests.checkpoint.tiles import manifest_of
from tests.train.same_runs import checkpoints, differences, differing_tensors
from tests.train.threaded import use_threads
from tests.train.whole_runs import Died, Runs, die, stop, with_dropout

TOTAL = 6
PATIENCE = 60  # seconds; a test that is right never waits so long
EVERY = "checkpoint.save_steps=1", "checkpoint.keep_last=9", "checkpoint.paranoid=true"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("threads")
    return with_dropout(folder, TOTAL, layers=3, max_grad_norm=0.01)  # clips every step


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """On lanes without threads; every step is saved, and the run waits for it."""
    return runs.train("whole", *EVERY, "checkpoint.async_save=false")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, whole: Path) -> Iterator[None]:
    use_threads(monkeypatch)
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("pool", [0, 10_000, 1_000_000])
def test_what_is_saved_while_threads_train_is_what_a_run_that_waits_saves(
    pool: int, runs: Runs, whole: Path
) -> None:
    run = runs.train(f"pool-{pool}", *EVERY, f"checkpoint.bounce_pool={pool}")
    for folder in checkpoints(run):  # some were merged into the next
        assert differing_tensors(whole / "checkpoints" / folder.name, folder) == ()
    assert not differences(whole, run)


@pytest.mark.usefixtures("threads")
def test_a_chain_of_stops_and_deaths_ends_the_same(runs: Runs, whole: Path) -> None:
    run = runs.train("chain", *EVERY, after={1: stop}, ends=Stopped)
    runs.resume(run, after={3: die}, ends=Died)
    runs.resume(run, after={4: stop}, ends=Stopped)
    runs.resume(run)
    assert not differences(whole, run)


def stop_between(
    runs: Runs, name: str, number: int, *, next_step: bool, guarded: bool = True
) -> Path:
    """A run that hears of a stop when `number` of 5 layers have had the update of step 3.

    Args:
        runs: Of the workspace.
        name: Of the run.
        number: Of layers.
        next_step: Whether step 4 has begun by then; its loss is then no number, as computing from
            weights that are half updated may give anything.
        guarded: Whether gradients of step 4 are kept from landing.
    """
    landed, begun, go_on = threading.Event(), threading.Event(), threading.Event()
    asked: list[int] = []
    apply, run_step, clip = StepUpdate.update, Executor.run_step, StepUpdate.clip

    def tell_landing(self: StepUpdate, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "landed" and value and self.step == 3:
            landed.set()

    def update(self: StepUpdate, *args: Any) -> Future[Any] | None:
        if (self.step, len(self._updated)) == (3, number) and not asked:
            asked.append(number)
            assert (begun if next_step else landed).wait(PATIENCE)
            signal.raise_signal(signal.SIGTERM)
            go_on.set()
        return apply(self, *args)

    def clip_wandering(self: StepUpdate, loss: float, squared_norms: Sequence[float]) -> None:
        clip(self, math.nan if self.step == 4 and guarded else loss, squared_norms)

    def tell_begin(self: Executor, batch: Any, host: Any, seed: Any) -> IssuedStep:
        if host.step == 4:
            begun.set()
        return run_step(self, batch, host, seed)

    def hold() -> None:
        """The main thread asks for no further step before it has the signal."""
        assert next_step or go_on.wait(PATIENCE)

    early = "checkpoint.include_gradients=true"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepUpdate, "__setattr__", tell_landing)
        patch.setattr(StepUpdate, "update", update)
        patch.setattr(StepUpdate, "clip", clip_wandering)
        patch.setattr(Executor, "run_step", tell_begin)
        if not guarded:
            patch.setattr(StepUpdate, "wants_gradients", lambda self: True)
        return runs.train(name, early, after={3: hold}, ends=Stopped)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("next_step", [False, True])
def test_a_stop_between_the_updates_of_two_layers(
    next_step: bool, number: int, runs: Runs, whole: Path
) -> None:
    """B4 on the thread of the updates, before the main thread begins the next step or in it."""
    run = stop_between(runs, f"between-{number}-{next_step}", number, next_step=next_step)
    manifest = manifest_of(checkpoints(run)[-1])
    assert manifest.pending is not None
    steps = sorted(shard.layer_step for shard in manifest.shards)
    assert steps == [2] * (5 - number) + [3] * number
    runs.resume(run)
    assert not differences(whole, run)


@pytest.mark.usefixtures("threads")
def test_without_its_guard_the_next_step_would_land_on_gradients_that_wait(
    runs: Runs, whole: Path
) -> None:
    run = stop_between(runs, "unguarded", 1, next_step=True, guarded=False)
    runs.resume(run)
    assert differences(whole, run).step == 4


@pytest.mark.usefixtures("threads")
def test_a_step_is_computed_before_any_moment_is_read(
    runs: Runs, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: the disk gives moments only once the first step's gradients are clipped."""
    run = runs.train("slow", after={2: stop}, ends=Stopped)
    clipped = threading.Event()
    clip = StepUpdate.clip

    def clip_and_tell(self: StepUpdate, loss: float, squared_norms: Sequence[float]) -> None:
        clip(self, loss, squared_norms)
        clipped.set()

    def read(name: str, offset: int, buffer: memoryview) -> None:
        del offset, buffer
        if name.startswith("training/optim") and threading.current_thread().name.startswith("load"):
            held.append(name)
            assert clipped.wait(PATIENCE)

    held: list[str] = []
    disk = ReadDisk(read)
    for module in (session, attempt):
        monkeypatch.setattr(module, "FileSystem", lambda: disk)
    monkeypatch.setattr(StepUpdate, "clip", clip_and_tell)
    runs.resume(run)
    assert held
    assert not differences(whole, run)
