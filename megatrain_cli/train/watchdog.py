"""Notices that a run hangs: a copy that never ends, a thread that died, a disk that is silent."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

# One op, or one chunk of a checkpoint, takes a fraction of it on any machine.
HANG_SECONDS = 900.0


class Watchdog:
    """A thread that looks whether anything ends while something is awaited.

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
        self._watching = self._closed = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which something has to end again and again."""
        self._set(watching=True)
        try:
            yield
        finally:
            self._set(watching=False)

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

    def _set(self, *, watching: bool) -> None:
        with self._changed:
            self._watching = watching
            self._changed.notify_all()

    def _watch(self) -> None:
        seen, since = None, self._clock()
        with self._changed:
            while not self._closed:
                now = self._progress() if self._watching else None
                if now is None or now != seen:
                    seen, since = now, self._clock()
                left = since + self._seconds - self._clock()
                if now is not None and left <= 0:
                    break
                self._changed.wait(left / 8 if now is not None else None)
            if self._closed:
                return
        self._on_hang()
