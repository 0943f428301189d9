"""Signals: finish the step, save, leave; or save and go on. The second one ends at once.

SIGINT, SIGTERM, SIGHUP and `LIMITS` ask for the end, `WISHES` for a checkpoint; SIGQUIT ends at
once and saves nothing. What was ignored when the run began, as SIGHUP under `nohup`, stays so, but
for SIGINT and SIGTERM. A wish that came before, while it was blocked (`settle_signals`), is noted
at once; one that comes behind the run harms it no more. How the run ends is known by then: a signal
only hastens that.

At once is where the signal is heeded. A KeyboardInterrupt would be raised wherever the main thread
is by then: it is lost in a destructor or a callback, and where it is not, unwinding waits for the
save that is to be given up, and so for the disk. What is half written has a name that is never
read, and the next start removes it.

One request may come as several signals: `timeout` tells its child and then the whole group, a
closed terminal is told by the shell and by the kernel, a cancelled job gets SIGINT and SIGTERM, in
either order. So what follows within a second is taken for the same request, unless it is a second
SIGINT: that is a person's. One of `LIMITS` is never a second request.
"""

import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from megatrain_cli.errors import MegatrainError
from megatrain_cli.signals import (
    LIMITS,
    WISHES,
    SignalThread,
    decide_end,
    leave_end_open,
    leave_now,
)

_ENDING = (signal.SIGINT, signal.SIGTERM)
_UNLESS_IGNORED = (signal.SIGHUP, signal.SIGQUIT, *LIMITS)
_ONE_REQUEST_SECONDS = 1.0


class StopRequest:
    """In its block signals are noted; what they did before they do again after it.

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
        self._nothing_to_save, self._clock = nothing_to_save, clock
        self._first: int | None = None  # that asked for the end
        self._noted_at = 0.0
        self._interrupted = False
        self._save_wanted = False
        self._held: set[int] = set()
        heard = [one for one in _UNLESS_IGNORED if signal.getsignal(one) is not signal.SIG_IGN]
        self._signals = SignalThread([*_ENDING, *heard, *WISHES], self._note)

    @property
    def number(self) -> int | None:
        """Of the first signal that asked for the end; None without one."""
        self._signals.catch_up()
        return self._first

    @property
    def signal_name(self) -> str | None:
        """Its name."""
        number = self.number
        return None if number is None else signal.Signals(number).name

    @property
    def seconds(self) -> float:
        """Since the signal that asked for the end."""
        return self._clock() - self._noted_at

    def take_wish(self) -> bool:
        """Whether a checkpoint was asked for since the last call; whoever asks makes it."""
        self._signals.catch_up()
        # A signal that comes between these two is met by the checkpoint that follows.
        wanted, self._save_wanted = self._save_wanted, False
        return wanted

    def __enter__(self) -> Self:
        leave_end_open()
        self._signals.start()
        self._held = signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES).intersection(WISHES)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        if error is None:
            decide_end(0, "")
        elif isinstance(error, MegatrainError):
            decide_end(error.exit_code, str(error))
        self._signals.stop()

    def _note(self, number: int) -> None:
        if number in WISHES:
            self._save_wanted = True
            return
        name = signal.Signals(number).name
        if self._nothing_to_save():
            leave_now(number, f"Stopped by {name} before anything had changed.")
        if number == signal.SIGQUIT:
            leave_now(
                number, "Ended by SIGQUIT, nothing was saved for it: the last checkpoint stays."
            )
        if self._first is None:
            self._noted_at, self._first = self._clock(), number
        elif number not in LIMITS and (
            self.seconds > _ONE_REQUEST_SECONDS or (self._interrupted and number == signal.SIGINT)
        ):
            leave_now(number, f"Stopped by a second signal, {name}: the last checkpoint stays.")
        self._interrupted |= number == signal.SIGINT
