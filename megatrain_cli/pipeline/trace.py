"""What ran when: each op's start and end on one clock, noted as it runs and read later.

[Note: One clock]
Spans are in seconds of the host's `time.perf_counter`. A device's ops carry timed events, and the
distance of two events is exact to half a microsecond only as long as it is short: it comes in
milliseconds as an FP32. So times of a lane are added up from event to event, in FP64, and lanes are
put side by side again whenever spans are taken. Where the device's clock lies on the host's is
measured once, before the first op. The two clocks drift apart, so what must be true bounds the
offset ever after: no op starts before it was issued, and no thread hears of its end before it has
ended. Nothing waits for the device.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from megatrain_cli.pipeline.ops import Kind, Lane, Op

# Spans that nobody has taken; older ones are forgotten. Tens of steps of the longest schedules.
KEPT = 1 << 17


@dataclass(frozen=True, slots=True)
class Span:
    """One op at work, or its lane's thread waiting before it.

    Attributes:
        start, end: Seconds of the host's `time.perf_counter`. An update starts when it is handed
            to the optimizer, which may still be at the layers before.
        num_bytes: What it moved over the link.
        waits_for: None if the op itself; else the name of the event that the thread which issues
            it slept for.
        issue_seconds: How long a thread was busy issuing it to a device; 0 for an op of the host.
    """

    lane: Lane
    kind: Kind
    layer: int
    micro_batch: int | None
    start: float
    end: float
    num_bytes: int = 0
    waits_for: str | None = None
    issue_seconds: float = 0.0


def span_of(
    op: Op,
    start: float,
    end: float,
    num_bytes: int = 0,
    waits_for: str | None = None,
    issue_seconds: float = 0.0,
) -> Span:
    """The op, or a wait before it, between two times."""
    where = op.lane, op.kind, op.layer, op.micro_batch
    return Span(*where, start, end, num_bytes, waits_for, issue_seconds)


class HostTrace:
    """Spans that were measured on the host; added to by any thread, taken by one."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=KEPT)

    def add(self, span: Span) -> None:
        """Keep a span until it is taken."""
        self._spans.append(span)

    def take(self) -> list[Span]:
        """All spans since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]


class TimedEvent(Protocol):
    """A point on a device's stream; `torch.cuda.Event(enable_timing=True)` is one."""

    def query(self) -> bool:
        """Whether it was reached."""

    def elapsed_time(self, later: Self, /) -> float:
        """Milliseconds, rounded to FP32, from this event to a later one; both were reached."""


@dataclass(slots=True)
class DeviceNote:
    """An op that was issued to a stream.

    Attributes:
        issued: When that began, in seconds of the host.
        start, end: Around its work on the stream.
        issue_seconds: How long it took the thread, waits for other ops not counted.
        seen: When a thread of the host first knew that it had ended.
    """

    op: Op
    num_bytes: int
    issued: float
    start: TimedEvent
    end: TimedEvent
    issue_seconds: float = 0.0
    seen: float = math.inf


class DeviceTrace:
    """Ops of a device's streams; noted by the threads that issue them, taken by one.

    Args:
        origin: An event that was reached before any op was issued.
        now: When a thread knew that, in seconds of the host.
    """

    def __init__(self, origin: TimedEvent, now: float) -> None:
        self._offset = now  # of the origin, in seconds of the host; see [Note: One clock]
        self._at: dict[Lane, tuple[TimedEvent, float]] = dict.fromkeys(Lane, (origin, 0.0))
        self._notes: dict[Lane, deque[DeviceNote]] = {lane: deque(maxlen=KEPT) for lane in Lane}

    def add(self, note: DeviceNote) -> None:
        """Keep a note until its op has ended and is taken."""
        self._notes[note.op.lane].append(note)

    def take(self) -> list[Span]:
        """All ops that have ended since the last call, each lane's in order."""
        timed = [(note, *self._times(note)) for note in self._ended()]
        earliest = max((note.issued - start for note, start, _ in timed), default=-math.inf)
        latest = min((note.seen - end for note, _, end in timed), default=math.inf)
        self._offset = min(max(self._offset, earliest), latest)
        self._align()
        return [
            span_of(
                note.op,
                self._offset + start,
                self._offset + end,
                note.num_bytes,
                issue_seconds=note.issue_seconds,
            )
            for note, start, end in timed
        ]

    def _ended(self) -> Iterator[DeviceNote]:
        for notes in self._notes.values():
            while notes and notes[0].end.query():
                yield notes.popleft()

    def _align(self) -> None:
        """Sums of rounded times move apart, so measure each lane's end from the latest of them."""
        latest, at = max(self._at.values(), key=lambda end: end[1])
        for lane, (event, _) in self._at.items():
            self._at[lane] = event, at - event.elapsed_time(latest) / 1e3

    def _times(self, note: DeviceNote) -> tuple[float, float]:
        """Seconds from the origin to the op's start and end."""
        before, at = self._at[note.op.lane]
        start = at + before.elapsed_time(note.start) / 1e3
        end = start + note.start.elapsed_time(note.end) / 1e3
        self._at[note.op.lane] = note.end, end
        return start, end
