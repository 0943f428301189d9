"""Where a step's time went: one step to read, and laws that hold for any."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.breakdown import Breakdown, Times, breakdown
from megatrain_cli.pipeline.ops import LANE_OF, Kind, Lane
from megatrain_cli.pipeline.trace import Span

GB = 10**9


def span(
    kind: Kind,
    layer: int,
    start: float,
    end: float,
    num_bytes: int = 0,
    waits: str | None = None,
    issue: float = 0.0,
) -> Span:
    return Span(LANE_OF[kind], kind, layer, None, start, end, num_bytes, waits, issue)


def test_one_step_reads_as_it_ran() -> None:
    """
    ```
    seconds    0   1   2   3   4   5   6   7   8   9  10
    update     0000000011111111
    stream_in          000011112222
    compute                0000....22222222....111111
    stream_out                             2222....1111
    ```
    """
    found = breakdown(
        [
            span(Kind.UPDATE, 0, 0, 2),
            span(Kind.UPDATE, 1, 2, 4),
            span(Kind.STREAM_IN, 0, 2, 3, 2 * GB, issue=0.5),  # by another thread
            span(Kind.STREAM_IN, 1, 3, 4, 4 * GB),
            span(Kind.STREAM_IN, 2, 4, 5, 6 * GB),
            span(Kind.FORWARD, 0, 3, 4, issue=0.25),
            span(Kind.LOSS, 2, 5, 7, issue=3),  # issued long before it began
            span(Kind.STREAM_OUT, 2, 7, 8, 3 * GB),
            span(Kind.BACKWARD, 1, 8, 9.5),
            span(Kind.STREAM_OUT, 1, 4.5, 9.75, waits="slab_free"),  # complete at 9.5
            span(Kind.STREAM_OUT, 1, 9.75, 10, GB),
        ],
        0,
        10,
        0.75,
    )
    assert found == Breakdown(
        step_seconds=10,
        compute_seconds=4.5,
        idle_seconds=5.5,
        data_wait_seconds=0.75,
        issue_seconds=3.25,
        weights_wait_seconds=4,  # of layer 0 until 3, of layer 2 from 4 to 5
        update_wait_seconds=2,  # of layer 0 until 2
        switch_median_us=1e6,
        switch_p99_us=1e6,
        stream_in_seconds=3,
        stream_in_bytes=12 * GB,
        stream_in_gb_per_second=4,
        stream_out_seconds=1.25,
        stream_out_bytes=4 * GB,
        stream_out_gb_per_second=3.2,
        both_ways_seconds=0,
        transfer_hidden_share=1 / 4.25,  # only from 3 to 4
        update_seconds=4,
        update_hidden_seconds=1,
        update_exposed_seconds=3,
        slab_wait_seconds=0.25,
    )


def test_the_99th_of_100_switches_is_not_the_worst() -> None:
    at, spans = 0.0, []
    for layer in range(101):
        spans.append(span(Kind.FORWARD, layer, at, at + 1))
        at += 1 + 2.0**-20 * (layer + 1)
    found = breakdown(spans, 0, at)
    assert found.switch_p99_us == pytest.approx(1e6 * 2**-20 * 99, rel=1e-6)
    assert found.switch_median_us == pytest.approx(1e6 * 2**-20 * 50.5, rel=1e-6)


def test_ops_with_one_layer_are_one_visit() -> None:
    found = breakdown(
        [span(Kind.FORWARD, 1, 0, 1), span(Kind.FORWARD, 1, 3, 4), span(Kind.FORWARD, 2, 5, 6)],
        0,
        6,
    )
    assert found.switch_median_us == found.switch_p99_us == 1e6


def test_nothing_at_all_is_idle() -> None:
    assert breakdown([], 1, 3) == Breakdown(2, 0, 2, *[0] * 18)


# Whole numbers, so that sums are exact.
moments = st.integers(0, 60).map(float)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, end = sorted((draw(moments), draw(moments)))
    kind = draw(st.sampled_from(Kind))
    waits = draw(st.sampled_from([None, None, "slab_free", "updated"]))
    num_bytes, issue = draw(st.integers(0, 9)), float(draw(st.integers(0, 9)))
    return span(kind, draw(st.integers(0, 4)), start, end, num_bytes, waits, issue)


steps = st.lists(spans(), max_size=20)


@given(steps)
def test_parts_add_up(step: list[Span]) -> None:
    found = breakdown(step, 10, 50)
    assert found.compute_seconds + found.idle_seconds == found.step_seconds == 40
    assert found.update_hidden_seconds + found.update_exposed_seconds == found.update_seconds
    assert found.update_hidden_seconds <= found.compute_seconds
    assert found.update_exposed_seconds <= found.idle_seconds
    assert max(found.stream_in_seconds, found.stream_out_seconds) <= found.step_seconds
    assert found.both_ways_seconds <= min(found.stream_in_seconds, found.stream_out_seconds)
    assert found.both_ways_seconds >= (
        found.stream_in_seconds + found.stream_out_seconds - found.step_seconds
    )
    assert 0 <= found.transfer_hidden_share <= 1
    assert 0 <= found.update_wait_seconds <= found.weights_wait_seconds <= found.idle_seconds
    assert found.update_wait_seconds <= found.update_seconds
    assert 0 <= found.switch_median_us <= found.switch_p99_us


@given(steps, st.randoms(use_true_random=False))
def test_the_order_of_the_spans_does_not_matter(step: list[Span], random: object) -> None:
    shuffled = list(step)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # random.Random, as hypothesis gives it
    assert breakdown(shuffled, 10, 50) == breakdown(step, 10, 50)


@given(steps, st.integers(1, 40))
def test_idle_time_at_the_end_changes_nothing_but_idle_time(step: list[Span], more: int) -> None:
    # All spans end by 60: one that begins with the end of a step belongs to the next.
    before, after = asdict(breakdown(step, 0, 61)), asdict(breakdown(step, 0, 61 + more))
    for name in ("step_seconds", "idle_seconds"):
        assert after.pop(name) == before.pop(name) + more
    assert after == before


@given(steps, st.integers(-50, 50))
def test_when_a_step_runs_does_not_matter(step: list[Span], shift: int) -> None:
    moved = [replace(s, start=s.start + shift, end=s.end + shift) for s in step]
    assert breakdown(moved, 10 + shift, 50 + shift) == breakdown(step, 10, 50)


@given(steps)
def test_compute_without_a_break_hides_everything_and_waits_for_nothing(step: list[Span]) -> None:
    others = [s for s in step if s.lane is not Lane.COMPUTE]
    found = breakdown([*others, span(Kind.FORWARD, 9, 0, 60)], 0, 60)
    assert found.update_exposed_seconds == found.weights_wait_seconds == found.idle_seconds == 0
    assert found.transfer_hidden_share == (
        1 if found.stream_in_seconds + found.stream_out_seconds else 0
    )


@given(steps)
def test_one_lane_at_a_time_hides_nothing(step: list[Span]) -> None:
    at, alone = 0.0, []
    for s in step:
        alone.append(replace(s, start=at, end=at + s.end - s.start))
        at = alone[-1].end
    found = breakdown(alone, 0, max(at, 1))
    assert found.update_hidden_seconds == found.transfer_hidden_share == 0


def test_waiting_for_one_update_is_waiting_for_those_before_it_too() -> None:
    """An update may end before an older one; its weights are given out when both have."""
    found = breakdown(
        [
            span(Kind.UPDATE, 0, 0, 5),
            span(Kind.UPDATE, 1, 1, 3),
            span(Kind.UPDATE, 2, 2, 9),  # nobody needs it yet
            span(Kind.STREAM_IN, 1, 5, 7),
            span(Kind.FORWARD, 1, 7, 8),
        ],
        0,
        8,
    )
    assert (found.weights_wait_seconds, found.update_wait_seconds) == (7, 5)


@given(steps)
def test_without_updates_every_wait_is_for_the_link(step: list[Span]) -> None:
    without = [s for s in step if s.lane is not Lane.UPDATE or s.waits_for]
    before, after = asdict(breakdown(step, 10, 50)), asdict(breakdown(without, 10, 50))
    changed = {name for name in before if before[name] != after[name]}
    assert all(name.startswith("update_") for name in changed)
    assert not any(after[name] for name in after if name.startswith("update_"))


@given(steps)
def test_updates_that_never_end_are_all_that_is_waited_for(step: list[Span]) -> None:
    layers = [span(Kind.UPDATE, layer, 0, 60) for layer in range(5)]
    found = breakdown([*step, *layers], 10, 50)
    assert found.update_wait_seconds == found.weights_wait_seconds


@given(steps)
def test_a_copy_for_each_copy_the_other_way_is_always_both_ways(step: list[Span]) -> None:
    there = [s for s in step if s.lane is not Lane.STREAM_OUT]
    back = [
        replace(s, lane=Lane.STREAM_OUT, kind=Kind.STREAM_OUT)
        for s in there
        if s.lane is Lane.STREAM_IN
    ]
    found = breakdown([*there, *back], 10, 50)
    assert found.both_ways_seconds == found.stream_in_seconds == found.stream_out_seconds
    assert breakdown(there, 10, 50).both_ways_seconds == 0


intervals = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))))


@given(intervals, intervals)
def test_sets_of_times_are_sets_of_seconds(
    a: list[tuple[float, float]], b: list[tuple[float, float]]
) -> None:
    """Whole seconds one by one are the oracle."""

    def seconds(pairs: list[tuple[float, float]]) -> set[int]:
        return {second for start, end in pairs for second in range(int(start), int(end))}

    x, y = Times(a), Times(b)
    for found, wanted in (
        (x | y, seconds(a) | seconds(b)),
        (x & y, seconds(a) & seconds(b)),
        (x - y, seconds(a) - seconds(b)),
    ):
        assert seconds(found.intervals) == wanted
        assert found.seconds == len(wanted)
