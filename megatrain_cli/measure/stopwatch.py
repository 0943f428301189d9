"""Repeats a piece of work within a budget of seconds; the median is what counts."""

import statistics
import time
from collections.abc import Callable

Clock = Callable[[], float]

# More would move the median of copies and products by less than they differ from day to day.
_REPETITIONS = 5


class Stopwatch:
    """A clock, and the seconds that all measurements together may take.

    Args:
        total_seconds: From now on.
        clock: Seconds from any start.
    """

    def __init__(self, total_seconds: float, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._end = clock() + total_seconds

    @property
    def remaining(self) -> float:
        """Seconds left of the total; below 0 when it was overrun."""
        return self._end - self.clock()

    def seconds_of(self, work: Callable[[], object]) -> float:
        """How long `work` takes once, until it returns."""
        began = self.clock()
        work()
        return self.clock() - began

    def median(self, run: Callable[[], float], budget: float) -> float:
        """The median of what `run` returns, over one to five calls after one that never counts.

        The first call loads, compiles and allocates: as a figure it would be wrong, and as a part
        of the budget it would leave no time for the others. No call but the first that counts
        begins after `budget` seconds, or after the total has run out.
        """
        run()
        end = min(self.clock() + budget, self._end)
        found = [run()]
        while len(found) < _REPETITIONS and self.clock() < end:
            found.append(run())
        return statistics.median(found)
