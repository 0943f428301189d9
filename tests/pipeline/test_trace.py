"""Spans of a device's ops, on the host's clock, from events that only tell short distances well."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.lanes import InlineLanes
from megatrain_cli.pipeline.ops import Kind, Lane, Op
from megatrain_cli.pipeline.trace import DeviceNote, DeviceTrace, Span

STREAMS = (Lane.STREAM_IN, Lane.COMPUTE, Lane.STREAM_OUT)
KINDS = {Lane.STREAM_IN: Kind.STREAM_IN, Lane.COMPUTE: Kind.FORWARD, Lane.STREAM_OUT: Kind.OFFLOAD}


@dataclass(frozen=True)
class Point:
    """An event at a time of the device's clock, in seconds."""

    at: float
    reached: bool = True

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, later: "Point") -> float:
        assert self.reached
        assert later.reached
        return float(np.float32(1e3 * (later.at - self.at)))


def note(
    start: float,
    end: float,
    *,
    lane: Lane = Lane.COMPUTE,
    issued: float = -math.inf,
    seen: float = math.inf,
    reached: bool = True,
) -> DeviceNote:
    points = Point(start, reached), Point(end, reached)
    return DeviceNote(Op(KINDS[lane], 3, 1), 64, issued, *points, 0.125, seen)


def test_a_span_says_what_ran_and_when_on_the_hosts_clock() -> None:
    trace = DeviceTrace(Point(5.0), 105.0)
    trace.add(note(6.0, 6.5))
    assert trace.take() == [Span(Lane.COMPUTE, Kind.FORWARD, 3, 1, 106.0, 106.5, 64, None, 0.125)]
    assert trace.take() == []


def test_what_has_not_ended_is_left_for_later_and_asked_nothing() -> None:
    trace = DeviceTrace(Point(0.0), 0.0)
    pending = note(1.0, 2.0, reached=False)
    trace.add(note(0.0, 1.0))
    trace.add(pending)
    trace.add(note(0.0, 1.5, lane=Lane.STREAM_IN))
    assert sorted(span.end for span in trace.take()) == [1.0, 1.5]
    pending.start, pending.end = Point(1.0), Point(2.0)
    assert [span.end for span in trace.take()] == [2.0]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1e-4, 10)), min_size=1, max_size=200))
def test_times_stay_exact_however_long_the_run(ops: list[tuple[float, float]]) -> None:
    """From one event a day ago, FP32 milliseconds would be 8 ms apart."""
    trace = DeviceTrace(Point(0.0), 0.0)
    at, exact = 0.0, []
    for gap, seconds in ops:
        exact.append((at + gap, at + gap + seconds))
        trace.add(note(*exact[-1]))
        at += gap + seconds
    for span, (start, end) in zip(trace.take(), exact, strict=True):
        assert abs(span.end - span.start - (end - start)) <= 2**-24 * (end - start) + 1e-9
        assert abs(span.start - start) <= 2**-23 * start + 1e-9


def test_a_day_later_a_step_is_as_exact_as_the_first() -> None:
    trace = DeviceTrace(Point(0.0), 0.0)
    taken: list[Span] = []
    for at in range(0, 86400, 10):
        trace.add(note(at + 0.1, at + 0.1 + 100e-6))
        trace.add(note(at + 0.2, at + 9.9, lane=Lane.STREAM_IN))
        trace.add(note(at + 9.9, at + 9.95, lane=Lane.STREAM_OUT))
        taken = trace.take()
    copy, compute, out = taken
    assert compute.end - compute.start == pytest.approx(100e-6, abs=1e-8)
    assert copy.start - compute.start == pytest.approx(0.1, abs=2e-6)
    assert out.start == pytest.approx(copy.end, abs=2e-6)
    assert out.end == pytest.approx(86399.95, rel=2**-24)  # unless a bound says it better


@given(
    drift=st.floats(-1e-4, 1e-4),
    late=st.floats(-1e-3, 1e-3),
    latency=st.floats(0, 5e-5),
    steps=st.integers(1, 30),
)
def test_the_clocks_are_kept_together_by_what_must_be_true(
    drift: float, late: float, latency: float, steps: int
) -> None:
    """However the clocks drift, an op is where the host knows it to be, within two latencies."""
    trace = DeviceTrace(Point(0.0), late)
    for step in range(steps):
        start, end = 100.0 * step + 1, 100.0 * step + 3  # seconds of the host
        device = [(1 + drift) * t for t in (start, end)]
        trace.add(note(*device, issued=start - latency, seen=end + latency))
        (span,) = trace.take()
        bound = 2 * latency + 2 * abs(drift) * (end - start) + 1e-6
        assert abs(span.start - start) <= bound
        assert abs(span.end - end) <= bound


@given(st.lists(st.sampled_from(STREAMS), min_size=1, max_size=30), st.data())
def test_each_lanes_ops_come_once_and_in_order_whenever_they_are_taken(
    lanes: list[Lane], data: st.DataObject
) -> None:
    trace = DeviceTrace(Point(0.0), 0.0)
    taken: list[Span] = []
    for at, lane in enumerate(lanes):
        trace.add(note(at, at + 1, lane=lane))
        if data.draw(st.booleans()):
            taken += trace.take()
    taken += trace.take()
    for lane in STREAMS:
        ends = [span.end for span in taken if span.lane is lane]
        assert ends == [at + 1.0 for at, one in enumerate(lanes) if one is lane]


def ticks() -> Iterator[float]:
    at = 0.0
    while True:
        yield at
        at += 1.0


def test_lanes_without_concurrency_note_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ticks()
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    lanes = InlineLanes()
    lanes.submit(Op(Kind.STREAM_IN, 0), lambda: None, 10)
    lanes.submit(Op(Kind.FORWARD, 0, 1), lambda: None)
    assert lanes.take_spans() == [
        Span(Lane.STREAM_IN, Kind.STREAM_IN, 0, None, 0.0, 1.0, 10),
        Span(Lane.COMPUTE, Kind.FORWARD, 0, 1, 2.0, 3.0),
    ]
    assert lanes.take_spans() == []


def test_lanes_without_concurrency_wait_for_an_update_that_goes_on() -> None:
    lanes, asked = InlineLanes(), list[str]()

    class Later:
        def result(self) -> None:
            asked.append("result")

        def add_done_callback(self, fn: object, /) -> None:
            asked.append("callback")

    lanes.submit(Op(Kind.UPDATE, 0), Later)
    assert asked == ["result"]
