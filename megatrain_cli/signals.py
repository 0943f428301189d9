"""Signals are heeded at once, whatever the main thread is at.

Python runs a signal's handler on the main thread, between two of its instructions. In a call that
takes long, into the driver or a compiler, it is not run; nor where the signal came right before
that thread began to wait for another one, or was given to another one: then it is run when the wait
ends, which for a disk that hangs is never. But the number of each signal is written into a pipe
where and when it comes (`signal.set_wakeup_fd`), and a thread of our own waits for that.
"""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

LIMITS = (signal.SIGXCPU, signal.SIGALRM)
"""Time is up: CPU seconds (`ulimit -t`), or an alarm that whoever began the process has set.

A limit that is exceeded is told of again with every further second of CPU time: more of these say
nothing of anybody's patience.
"""

WISHES = (signal.SIGUSR1, signal.SIGUSR2)
"""They ask for a checkpoint; which of them comes ahead of a time limit is a scheduler's choice."""

# How the process will end, whatever signal comes: exit code and line; None while that is open.
_decided: tuple[int, str] | None = None


def decide_end(code: int, line: str) -> None:
    """A signal that comes from now on only hastens the end; it does not change what it is.

    Taking down what a run held takes long: memory that is page-locked, libraries. Who is impatient
    then must not be told that a run that is saved was cut short.

    Args:
        code: To leave with.
        line: For stderr, if a signal comes; empty where it was said.
    """
    global _decided  # noqa: PLW0603  a process ends once
    _decided = (code, line)


def leave_end_open() -> None:
    """A signal decides again: something begins."""
    global _decided  # noqa: PLW0603  as above
    _decided = None


def leave_now(number: int, line: str) -> NoReturn:
    """End the process without waiting for a lock, or for a thread.

    Args:
        number: Of the signal that wants it.
        line: For stderr.
    """
    code, line = _decided or (128 + number, line)
    if line:
        with suppress(OSError):  # nobody reads it any more
            # Below the bar, if there is one.
            os.write(2, (b"\n" if os.isatty(2) else b"") + line.encode() + b"\n")
    os._exit(code)


class SignalThread:
    """Passes signals on, one at a time and in the order in which they came.

    Two of one number that come in one instant may be one: the system keeps no count of them.

    Args:
        numbers: Of the signals.
        heed: Gets each number, on a thread of this object, or on one that asks whether there is
            any: on the main thread that may be in the middle of anything, so `heed` takes no lock.
    """

    def __init__(self, numbers: Iterable[int], heed: Callable[[int], None]) -> None:
        self._numbers, self._heed = frozenset(numbers), heed
        self._heeding = threading.Lock()
        self._before: dict[int, object] = {}
        self._reading: int | None = None
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def start(self) -> None:
        """From now on these signals do what `heed` does; to be called on the main thread."""
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)  # else `set_wakeup_fd` would refuse it
        self._thread.start()
        self._pipe_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._look)

    def stop(self) -> None:
        """Give these signals back to whom they had been of; to be called on the main thread."""
        signal.set_wakeup_fd(self._pipe_before)  # first: from now on nobody would ask this one
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave us
        os.close(self._writing)  # ends the thread, once it has read all
        self._thread.join()
        with self._heeding:
            assert self._reading is not None
            os.close(self._reading)
            self._reading = None

    def catch_up(self) -> None:
        """Return when all that came before this call has been heeded. Any thread may ask."""
        with self._heeding:
            self._read_on()

    def _look(self, number: int, frame: FrameType | None) -> None:
        """The handler: the thread will see to it too, but may get its turn only later."""
        del number, frame
        if self._heeding.acquire(blocking=False):  # it may be this thread that has it
            try:
                self._read_on()
            finally:
                self._heeding.release()

    def _listen(self) -> None:
        assert self._reading is not None
        arrivals = select.poll()
        arrivals.register(self._reading, select.POLLIN)
        more = True
        while more:
            arrivals.poll()
            with self._heeding:
                more = self._read_on()

    def _read_on(self) -> bool:
        """Heed all that is in the pipe; False if no more will come."""
        if self._reading is None:
            return False
        with suppress(BlockingIOError):
            while number := os.read(self._reading, 1):
                if number[0] in self._numbers:
                    self._heed(number[0])
            return False
        return True
