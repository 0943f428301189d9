"""A schedule that is played takes as long as its waits and lanes say, and no longer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.forecast import play
from megatrain_cli.pipeline.ops import Kind, Lane, Op
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape
from tests.strategies import pipeline_shapes

SIX_LAYERS = PipelineShape(6, 1, num_slots=4, num_slabs=0, pieces=(1,) * 6, lookup=True)

# Milliseconds that add up exactly.
durations = st.integers(0, 64).map(lambda n: n / 64)


@given(pipeline_shapes(), st.data())
def test_a_step_is_never_shorter_than_a_lane_nor_longer_than_all_in_a_row(
    shape: PipelineShape, data: st.DataObject
) -> None:
    ops = build_schedule(shape)
    seconds = {op: data.draw(durations) for op in ops}
    timeline = play(ops, lambda op, beside: seconds[op])
    by_lane = [sum(seconds[op] for op in ops if op.lane is lane) for lane in Lane]
    assert max(by_lane) <= timeline.step_seconds + 1e-9
    assert timeline.step_seconds <= sum(by_lane) + 1e-9
    assert all(one.end - one.start <= seconds[one.op] + 1e-9 for one in timeline.ops)


@given(pipeline_shapes(), st.data())
def test_ops_of_a_lane_begin_in_order_and_after_what_they_wait_for(
    shape: PipelineShape, data: st.DataObject
) -> None:
    ops = build_schedule(shape)
    seconds = {op: data.draw(durations) for op in ops}
    timed = play(ops, lambda op, beside: seconds[op]).ops
    ends: dict[object, float] = {}
    last: dict[Lane, float] = {}
    for one in timed:
        assert one.start >= last.get(one.op.lane, one.start) - 1e-9
        last[one.op.lane] = one.end
        for event in one.op.waits:
            assert one.start >= ends.get(event, one.start) - 1e-9
        ends.update(dict.fromkeys(one.op.records, one.end))


def test_an_optimizer_that_is_slow_makes_steps_of_backward_and_updates() -> None:
    """Deferred updates begin after backward and the next forward follows them layer by layer."""

    def seconds(op: Op, beside: bool) -> float:
        return {Kind.UPDATE: 10.0, Kind.BACKWARD: 2.0, Kind.FORWARD: 1.0}.get(op.kind, 0.0)

    # The head's gradient is that of the loss: five layers have a backward. The last update but one
    # of the order is the head's, the last the last decoder layer's, whose forward is the rest.
    assert play(build_schedule(SIX_LAYERS), seconds).step_seconds == 6 * 10 + 5 * 2 + 1


@given(pipeline_shapes(), st.data())
def test_an_op_is_beside_the_optimizer_where_an_update_before_it_has_yet_to_end(
    shape: PipelineShape, data: st.DataObject
) -> None:
    ops = build_schedule(shape)
    seconds = {op: data.draw(durations) for op in ops}
    beside: dict[Op, bool] = {}

    def note(op: Op, while_updating: bool) -> float:
        beside[op] = while_updating
        return seconds[op]

    timed = play(ops, note).ops  # the last step played is the one that is returned
    ends: list[float] = []  # of the updates so far
    for one in timed:
        if one.op.lane is Lane.UPDATE:
            assert not beside[one.op]  # they share its threads
            ends.append(one.end)
        elif any(end > one.start + 1e-9 for end in ends):
            assert beside[one.op]


@pytest.mark.parametrize("update", [0.0, 0.25, 1.0, 2.0, 5.0])
def test_an_op_is_slower_only_for_as_long_as_the_optimizer_works(update: float) -> None:
    def seconds(op: Op, beside: bool) -> float:
        if op.kind is Kind.UPDATE:
            return update
        return (4.0 if beside else 2.0) if op.kind is Kind.FORWARD else 0.0

    shape = PipelineShape(3, 1, num_slots=1, num_slabs=0, pieces=(1, 1, 1))
    first = play(build_schedule(shape), seconds).ops[1]
    assert (first.op.kind, first.op.layer) == (Kind.FORWARD, 0)
    # It begins when its own layer is updated, and two more updates follow.
    assert first.end - first.start == 2 + min(2 * update, 4) / 2


def test_deferred_updates_are_beside_forward_and_not_backward_and_eager_ones_the_other_way() -> (
    None
):
    def kinds_beside(shape: PipelineShape, update: float) -> set[Kind]:
        found = set()

        def seconds(op: Op, beside: bool) -> float:
            if beside:
                found.add(op.kind)
            return update if op.kind is Kind.UPDATE else 1.0

        play(build_schedule(shape), seconds)
        return found

    assert not kinds_beside(SIX_LAYERS, 0.0)
    deferred = kinds_beside(SIX_LAYERS, 1.0)
    assert {Kind.STREAM_IN, Kind.FORWARD} <= deferred
    assert Kind.BACKWARD not in deferred
    eager = replace(SIX_LAYERS, num_slabs=4, eager=True)
    assert Kind.BACKWARD in kinds_beside(eager, 1.0)
