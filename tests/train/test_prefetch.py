"""The next step's rows are made beside the current step, and are those that were asked for."""

import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.pipeline.executor import Executor, IssuedStep
from megatrain_cli.train import loop
from megatrain_cli.train.layout import StepRows
from megatrain_cli.train.prefetch import Prefetch
from megatrain_cli.train.rows import TrainingRows
from tests.train.workspace import make_workspace, start


class Source:
    """Steps that say who made them; `ready` is set for each that was made."""

    total_steps, rows_per_step, rows_per_epoch = 4, 1, 4

    def __init__(self) -> None:
        self.ready = [threading.Event() for _ in range(self.total_steps + 1)]
        self.threads: list[threading.Thread] = []

    def of_step(self, index: int) -> StepRows:
        self.threads.append(threading.current_thread())
        self.ready[index].set()
        if index == 3:
            raise ValueError("step 3")
        return StepRows([], index)


def test_the_next_step_is_made_while_nobody_asks() -> None:
    source = Source()
    with closing(Prefetch(source)) as prefetch:
        assert prefetch.of_step(0).num_rows == 0
        assert source.ready[1].wait(60)
        assert not source.ready[2].is_set()  # one step ahead and no more
        assert prefetch.of_step(1).num_rows == 1
        assert source.ready[2].wait(60)
    assert threading.current_thread() not in source.threads
    assert len(set(source.threads)) == 1
    assert not source.threads[0].is_alive()


def test_any_step_may_be_asked_for_and_an_error_is_that_of_its_step() -> None:
    with closing(Prefetch(Source())) as prefetch:
        assert [prefetch.of_step(i).num_rows for i in (2, 0, 2)] == [2, 0, 2]
        with pytest.raises(ValueError, match="step 3"):
            prefetch.of_step(3)


def test_nothing_is_made_beyond_the_last_step() -> None:
    source = Source()
    with closing(Prefetch(source)) as prefetch, pytest.raises(ValueError, match="step 3"):
        prefetch.of_step(3)
    assert not source.ready[4].is_set()


def test_a_run_computes_a_step_while_the_next_ones_rows_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step waits for the rows of the next: without a thread beside it, for ever."""
    made = [threading.Event() for _ in range(4)]
    of_step, run_step = TrainingRows.of_step, Executor.run_step

    def make(self: TrainingRows, index: int) -> StepRows:
        rows = of_step(self, index)
        made[index].set()
        return rows

    def compute(self: Executor, batch: Sequence[MicroBatch], host: Any, seed: Any) -> IssuedStep:
        assert host.step == 3 or made[host.step].wait(60)
        return run_step(self, batch, host, seed)

    monkeypatch.setattr(TrainingRows, "of_step", make)
    monkeypatch.setattr(Executor, "run_step", compute)
    with start(make_workspace(tmp_path)) as run:
        records = list(run.steps())
    assert len(records) == 3
    assert not made[3].is_set()


class Waiting:
    """A clock that is read when a wait begins and when it ends: rows come in between, at once."""

    def __init__(self) -> None:
        self.now, self.began = 0.0, threading.Event()
        self.is_waiting = False

    def __call__(self) -> float:
        now, self.is_waiting = self.now, not self.is_waiting
        if self.is_waiting:
            self.began.set()
        return now

    def make_slowly(self) -> None:
        """Five seconds of the clock, which begin once somebody waits."""
        assert self.began.wait(60)
        self.began.clear()
        self.now += 5


def test_a_slow_loader_shows_by_how_long_it_was_waited_for_and_a_fast_one_does_not() -> None:
    clock, slow = Waiting(), {1}
    made = threading.Event()

    class Loader(Source):
        def of_step(self, index: int) -> StepRows:
            if index in slow:
                clock.make_slowly()
            if index == 3:
                made.set()
            return StepRows([], index)

    with closing(Prefetch(Loader(), clock)) as prefetch:
        prefetch.of_step(0)
        prefetch.of_step(1)
        assert prefetch.waited_seconds == 5
        prefetch.of_step(2)
        assert made.wait(60)
        assert prefetch._ahead is not None
        prefetch._ahead[1].result()  # it is ready before anybody asks
        prefetch.of_step(3)
        assert prefetch.waited_seconds == 0


def test_a_run_says_in_each_step_how_long_it_waited_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, of_step = Waiting(), TrainingRows.of_step

    def make(self: TrainingRows, index: int) -> StepRows:
        clock.make_slowly()
        return of_step(self, index)

    monkeypatch.setattr(TrainingRows, "of_step", make)
    monkeypatch.setattr(loop, "Prefetch", partial(Prefetch, clock=clock))
    with start(make_workspace(tmp_path)) as run:
        waits = [record.breakdown["data_wait_seconds"] for record in run.steps()]
    assert waits == [5, 5, 5]
