"""What runs ops: the protocol, and lanes that do each op at once and in order.

`InlineLanes` is the CPU's way and the oracle of `CudaLanes` (`pipeline/cuda_lanes.py`): the same
executor and the same schedule without any concurrency.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from megatrain_cli.pipeline.ops import Op
from megatrain_cli.pipeline.trace import HostTrace, Span, span_of


class Pending(Protocol):
    """Work that goes on after the call that began it; a `concurrent.futures.Future` is one."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> object:
        """Call `fn` with this object once the work has ended, well or not, on any thread."""

    def result(self) -> object:
        """Wait for the end; raise what the work failed with."""


Work = Callable[[], Pending | None]
"""What an op does. An update may go on when it returns; any other op is then done, or issued."""


class Lanes(Protocol):
    """Runs each op's work after what it waits for; returns as early as it can."""

    def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
        """Hand over the next op of the list. Raises the failure of an earlier op.

        Args:
            op: Says which lane, and what it waits for and records.
            work: Called once, on the lane's thread.
            num_bytes: What it moves over the link; noted in its span.
        """

    def mark(self) -> "Mark":
        """A point in time on the compute lane, after everything submitted to it so far."""

    def fence(self) -> "Fence":
        """A point after every host op and copy to the host submitted so far."""

    def take_spans(self) -> list[Span]:
        """What has ended since the last call; waits for nothing."""

    def drain(self) -> None:
        """Wait until everything submitted has ended; raise the first failure."""

    def halt(self) -> None:
        """Stop threads without asking the device, which may have failed.

        Whatever has not begun is dropped; updates that have begun end first.
        """

    def close(self) -> None:
        """`halt`, and wait until the device has ended what it was given."""

    @property
    def num_ended(self) -> int:
        """Ops that were issued to the device or have ended on the host: grows while all is well."""


class Mark(Protocol):
    """A point in time on the compute lane."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Seconds between two marks; both must have been reached."""


class Fence(Protocol):
    """A point on the host's lanes that another thread can wait for."""

    def wait(self) -> None:
        """Return once it is reached; raise the failure that keeps it from being reached."""


class InlineMark:
    """Now."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two marks."""
        assert isinstance(earlier, InlineMark)
        return self._time - earlier._time


class InlineLanes:
    """Every op runs to its end inside `submit`."""

    def __init__(self) -> None:
        self._trace = HostTrace()
        self.num_ended = 0

    def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
        """Run the work now. The list's order satisfies every wait."""
        start = time.perf_counter()
        pending = work()
        if pending is not None:
            pending.result()
        self._trace.add(span_of(op, start, time.perf_counter(), num_bytes))
        self.num_ended += 1

    def mark(self) -> InlineMark:
        """Now."""
        return InlineMark()

    def fence(self) -> "InlineLanes":
        """Reached already."""
        return self

    def wait(self) -> None:
        """Nothing is ever pending."""

    def take_spans(self) -> list[Span]:
        """All ops since the last call."""
        return self._trace.take()

    def drain(self) -> None:
        """Nothing is ever pending."""

    def halt(self) -> None:
        """Nothing to stop."""

    def close(self) -> None:
        """Nothing to stop."""
