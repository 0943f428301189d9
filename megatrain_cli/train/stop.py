"""Signals: finish the step, save, leave; or save and go on. The second one ends at once.

SIGINT, SIGTERM and SIGHUP ask for the end, SIGUSR1 for a checkpoint. SIGHUP that was ignored when
the run began, as under `nohup`, stays so. SIGUSR1 that came before, while it was blocked
(`settle_signals`), is noted at once; one that comes behind the run harms it no more.

At once is in the handler itself. A KeyboardInterrupt would be raised wherever the main thread is by
then: it is lost in a destructor or a callback, and where it is not, unwinding waits for the save
that is to be given up, and so for the disk. What is half written has a name that is never read, and
the next start removes it.

One request may come as several signals: `timeout` tells its child and then the whole group, a
closed terminal is told by the shell and by the kernel, a cancelled job gets SIGINT and SIGTERM, in
either order. So what follows within a second is taken for the same request, unless it is a second
SIGINT: that is a person's.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NoReturn, Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_REQUEST_SECONDS = 1.0


# Shows the cursor, which a progress bar hides, and begins a line below it.
_GIVE_BACK = b"\x1b[?25h\n"


def leave_now(number: int, line: str) -> NoReturn:
    """End the process as a signal's handler may: without waiting for a lock, or for a thread."""
    with suppress(OSError):  # nobody reads it any more
        os.write(2, (_GIVE_BACK if os.isatty(2) else b"") + line.encode() + b"\n")
    os._exit(128 + number)


class StopRequest:
    """In its block signals are noted; the former handlers come back after it.

    Attributes:
        signal_name: Of the first signal that asked for the end; None without one.
        number: Its number; 0 without one.
        save_wanted: A checkpoint was asked for; whoever makes it sets it back.

    Args:
        nothing_to_save: Whether the run has changed nothing yet: the first signal then ends the
            process at once.
        clock: Seconds from any start.
    """

    def __init__(
        self,
        nothing_to_save: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.signal_name: str | None = None
        self.number = 0
        self.save_wanted = False
        self._nothing_to_save, self._clock = nothing_to_save, clock
        self._noted_at = 0.0
        self._interrupted = False
        self._before: dict[int, object] = {}
        self._held: set[int] = set()

    @property
    def seconds(self) -> float:
        """Since the signal that asked for the end."""
        return self._clock() - self._noted_at

    def __enter__(self) -> Self:
        for number in _ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_for_save)
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        self._held = blocked & {signal.SIGUSR1}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave us

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self._nothing_to_save():
            leave_now(number, f"Stopped by {name} before anything had changed.")
        if self.signal_name is None:
            self._noted_at, self.number = self._clock(), number
            self.signal_name = name
        elif self.seconds > _ONE_REQUEST_SECONDS or (self._interrupted and number == signal.SIGINT):
            leave_now(number, f"Stopped by a second signal, {name}: the last checkpoint stays.")
        self._interrupted |= number == signal.SIGINT

    def _ask_for_save(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.save_wanted = True
