"""The proof refuses schedules that compute something else than one optimizer step."""

from dataclasses import replace

import pytest

from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline.hazards import add_waits
from megatrain_cli.pipeline.ops import Buffer, Event, Kind, Op
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape
from megatrain_cli.pipeline.verify import ScheduleError, check_schedule

SHAPE = PipelineShape(
    5, 2, num_slots=2, num_slabs=2, pieces=(2, 1, 1, 1, 1), offload=True, tied=True
)


def first(ops: tuple[Op, ...], kind: Kind) -> int:
    return next(i for i, op in enumerate(ops) if op.kind is kind)


OTHERS = (Kind.OFFLOAD, Kind.FETCH, Kind.SCORE, Kind.TELL)  # needed by others, or of no step


@pytest.mark.parametrize("kind", [k for k in Kind if k not in OTHERS])
def test_a_missing_op_is_refused(kind: Kind) -> None:
    ops = build_schedule(SHAPE)
    position = first(ops, kind)
    with pytest.raises(ScheduleError):
        check_schedule(ops[:position] + ops[position + 1 :], SHAPE)


@pytest.mark.parametrize("kind", [Kind.OFFLOAD, Kind.FETCH])
def test_an_input_that_is_not_moved_is_missed(kind: Kind) -> None:
    ops = build_schedule(SHAPE)
    position = first(ops, kind)
    with pytest.raises(ScheduleError, match="needs"):
        check_schedule(ops[:position] + ops[position + 1 :], SHAPE)


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.UPDATE, Kind.STREAM_OUT, Kind.ACCUMULATE])
def test_an_op_that_runs_twice_is_refused(kind: Kind) -> None:
    ops = build_schedule(SHAPE)
    position = first(ops, kind)
    with pytest.raises(ScheduleError):
        check_schedule((*ops[: position + 1], ops[position], *ops[position + 1 :]), SHAPE)


def test_reading_the_other_slot_is_refused() -> None:
    ops = build_schedule(SHAPE)
    position = first(ops, Kind.FORWARD)
    op = ops[position]
    other = tuple(Buffer("slot", 1) if b.kind == "slot" else b for b in op.reads)
    with pytest.raises(ScheduleError, match="needs 0 in slot 1"):
        check_schedule((*ops[:position], replace(op, reads=other), *ops[position + 1 :]), SHAPE)


def test_a_tied_head_that_leaves_the_embedding_behind_is_refused() -> None:
    ops = build_schedule(SHAPE)
    position = first(ops, Kind.LOSS)
    embedding = Buffer("slot", SHAPE.end_slot(0))
    alone = replace(ops[position], reads=tuple(b for b in ops[position].reads if b != embedding))
    with pytest.raises(ScheduleError, match="touches slot 2 and does not say so"):
        check_schedule((*ops[:position], alone, *ops[position + 1 :]), SHAPE)


def test_a_report_before_all_gradients_are_complete_is_refused() -> None:
    ops = build_schedule(SHAPE)
    report = first(ops, Kind.REPORT)
    last = max(i for i, op in enumerate(ops) if op.kind is Kind.BACKWARD)
    early = [*ops[:last], ops[report], *ops[last:report], *ops[report + 1 :]]
    with pytest.raises(ScheduleError, match="before all is complete"):
        check_schedule(early, SHAPE)


def test_an_update_that_takes_the_one_before_for_ended_is_refused() -> None:
    """They overlap: begun is all that one knows of the other."""
    ops = build_schedule(SHAPE)
    second = first(ops, Kind.UPDATE) + 1
    before = ops[second - 1]
    weights = before.buffer("weights")
    curious = replace(ops[second], reads=(*ops[second].reads, weights))
    with pytest.raises(ScheduleError, match=f"races with update of layer {before.layer} for"):
        check_schedule((*ops[:second], curious, *ops[second + 1 :]), SHAPE)
    ended = Event("updated", weights)
    patient = replace(curious, waits=(*curious.waits, ended))
    told = replace(before, records=(*before.records, ended))
    check_schedule((*ops[: second - 1], told, patient, *ops[second + 1 :]), SHAPE)


def test_an_update_of_the_wrong_weights_is_refused() -> None:
    ops = build_schedule(SHAPE)
    position = first(ops, Kind.UPDATE)
    other = replace(ops[position], writes=(Buffer("weights", 2),))
    with pytest.raises(ScheduleError, match="touches weights 1 and does not say so"):
        check_schedule((*ops[:position], other, *ops[position + 1 :]), SHAPE)


def test_a_wait_for_what_nothing_records_is_refused() -> None:
    ops = build_schedule(SHAPE)
    ghost = replace(ops[0], waits=(Event("weights_ready", Buffer("slot", 9)),))
    with pytest.raises(ScheduleError, match="which nothing records"):
        check_schedule((ghost, *ops[1:]), SHAPE)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        PipelineShape(
            5, 2, num_slots=2, num_slabs=0, pieces=(1,) * 5, lookup=True, kept=frozenset({3})
        ),
        PipelineShape(4, 1, num_slots=1, num_slabs=3, pieces=(2, 1, 1, 2), eager=True),
    ],
)
def test_an_op_that_keeps_quiet_about_what_it_touches_is_refused(shape: PipelineShape) -> None:
    """Waits are derived from what ops say: what nobody says is in no race."""
    ops = tuple(replace(op, waits=(), records=()) for op in build_schedule(shape))
    check_schedule(add_waits(ops), shape)
    for position, op in enumerate(ops):
        for buffer in (*op.reads, *op.writes):
            quiet = replace(
                op,
                reads=tuple(b for b in op.reads if b != buffer),
                writes=tuple(b for b in op.writes if b != buffer),
            )
            with pytest.raises(InternalError):
                check_schedule(add_waits((*ops[:position], quiet, *ops[position + 1 :])), shape)


def test_an_update_before_the_last_piece_has_landed_is_refused() -> None:
    ops = [replace(op, waits=(), records=()) for op in build_schedule(SHAPE)]
    last = max(i for i, op in enumerate(ops) if op.kind is Kind.ACCUMULATE and op.layer == 0)
    late = [*ops[:last], *ops[last + 1 :], ops[last]]
    with pytest.raises(ScheduleError, match="update of layer 0 needs 2 in gradient 0"):
        check_schedule(add_waits(late), SHAPE)
