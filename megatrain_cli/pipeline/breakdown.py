"""Where a step's time went, from what ran when.

Times overlap on purpose, so the parts are not a sum. An interval of time is *hidden* while the
compute lane works, and *exposed* while it does not.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain_cli.pipeline.ops import Lane
from megatrain_cli.pipeline.trace import Span

# The event that a gradient waits for where all slabs are still to be emptied.
SLAB_EVENT = "slab_free"


@dataclass(frozen=True)
class Breakdown:
    """One step, whatever lies outside of it left out.

    Attributes:
        step_seconds: From its start to its end.
        compute_seconds: The compute lane worked.
        idle_seconds: It did not.
        data_wait_seconds: The loop had nothing to submit: the step's rows were still being made. 0
            where they were ready, as the rows of the next step are made beside each step.
        issue_seconds: The thread that submits was busy issuing the compute lane's ops: near the
            whole step beside a compute lane that idles, the step waits for that thread. 0 where an
            op is done when it is issued.
        weights_wait_seconds: It did not, and the layer it would go on with had yet to arrive.
        update_wait_seconds: The part of that in which the layer's update, or one before it, had
            yet to end: a faster link would not have shortened it.
        switch_median_us, switch_p99_us: Microseconds from the last op with one layer to the first
            op with the next; 0 without a switch.
        stream_in_seconds, stream_out_seconds: Something was on its way to, from the device.
        stream_in_bytes, stream_out_bytes: Bytes moved by then.
        stream_in_gb_per_second, stream_out_gb_per_second: Of 10^9 bytes, while busy; 0 if never.
        both_ways_seconds: Something was on its way in both directions.
        transfer_hidden_share: Of the time in which anything was on its way, the part that was
            hidden; 0 without transfers.
        update_seconds: The optimizer worked.
        update_hidden_seconds, update_exposed_seconds: The two parts of that.
        slab_wait_seconds: A complete gradient waited for a slab to leave into.
    """

    step_seconds: float
    compute_seconds: float
    idle_seconds: float
    data_wait_seconds: float
    issue_seconds: float
    weights_wait_seconds: float
    update_wait_seconds: float
    switch_median_us: float
    switch_p99_us: float
    stream_in_seconds: float
    stream_in_bytes: int
    stream_in_gb_per_second: float
    stream_out_seconds: float
    stream_out_bytes: int
    stream_out_gb_per_second: float
    both_ways_seconds: float
    transfer_hidden_share: float
    update_seconds: float
    update_hidden_seconds: float
    update_exposed_seconds: float
    slab_wait_seconds: float


def breakdown(
    spans: Iterable[Span], start: float, end: float, data_wait_seconds: float = 0.0
) -> Breakdown:
    """The breakdown of the step `[start, end]`, in seconds of the spans' clock.

    Args:
        spans: Whatever ran; what lies outside of the step is left out.
        start: Before its rows are asked for.
        end: When its loss and norm are known.
        data_wait_seconds: How long its rows were waited for.
    """
    spans = sorted((s for s in spans if s.end > start and s.start < end), key=_order)
    ops = [s for s in spans if s.waits_for is None]
    compute = [s for s in ops if s.lane is Lane.COMPUTE]
    coming = [s for s in ops if s.lane is Lane.STREAM_IN]
    leaving = [s for s in ops if s.lane is Lane.STREAM_OUT]
    step = Times([(start, end)])
    busy = Times.of(compute) & step
    arriving, departing = Times.of(coming) & step, Times.of(leaving) & step
    moving = arriving | departing
    updates = [s for s in ops if s.lane is Lane.UPDATE]
    updating = Times.of(updates) & step
    switches = _switches([s for s in compute if s.layer >= 0], start)
    gaps = sorted(1e6 * (first.start - before) for before, first in switches[1:])
    waits = [(before, _arrival(coming, first), first.layer) for before, first in switches]
    return Breakdown(
        step_seconds=step.seconds,
        compute_seconds=busy.seconds,
        idle_seconds=(step - busy).seconds,
        data_wait_seconds=data_wait_seconds,
        issue_seconds=math.fsum(s.issue_seconds for s in compute),
        weights_wait_seconds=math.fsum(max(0.0, arrival - before) for before, arrival, _ in waits),
        update_wait_seconds=math.fsum(
            max(0.0, min(arrival, _updated(updates, layer, arrival)) - before)
            for before, arrival, layer in waits
        ),
        switch_median_us=statistics.median(gaps) if gaps else 0.0,
        switch_p99_us=gaps[math.ceil(0.99 * len(gaps)) - 1] if gaps else 0.0,
        stream_in_seconds=arriving.seconds,
        stream_in_bytes=sum(s.num_bytes for s in coming),
        stream_in_gb_per_second=_ratio(sum(s.num_bytes for s in coming) / 1e9, arriving.seconds),
        stream_out_seconds=departing.seconds,
        stream_out_bytes=sum(s.num_bytes for s in leaving),
        stream_out_gb_per_second=_ratio(sum(s.num_bytes for s in leaving) / 1e9, departing.seconds),
        both_ways_seconds=(arriving & departing).seconds,
        transfer_hidden_share=_ratio((moving & busy).seconds, moving.seconds),
        update_seconds=updating.seconds,
        update_hidden_seconds=(updating & busy).seconds,
        update_exposed_seconds=(updating - busy).seconds,
        slab_wait_seconds=_slab_waits(spans, compute),
    )


class Times:
    """A set of times, as disjoint intervals in order."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self.intervals: list[tuple[float, float]] = []
        for start, end in sorted(intervals):
            if self.intervals and start <= self.intervals[-1][1]:
                first, last = self.intervals.pop()
                self.intervals.append((first, max(last, end)))
            elif start < end:
                self.intervals.append((start, end))

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Times":
        """When any of the spans was at work."""
        return cls((s.start, s.end) for s in spans)

    @property
    def seconds(self) -> float:
        """How long, all together."""
        return math.fsum(end - start for start, end in self.intervals)

    def __or__(self, other: "Times") -> "Times":
        return Times([*self.intervals, *other.intervals])

    def __sub__(self, other: "Times") -> "Times":
        edges = [-math.inf, *(t for interval in other.intervals for t in interval), math.inf]
        return self & Times(zip(edges[::2], edges[1::2], strict=True))

    def __and__(self, other: "Times") -> "Times":
        common, mine, theirs = [], list(self.intervals), list(other.intervals)
        while mine and theirs:
            common.append((max(mine[-1][0], theirs[-1][0]), min(mine[-1][1], theirs[-1][1])))
            (mine if mine[-1][0] > theirs[-1][0] else theirs).pop()
        return Times((start, end) for start, end in common if start < end)


def _order(span: Span) -> tuple[float, float, str, int, int]:
    return span.start, span.end, span.kind, span.layer, span.num_bytes


def _switches(compute: Sequence[Span], start: float) -> list[tuple[float, Span]]:
    """For each visit to a layer, when the lane was done with what came before, and its first op."""
    switches: list[tuple[float, Span]] = []
    before, layer = start, None
    for span in compute:
        if span.layer != layer:
            switches.append((min(before, span.start), span))
        before, layer = max(before, span.end), span.layer
    return switches


def _arrival(coming: Sequence[Span], first: Span) -> float:
    """When the layer that an op computes with arrived; at the latest when the op began."""
    ends = [s.end for s in coming if s.layer == first.layer and s.start < first.start]
    return min(ends[-1], first.start) if ends else -math.inf


def _updated(updates: Sequence[Span], layer: int, arrival: float) -> float:
    """When the update that a layer's copy waited for, and all before it, had ended."""
    handed = [s.start for s in updates if s.layer == layer and s.start < arrival]
    ends = [s.end for s in updates if handed and s.start <= handed[-1]]
    return max(ends, default=-math.inf)


def _slab_waits(spans: Sequence[Span], compute: Sequence[Span]) -> float:
    """A thread may sleep long before the gradient is there: what counts is the time after that."""
    complete = {s.layer: s.end for s in compute}  # the last op with a layer is its backward
    return math.fsum(
        max(0.0, s.end - max(s.start, complete.get(s.layer, s.start)))
        for s in spans
        if s.waits_for == SLAB_EVENT
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
