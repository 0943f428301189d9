"""Notices that a run hangs: a copy that never ends, a thread that died, a disk that is silent."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

# One op, or one chunk of a checkpoint, takes a fraction of it on any machine.
HANG_SECONDS = 900.0


class Watchdog:
    """A thread that looks whether anything ends, in its block: steps, evaluations and saves alike.

    Time in which the whole process was stopped (Ctrl-Z) does not count.

    Args:
        progress: Anything that changes as long as all is well; asked on the watchdog's thread.
        on_hang: Called once, on that thread, when nothing has changed for `seconds`.
        seconds: Without progress.
        clock: Seconds from any start.
    """

    def __init__(
        self,
        progress: Callable[[], object],
        on_hang: Callable[[], None],
        seconds: float = HANG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._on_hang = progress, on_hang
        self._seconds, self._clock = seconds, clock
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        seen, since = self._progress(), self._clock()
        with self._changed:
            while not self._closed:
                left = since + self._seconds - self._clock()
                if left <= 0:
                    break
                asked, before = min(left, self._seconds / 8), self._clock()
                if not self._changed.wait(asked):
                    # Who sleeps longer than asked for was stopped, and so was all that could end.
                    since += max(0.0, self._clock() - before - asked)
                now = self._progress()
                if now != seen:
                    seen, since = now, self._clock()
            if self._closed:
                return
        self._on_hang()
