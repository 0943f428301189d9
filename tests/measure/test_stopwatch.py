"""Repetitions end with the budget, on a clock that only the work moves."""

import pytest

from megatrain_cli.measure.stopwatch import Stopwatch


class Time:
    """A clock that stands still until work is done."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Takes the given seconds, one call after the other; the last one again and again."""

    def __init__(self, time: Time, *seconds: float) -> None:
        self.time, self.seconds, self.calls = time, seconds, 0

    def __call__(self) -> float:
        taken = self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        self.time.now += taken
        return taken


@pytest.fixture
def time() -> Time:
    return Time()


def test_the_warm_up_counts_neither_as_a_figure_nor_in_the_budget(time: Time) -> None:
    work = Work(time, 9.0, 1.0, 3.0, 2.0, 2.0, 7.0)
    assert Stopwatch(100.0, time).median(work, 10.0) == 2.0
    assert work.calls == 6


def test_no_call_begins_after_the_budget(time: Time) -> None:
    work = Work(time, 1.0)
    assert Stopwatch(100.0, time).median(work, 2.5) == 1.0
    assert work.calls == 4


def test_the_total_ends_a_budget_early(time: Time) -> None:
    work = Work(time, 1.0)
    Stopwatch(3.5, time).median(work, 50.0)
    assert work.calls == 4


def test_what_is_measured_is_measured_warm_even_if_time_is_up(time: Time) -> None:
    work = Work(time, 5.0, 1.0)
    watch = Stopwatch(4.0, time)
    assert watch.median(work, 0.0) == 1.0
    assert work.calls == 2
    assert watch.remaining == -2.0


def test_seconds_of_is_what_the_clock_says(time: Time) -> None:
    assert Stopwatch(1.0, time).seconds_of(Work(time, 0.25)) == 0.25
