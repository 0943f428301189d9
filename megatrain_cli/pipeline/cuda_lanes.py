"""Run ops on three CUDA streams and two lanes of the host, each lane with a thread of its own.

[Note: Two stages]
A device learns of an op only when it is issued, and another thread may be about to do that. So
the record of a stream's op has two stages: it was issued, which is known on the host, and it has
ended, which a CUDA event tells. A stream waits for the first by its thread and for the second on
the device; the host's lanes wait for both. Python's state (which layer a slot holds) thus changes
in an order that the schedule's waits allow, as memory does: what they order is issued in order.

Ops of the compute lane are issued by the thread that submits them. It sleeps only if such an op
needs what has not been issued yet: a layer's copy that waits for the layer's update.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import cuda

from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline.lanes import Mark, Pending, Work
from megatrain_cli.pipeline.ops import Event, Lane, Op
from megatrain_cli.pipeline.trace import DeviceNote, DeviceTrace, HostTrace, Span, span_of


class CudaMark:
    """A timed event on the compute stream."""

    def __init__(self, stream: cuda.Stream) -> None:
        self._event = cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two marks, from the device's own clock."""
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Record:
    """How far an op has come, see [Note: Two stages]; an op of the host has one stage, its end."""

    def __init__(self) -> None:
        self.reached = threading.Event()  # the first stage
        self._end: cuda.Event | None = None
        self._note: DeviceNote | None = None

    def set(self, end: cuda.Event | None = None, note: DeviceNote | None = None) -> None:
        """The first stage is reached; `end` is the second."""
        self._end, self._note = end, note
        self.reached.set()

    def hold(self, stream: cuda.Stream | None) -> bool:
        """Let the stream, or without one this thread, go on after the end; whether it slept."""
        slept = not self.reached.is_set()
        self.reached.wait()
        if self._end is None or self._note is None:
            return slept
        if stream is not None:
            stream.wait_event(self._end)
            return slept
        slept = slept or not self._end.query()
        self._end.synchronize()
        self._note.seen = min(self._note.seen, time.perf_counter())
        return slept


@dataclass(eq=False)
class Job:
    """An op on its way through its lane."""

    op: Op
    work: Work
    num_bytes: int
    held: Sequence[tuple[Event, Record]]
    record: Record = field(default_factory=Record)
    ended: bool = False


class CudaLanes:
    """Three streams of one device and two lanes of the host; each lane's ops stay in order.

    The first failure of any lane is raised by the next call of `submit`, `drain` or a fence's
    `wait`. Ops behind it are not run, and their records are set all the same: nobody waits for
    ever.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = {
            lane: cuda.Stream(device) for lane in (Lane.STREAM_IN, Lane.COMPUTE, Lane.STREAM_OUT)
        }
        origin = cuda.Event(enable_timing=True, blocking=True)
        origin.record(self._streams[Lane.COMPUTE])
        origin.synchronize()
        self._device_trace = DeviceTrace(origin, time.perf_counter())
        self._host_trace = HostTrace()
        self._latest: dict[Event, Record] = {}
        self._last: dict[Lane, Record] = {}
        self._failure: BaseException | None = None
        self.num_ended = 0  # counted by several threads: never less than one of them counted
        self._updates: deque[Job] = deque()  # not ended, or behind one that has not
        self._lock = threading.Lock()  # an update ends on any thread, in the order of the list
        self._queues: dict[Lane, queue.SimpleQueue[Job | None]] = {
            lane: queue.SimpleQueue() for lane in Lane if lane is not Lane.COMPUTE
        }
        self._threads = [
            threading.Thread(target=self._work_off, args=(lane,), name=f"{lane}-lane", daemon=True)
            for lane in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, op: Op, work: Work, num_bytes: int = 0) -> None:
        """Issue an op of the compute lane; queue any other for its lane's thread."""
        self.raise_failure()
        held = [(event, self._latest[event]) for event in op.waits if event in self._latest]
        job = Job(op, work, num_bytes, held)
        if op.lane is Lane.COMPUTE:
            self._issue(job)
        else:
            if op.lane is Lane.UPDATE:
                with self._lock:
                    self._updates.append(job)
            self._queues[op.lane].put(job)
        self._last[op.lane] = job.record
        self._latest.update(dict.fromkeys(op.records, job.record))

    def mark(self) -> CudaMark:
        """A timed event on the compute stream."""
        return CudaMark(self._streams[Lane.COMPUTE])

    def fence(self) -> "_HostFence":
        """A point after every host op and copy to the host submitted so far."""
        ends = (Lane.HOST, Lane.STREAM_OUT)
        last = [self._last[lane] for lane in ends if lane in self._last]
        return _HostFence(self, last)

    def take_spans(self) -> list[Span]:
        """What has ended since the last call."""
        return [*self._device_trace.take(), *self._host_trace.take()]

    def drain(self) -> None:
        """Wait until all is issued, for the host's lanes, then for each stream."""
        for record in self._last.values():
            record.reached.wait()
        self.raise_failure()
        for stream in self._streams.values():
            stream.synchronize()

    def halt(self) -> None:
        """End the threads and wait for updates that have begun; the device is not asked."""
        if self._failure is None:
            self._failure = InternalError("The lanes are closed.")  # keeps the rest from beginning
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        for record in self._last.values():
            record.reached.wait()

    def close(self) -> None:
        """End the threads, then wait for what has begun: it uses memory that goes."""
        self.halt()
        for stream in self._streams.values():
            stream.synchronize()

    def raise_failure(self) -> None:
        """Raise what a lane failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def _work_off(self, lane: Lane) -> None:
        run = self._issue if lane in self._streams else self._run_on_host
        while (job := self._queues[lane].get()) is not None:
            try:
                self.raise_failure()
                run(job)
            except BaseException as error:  # noqa: BLE001  raised again by the main thread
                self._fail(job, error)

    def _issue(self, job: Job) -> None:
        self._hold(job)
        stream = self._streams[job.op.lane]
        issued = time.perf_counter()
        start = cuda.Event(enable_timing=True)
        start.record(stream)
        with cuda.stream(stream):
            job.work()
        end = cuda.Event(enable_timing=True, blocking=True)
        end.record(stream)
        took = time.perf_counter() - issued
        note = DeviceNote(job.op, job.num_bytes, issued, start, end, took)
        self._device_trace.add(note)
        job.record.set(end, note)
        self.num_ended += 1

    def _run_on_host(self, job: Job) -> None:
        self._hold(job)
        start = time.perf_counter()
        pending = job.work()
        if pending is not None and job.op.lane is Lane.UPDATE:
            pending.add_done_callback(lambda done: self._finish(job, start, done))
        else:
            self._finish(job, start, pending)

    def _finish(self, job: Job, start: float, pending: Pending | None) -> None:
        try:
            if pending is not None:
                pending.result()
        except BaseException as error:  # noqa: BLE001  raised again by the main thread
            self._fail(job, error)
        else:
            self._host_trace.add(span_of(job.op, start, time.perf_counter(), job.num_bytes))
            self._end(job)
            self.num_ended += 1

    def _hold(self, job: Job) -> None:
        """Return when the op may be issued or run."""
        stream = self._streams.get(job.op.lane)
        for event, record in job.held:
            began = time.perf_counter()
            if record.hold(stream):
                now = time.perf_counter()
                self._host_trace.add(span_of(job.op, began, now, waits_for=event.name))
        self.raise_failure()  # records are set after a failure too

    def _fail(self, job: Job, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._end(job)

    def _end(self, job: Job) -> None:
        """Set the op's record; an update's once all before it have ended too."""
        if job.op.lane is not Lane.UPDATE:
            job.record.set()
            return
        with self._lock:
            job.ended = True
            while self._updates and self._updates[0].ended:
                self._updates.popleft().record.set()


class _HostFence:
    def __init__(self, lanes: CudaLanes, last: Sequence[Record]) -> None:
        self._lanes, self._last = lanes, last

    def wait(self) -> None:
        for record in self._last:
            record.hold(None)
        self._lanes.raise_failure()
