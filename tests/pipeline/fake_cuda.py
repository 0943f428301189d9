"""`torch.cuda` as far as `CudaLanes` uses it, for a device that has done what it is given at once.

With it the threads of `CudaLanes` run on any machine: ops are issued, and so done, in whatever
order the threads come to. It refuses what a real device would silently take for done: a wait for
an event that nobody has recorded yet.
"""

import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held_for: list[Event] = []
        self.times_awaited = 0

    def wait_event(self, event: "Event") -> None:
        assert event.query(), "a stream waits for what was not issued"
        self.held_for.append(event)

    def synchronize(self) -> None:
        self.times_awaited += 1


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        del enable_timing, blocking
        self._at: float | None = None
        self.times_awaited = 0

    def record(self, stream: Stream) -> None:
        del stream
        self._at = time.perf_counter()

    def query(self) -> bool:
        return self._at is not None

    def synchronize(self) -> None:
        assert self.query(), "a thread waits for what was not issued"
        self.times_awaited += 1

    def elapsed_time(self, later: "Event") -> float:
        assert self._at is not None
        assert later._at is not None
        return float(np.float32(1e3 * (later._at - self._at)))


def stream(on: Stream) -> AbstractContextManager[None]:
    del on
    return nullcontext()
