"""B4: a run that was stopped between two layers of an update ends as one that was not stopped.

A checkpoint in the middle of an update holds the gradients of the layers that still need it.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.errors import Stopped
from megatrain_cli.train.step import StepUpdate
from megatrain_cli.units import show_number
from tests.checkpoint.tiles import manifest_of
from tests.train.same_runs import checkpoints, differences
from tests.train.whole_runs import Died, Runs, die, stop, with_dropout

EARLY = "checkpoint.include_gradients=true"
LAYERS = 4  # embedding, two decoder layers, head
TOTAL = 5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    # Clips every step.
    return with_dropout(tmp_path_factory.mktemp("pending"), TOTAL, max_grad_norm=0.01)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    return runs.train("whole")


@pytest.fixture
def before_update(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int, int, Callable[[], None]], None]:
    """Sets what happens before the update of the n-th layer of a step, the first being 0."""

    apply = StepUpdate.update

    def act(step: int, number: int, action: Callable[[], None]) -> None:
        due = [action]

        def update(self: StepUpdate, *args: Any) -> Future[Any] | None:
            if (self.step, len(self._updated)) == (step, number) and due:
                due.pop()()
            return apply(self, *args)

        monkeypatch.setattr(StepUpdate, "update", update)

    return act


@pytest.mark.parametrize("number", range(LAYERS))
def test_the_rest_of_an_update_is_saved_and_done_by_resume(
    number: int,
    runs: Runs,
    whole: Path,
    before_update: Callable[[int, int, Callable[[], None]], None],
) -> None:
    before_update(2, number, stop)
    run = runs.train(f"run-{number}", EARLY, ends=Stopped)
    manifest = manifest_of(checkpoints(run)[-1])
    assert manifest.pending is not None
    assert manifest.pending.step == 2
    assert sorted(s.layer_step for s in manifest.shards) == [1] * (LAYERS - number) + [2] * number
    assert sum(shard.has_grads for shard in manifest.shards) == LAYERS - number
    said = runs.resume(run)
    assert f"finished the update of step 2 in {show_number(LAYERS - number, 'layer')}" in said
    assert not differences(whole, run)


def test_a_run_stopped_so_again_and_again_ends_the_same(
    runs: Runs, whole: Path, before_update: Callable[[int, int, Callable[[], None]], None]
) -> None:
    """Also by a process that dies after it has finished an update and before it saved."""
    before_update(1, 3, stop)
    run = runs.train("chain", EARLY, ends=Stopped)
    runs.resume(run, after={2: die}, ends=Died)
    assert manifest_of(checkpoints(run)[-1]).pending is not None
    before_update(2, 1, stop)
    runs.resume(run, ends=Stopped)
    before_update(3, 1, stop)
    runs.resume(run, ends=Stopped)
    before_update(4, 2, stop)
    runs.resume(run, ends=Stopped)
    runs.resume(run)
    assert not differences(whole, run)


def test_without_gradients_a_stop_waits_for_the_rest_of_the_update(
    runs: Runs, whole: Path, before_update: Callable[[int, int, Callable[[], None]], None]
) -> None:
    before_update(2, 1, stop)
    run = runs.train("waits", ends=Stopped)
    manifest = manifest_of(checkpoints(run)[-1])
    assert (manifest.pending, manifest.step) == (None, 2)
    runs.resume(run, EARLY)
    assert not differences(whole, run)


def test_the_last_update_is_always_finished(
    runs: Runs, whole: Path, before_update: Callable[[int, int, Callable[[], None]], None]
) -> None:
    before_update(TOTAL, 1, stop)
    run = runs.train("last", EARLY)
    assert not differences(whole, run)


@pytest.mark.parametrize("number", range(LAYERS))
def test_a_save_that_waits_for_the_update_does_not_keep_it_from_being_left(
    number: int,
    runs: Runs,
    whole: Path,
    before_update: Callable[[int, int, Callable[[], None]], None],
) -> None:
    """Saves that the run waits for: one would wait for the rest of the update for ever."""
    before_update(2, number, stop)
    saves = ("checkpoint.async_save=false", "checkpoint.save_steps=2")
    run = runs.train(f"waited-for-{number}", EARLY, *saves, ends=Stopped)
    pending = manifest_of(checkpoints(run)[-1]).pending
    assert pending is not None
    assert pending.step == 2
    runs.resume(run)
    assert not differences(whole, run)


def test_an_update_is_finished_where_the_step_before_it_is_saved_under_its_name(
    runs: Runs, whole: Path, before_update: Callable[[int, int, Callable[[], None]], None]
) -> None:
    """The step is not lost: whether that one was saved whole, or in the middle of its own update.

    A run that is stopped in its first step each time would make no progress.
    """
    saves = ("checkpoint.async_save=false", "checkpoint.save_steps=1")
    before_update(2, 0, stop)
    run = runs.train("named", EARLY, *saves, ends=Stopped)
    assert [folder.name for folder in checkpoints(run)] == ["step-00000001", "step-00000002"]
    assert manifest_of(checkpoints(run)[-1]).pending is None

    before_update(1, 0, stop)
    run = runs.train("first", EARLY, ends=Stopped)
    assert [manifest_of(folder).step for folder in checkpoints(run)] == [0]
    before_update(2, 0, stop)
    runs.resume(run, ends=Stopped)
    assert [manifest_of(folder).step for folder in checkpoints(run)] == [0, 2]
    runs.resume(run)
    assert not differences(whole, run)
