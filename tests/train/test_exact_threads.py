"""Whole runs on the threads of a device: saves, loads, stops and failures beside them.

The device is a fake that is done with an op when it is issued; all threads are real. What they
save while they train is what lanes without threads save when everything waits (B5), and a load
that trickles in changes nothing (B6).
"""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.errors import Stopped
from megatrain_cli.pipeline import cuda_lanes
from megatrain_cli.pipeline.cuda_lanes import CudaLanes
from megatrain_cli.train import assemble
from megatrain_cli.train.step import StepUpdate
from megatrain_cli.train.stop import StopRequest
from tests.checkpoint.tiles import manifest_of
from tests.pipeline import fake_cuda
from tests.train.same_runs import checkpoints, differences, differing_tensors
from tests.train.whole_runs import Died, Runs, die, stop
from tests.train.workspace import make_workspace

TOTAL = 6
PATIENCE = 60  # seconds; a test that is right never waits so long
EVERY = "checkpoint.save_steps=1", "checkpoint.keep_last=9", "checkpoint.paranoid=true"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    config = make_workspace(
        tmp_path_factory.mktemp("threads"),
        "gpt2",
        tied=True,
        model={"layers": 3, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
        data={"shuffle": True},
        train={"max_steps": TOTAL, "micro_batch_size": 1, "gradient_accumulation_steps": 2},
        optimizer={"max_grad_norm": 0.01},
        schedule={"type": "cosine"},
    )
    return Runs(config, ("model.dtype=bfloat16", "optimizer.master=fp32_split"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """On lanes without threads; every step is saved, and the run waits for it."""
    return runs.train("whole", *EVERY, "checkpoint.async_save=false")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, whole: Path) -> Iterator[None]:
    monkeypatch.setattr(cuda_lanes, "cuda", fake_cuda)
    monkeypatch.setattr(assemble, "InlineLanes", lambda: CudaLanes(torch.device("cpu")))
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


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", range(5))
def test_a_stop_between_the_updates_of_two_layers(
    number: int, runs: Runs, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4 on the thread of the updates, while the main thread may be in the next step."""
    noted, main = threading.Event(), threading.main_thread().ident
    assert main is not None
    note, apply = StopRequest._note, StepUpdate.update

    def note_and_tell(self: StopRequest, *args: Any) -> None:
        note(self, *args)
        noted.set()

    def update(self: StepUpdate, *args: Any) -> Future[Any] | None:
        if (self.step, len(self._updated)) == (3, number) and not noted.is_set():
            signal.pthread_kill(main, signal.SIGTERM)
            assert noted.wait(PATIENCE)
        return apply(self, *args)

    monkeypatch.setattr(StopRequest, "_note", note_and_tell)
    monkeypatch.setattr(StepUpdate, "update", update)
    early = "checkpoint.include_gradients=true"
    run = runs.train(f"between-{number}", early, ends=Stopped)
    steps = [shard.layer_step for shard in manifest_of(checkpoints(run)[-1]).shards]
    assert set(steps) <= {2, 3, 4}
    assert max(steps) - min(steps) <= 1
    runs.resume(run)
    assert not differences(whole, run)
