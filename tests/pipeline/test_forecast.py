"""A schedule that is played takes as long as its waits and lanes say, and no longer."""

from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.forecast import play
from megatrain_cli.pipeline.ops import Kind, Lane, Op
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape
from tests.strategies import pipeline_shapes

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
    assert sum(timeline.busy_seconds(lane) for lane in Lane) <= sum(by_lane) + 1e-9


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
    shape = PipelineShape(6, 1, num_slots=4, num_slabs=0, pieces=(1,) * 6, lookup=True)

    def seconds(op: Op, beside: bool) -> float:
        return {Kind.UPDATE: 10.0, Kind.BACKWARD: 2.0, Kind.FORWARD: 1.0}.get(op.kind, 0.0)

    # The head's gradient is that of the loss: five layers have a backward. The last update but one
    # of the order is the head's, the last the last decoder layer's, whose forward is the rest.
    assert play(build_schedule(shape), seconds).step_seconds == 6 * 10 + 5 * 2 + 1
