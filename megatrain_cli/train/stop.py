"""SIGINT and SIGTERM: finish the step, write the weights, leave. The second signal ends at once.

The second SIGINT is Python's KeyboardInterrupt, so that the terminal is given back and a folder
that is half written goes; the second SIGTERM ends the process.
"""

import signal
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """In its block the first signal sets `signal_name`; the former handlers come back after it."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
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
        self.signal_name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
