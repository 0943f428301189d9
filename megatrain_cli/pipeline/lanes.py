"""Two ways to run ops: at once and in order on the CPU, or on three CUDA streams and a thread.

`InlineLanes` is the oracle: the same executor and the same schedule without any concurrency.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from megatrain_cli.pipeline.ops import Event, Lane, Op

Work = Callable[[], None]


class Lanes(Protocol):
    """Runs each op's work after what it waits for; returns as early as it can."""

    def submit(self, op: Op, work: Work) -> None:
        """Hand over the next op of the list. Raises the failure of an earlier host op."""

    def mark(self) -> "Mark":
        """A point in time on the compute lane, after everything submitted to it so far."""

    def fence(self) -> "Fence":
        """A point on the host lane, after every host op submitted so far."""

    def drain(self) -> None:
        """Wait until everything submitted has ended; raise the first failure."""

    def close(self) -> None:
        """Stop threads. Whatever is still queued on the host lane is dropped."""


class Mark(Protocol):
    """A point in time on the compute lane."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Seconds between two marks; both must have been reached."""


class Fence(Protocol):
    """A point on the host lane that another thread can wait for."""

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

    def submit(self, op: Op, work: Work) -> None:
        """Run the work now. The list's order satisfies every wait."""
        del op
        work()

    def mark(self) -> InlineMark:
        """Now."""
        return InlineMark()

    def fence(self) -> "InlineLanes":
        """Reached already."""
        return self

    def wait(self) -> None:
        """Nothing is ever pending."""

    def drain(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing to stop."""


class CudaMark:
    """A timed event on the compute stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two marks, from the device's own clock."""
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class _DeviceRecord:
    """A CUDA event: streams queue behind it, the host thread sleeps until it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def hold_stream(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)

    def hold_host(self) -> None:
        self._event.synchronize()


class _HostRecord:
    """Set by the host thread; whoever issues to a stream must wait for it before issuing."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def hold_stream(self, stream: torch.cuda.Stream) -> None:
        del stream
        self._event.wait()

    def hold_host(self) -> None:
        self._event.wait()


_Record = _DeviceRecord | _HostRecord
_HostItem = tuple[list[_Record], Work, list[_HostRecord]]


class CudaLanes:
    """Three streams of one device and one host thread.

    The thread that calls `submit` only issues work. It blocks in two cases: an op of a stream
    waits for the host lane, whose work is not known to the device; or its own work does, as packing
    a pageable tile into pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = {
            lane: torch.cuda.Stream(device)
            for lane in (Lane.STREAM_IN, Lane.COMPUTE, Lane.STREAM_OUT)
        }
        self._latest: dict[Event, _Record] = {}
        self._queue: queue.SimpleQueue[_HostItem | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._host_lane, name="host-lane", daemon=True)
        self._thread.start()

    def submit(self, op: Op, work: Work) -> None:
        """Issue the op to its stream, or queue it for the host thread."""
        self.raise_failure()
        held = [self._latest[event] for event in op.waits if event in self._latest]
        if op.lane is Lane.HOST:
            records = [_HostRecord() for _ in op.records]
            self._latest.update(zip(op.records, records, strict=True))
            self._queue.put((held, work, records))
            return
        stream = self._streams[op.lane]
        for record in held:
            record.hold_stream(stream)
        self.raise_failure()
        with torch.cuda.stream(stream):
            work()
        for event in op.records:
            self._latest[event] = _DeviceRecord(stream)

    def mark(self) -> CudaMark:
        """A timed event on the compute stream."""
        return CudaMark(self._streams[Lane.COMPUTE])

    def fence(self) -> "_HostFence":
        """A point on the host lane, after every host op submitted so far."""
        reached = _HostRecord()
        self._queue.put(([], lambda: None, [reached]))
        return _HostFence(self, reached)

    def drain(self) -> None:
        """Wait for the host thread, then for each stream."""
        self.fence().wait()
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """End the host thread, after what is queued on the streams: it uses memory that goes."""
        for stream in self._streams.values():
            stream.synchronize()
        self._queue.put(None)
        self._thread.join()

    def _host_lane(self) -> None:
        while (item := self._queue.get()) is not None:
            held, work, records = item
            if self._failure is None:
                try:
                    for record in held:
                        record.hold_host()
                    work()
                except BaseException as error:  # noqa: BLE001  raised again by the main thread
                    self._failure = error
            # Set after a failure too, so that nobody waits for ever; `submit` then raises.
            for record in records:
                record.set()

    def raise_failure(self) -> None:
        """Raise what the host lane failed with, if it did."""
        if self._failure is not None:
            raise self._failure


class _HostFence:
    def __init__(self, lanes: CudaLanes, reached: _HostRecord) -> None:
        self._lanes, self._reached = lanes, reached

    def wait(self) -> None:
        self._reached.hold_host()
        self._lanes.raise_failure()
