"""Signals: finish the step, save, leave; or save and go on. The second one ends at once.

SIGINT, SIGTERM and SIGHUP ask for the end, SIGUSR1 for a checkpoint. A SIGINT after the first
signal is Python's KeyboardInterrupt, so that the terminal is given back and a folder that is half
written goes; any other ends the process as the system does. SIGHUP that was ignored when the run
began, as under `nohup`, stays so.

One request may come as several signals: `timeout` tells its child and then the whole group, a
closed terminal is told by the shell and by the kernel, a cancelled job gets SIGINT and SIGTERM. So
what follows within a second, SIGINT apart, is taken for the same request.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_REQUEST_SECONDS = 1.0


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
        self._before: dict[int, object] = {}

    @property
    def seconds(self) -> float:
        """Since the signal that asked for the end."""
        return self._clock() - self._noted_at

    def __enter__(self) -> Self:
        for number in _ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._ask_for_save)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave us

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self._nothing_to_save():
            # No handler may wait for a lock, and unwinding would: threads are loading.
            os.write(2, f"Stopped by {name} before anything had changed.\n".encode())
            os._exit(128 + number)
        if self.signal_name is None:
            self._noted_at, self.number = self._clock(), number
            self.signal_name = name
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif self.seconds > _ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _ask_for_save(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.save_wanted = True
