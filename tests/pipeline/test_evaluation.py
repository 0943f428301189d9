"""An evaluation between two steps: proved like a step, and it changes none of its bits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.evaluation import build_with_evaluation
from megatrain_cli.pipeline.ops import Buffer, Kind, Lane
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape
from megatrain_cli.pipeline.verify import ScheduleError, check_evaluation, check_schedule
from tests.pipeline.waits import without_wait
from tests.strategies import pipeline_shapes

SHAPE = PipelineShape(
    5, 2, num_slots=2, num_slabs=2, pieces=(2, 1, 1, 1, 1), offload=True, tied=True
)


@given(pipeline_shapes(), st.data())
def test_every_mode_is_proved_and_needs_each_of_its_waits(
    shape: PipelineShape, data: st.DataObject
) -> None:
    step, evaluation = build_with_evaluation(shape)
    check_schedule(step, shape)
    check_evaluation(step, evaluation, shape)
    waits = [(i, j) for i, op in enumerate(evaluation) for j in range(len(op.waits))]
    position, wait = data.draw(st.sampled_from(waits))
    with pytest.raises(ScheduleError):
        check_evaluation(step, without_wait(evaluation, position, wait), shape)


@given(pipeline_shapes())
def test_a_step_with_an_evaluation_behind_it_waits_as_one_without(shape: PipelineShape) -> None:
    step, _ = build_with_evaluation(shape)
    alone = build_schedule(shape)
    assert [replace(op, records=()) for op in step] == [replace(op, records=()) for op in alone]
    assert all(set(a.records) >= set(b.records) for a, b in zip(step, alone, strict=True))


@given(pipeline_shapes())
def test_it_touches_no_memory_that_a_step_does_not_have(shape: PipelineShape) -> None:
    step, evaluation = build_with_evaluation(shape)
    known = {buffer for op in step for buffer in (*op.reads, *op.writes)}
    assert known >= {buffer for op in evaluation for buffer in (*op.reads, *op.writes)}
    assert {op.lane for op in evaluation} == {Lane.STREAM_IN, Lane.COMPUTE, Lane.HOST}


@given(pipeline_shapes())
def test_weights_come_once(shape: PipelineShape) -> None:
    _, evaluation = build_with_evaluation(shape)
    arriving = [op.layer for op in evaluation if op.kind is Kind.STREAM_IN]
    assert sorted(arriving) == list(range(shape.num_layers))


@pytest.mark.parametrize("kind", [Kind.STREAM_IN, Kind.FORWARD, Kind.SCORE, Kind.REPORT, Kind.TELL])
def test_a_missing_op_is_refused(kind: Kind) -> None:
    step, ops = build_with_evaluation(SHAPE)
    position = next(i for i, op in enumerate(ops) if op.kind is kind)
    with pytest.raises(ScheduleError):
        check_evaluation(step, ops[:position] + ops[position + 1 :], SHAPE)


def test_a_report_before_the_last_score_is_refused() -> None:
    step, ops = build_with_evaluation(SHAPE)
    report = next(i for i, op in enumerate(ops) if op.kind is Kind.REPORT)
    early = (*ops[: report - 1], ops[report], ops[report - 1], *ops[report + 1 :])
    with pytest.raises(ScheduleError, match="before all is complete"):
        check_evaluation(step, early, SHAPE)


def test_a_tied_head_that_leaves_the_embedding_behind_is_refused() -> None:
    step, ops = build_with_evaluation(SHAPE)
    position = next(i for i, op in enumerate(ops) if op.kind is Kind.SCORE)
    embedding = Buffer("slot", SHAPE.end_slot(0))
    alone = replace(ops[position], reads=tuple(b for b in ops[position].reads if b != embedding))
    with pytest.raises(ScheduleError, match="does not say so"):
        check_evaluation(step, (*ops[:position], alone, *ops[position + 1 :]), SHAPE)


@pytest.mark.parametrize("name", ["updated", "buffer_free"])
def test_a_step_that_does_not_record_what_it_waits_for_is_refused(name: str) -> None:
    """What carries events over from a step is proved, and not taken for granted."""
    slabs = replace(SHAPE, num_slots=1)
    step, ops = build_with_evaluation(slabs)
    awaited = {event for op in ops for event in op.waits if event.name == name}
    told = max(i for i, op in enumerate(step) if awaited.intersection(op.records))
    kept = tuple(event for event in step[told].records if event not in awaited)
    forgetful = (*step[:told], replace(step[told], records=kept), *step[told + 1 :])
    with pytest.raises(ScheduleError):
        check_evaluation(forgetful, ops, slabs)
