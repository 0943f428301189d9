"""The rows of the next step, made while the current one runs."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from megatrain_cli.train.layout import StepRows
from megatrain_cli.train.rows import RowSource


class Prefetch:
    """Takes the steps of a source one by one, a step ahead of whoever asks.

    A step's rows are a function of its number, so nothing depends on when they are made. One step
    ahead is enough: making rows takes far less than computing with them.

    Args:
        rows: Asked on a thread of its own.
        clock: In seconds.

    Attributes:
        waited_seconds: How long the last call of `of_step` had to wait; 0 if its rows were ready.
    """

    def __init__(self, rows: RowSource, clock: Callable[[], float] = time.perf_counter) -> None:
        self._rows, self._clock = rows, clock
        self.waited_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._ahead: tuple[int, Future[StepRows]] | None = None

    def of_step(self, index: int) -> StepRows:
        """The rows of a step; those of the next are begun.

        Raises:
            Exception: What the source raised for this step.
        """
        if self._ahead is None or self._ahead[0] != index:
            self._begin(index)
        assert self._ahead is not None
        _, future = self._ahead
        self.waited_seconds = 0.0
        if not future.done():
            began = self._clock()
            wait([future])
            self.waited_seconds = self._clock() - began
        rows = future.result()
        if index + 1 < self._rows.total_steps:
            self._begin(index + 1)
        return rows

    def _begin(self, index: int) -> None:
        self._ahead = index, self._pool.submit(self._rows.of_step, index)

    def close(self) -> None:
        """End the thread; what it is making is thrown away."""
        self._ahead = None
        self._pool.shutdown(wait=True, cancel_futures=True)
