"""A schedule is one exact, race-free optimizer step; no wait is missing and none is idle."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.pipeline.hazards import add_waits
from megatrain_cli.pipeline.ops import Buffer, Event, Kind, Op, schedule_text
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape
from megatrain_cli.pipeline.verify import ScheduleError, check_schedule
from tests.pipeline.waits import without_wait
from tests.strategies import pipeline_shapes


def shape_of(
    num_decoder_layers: int, micro_batches: int, slots: int, slabs: int, kept: int
) -> PipelineShape:
    num_layers = num_decoder_layers + 2
    return PipelineShape(
        num_layers=num_layers,
        num_micro_batches=micro_batches,
        num_slots=slots,
        num_slabs=slabs,
        pieces=(1,) * num_layers,
        kept=frozenset(range(num_layers - 1 - kept, num_layers - 1)),
    )


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("num_decoder_layers", range(1, 8))
def test_every_small_schedule_is_proved_and_needs_each_of_its_waits(
    num_decoder_layers: int,
) -> None:
    grid = product((1, 2, 3), (1, 2, 3), (1, 2, 3), range(num_decoder_layers + 1))
    for micro_batches, slots, slabs, kept in grid:
        shape = shape_of(num_decoder_layers, micro_batches, slots, slabs, kept)
        ops = build_schedule(shape)
        check_schedule(ops, shape)
        for position, op in enumerate(ops):
            for wait in range(len(op.waits)):
                with pytest.raises(ScheduleError):
                    check_schedule(without_wait(ops, position, wait), shape)


@given(pipeline_shapes(), st.data())
def test_every_mode_is_proved_and_needs_each_of_its_waits(
    shape: PipelineShape, data: st.DataObject
) -> None:
    ops = build_schedule(shape)
    check_schedule(ops, shape)
    waits = [(i, j) for i, op in enumerate(ops) for j in range(len(op.waits))]
    position, wait = data.draw(st.sampled_from(waits))
    with pytest.raises(ScheduleError):
        check_schedule(without_wait(ops, position, wait), shape)


@given(pipeline_shapes())
def test_weights_come_twice_and_gradients_leave_once_whatever_the_accumulation(
    shape: PipelineShape,
) -> None:
    ops = build_schedule(shape)
    arrivals = Counter(op.layer for op in ops if op.kind is Kind.STREAM_IN)
    assert arrivals[shape.head] == 1
    assert all(1 <= arrivals[layer] <= 2 for layer in range(shape.head))
    leaving = Counter((op.layer, op.piece) for op in ops if op.kind is Kind.STREAM_OUT)
    assert set(leaving.values()) == {1}


def test_layers_still_on_the_device_at_the_turn_are_not_copied_again() -> None:
    ops = build_schedule(shape_of(4, 1, slots=3, slabs=1, kept=0))
    arrivals = Counter(op.layer for op in ops if op.kind is Kind.STREAM_IN)
    assert arrivals == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}


@pytest.mark.parametrize(
    ("layers", "expected"), [(1, [0, 2, 1]), (2, [1, 0, 3, 2]), (4, [1, 0, 2, 3, 5, 4])]
)
def test_updates_come_as_layers_are_needed_but_for_the_ends(
    layers: int, expected: list[int]
) -> None:
    """The embedding's gradient lands last, and the head's copy hides behind a layer's update."""
    ops = build_schedule(shape_of(layers, 2, slots=2, slabs=2, kept=1))
    assert [op.layer for op in ops if op.kind is Kind.UPDATE] == expected


def test_eager_updates_end_with_the_pieces_that_the_next_forward_begins_with() -> None:
    pieces = (2, 1, 1, 1, 1, 1, 1)
    shape = PipelineShape(7, 1, num_slots=2, num_slabs=4, pieces=pieces, eager=True)
    ops = [(op.layer, op.piece) for op in build_schedule(shape) if op.kind is Kind.UPDATE]
    assert ops == [(6, 0), (5, 0), (4, 0), (3, 0), (0, 0), (0, 1), (1, 0), (2, 0)]


def test_layers_that_were_updated_first_are_streamed_in_while_the_last_are_updated() -> None:
    shape = PipelineShape(14, 1, num_slots=12, num_slabs=3, pieces=(1,) * 14, eager=True)
    assert shape.tail == ((0, 0), (1, 0), (2, 0))
    arriving = [op.layer for op in build_schedule(shape) if op.kind is Kind.STREAM_IN]
    assert arriving[:14] == [3, 4, 5, 6, 0, 7, 8, 9, 10, 1, 11, 2, 13, 12]


def test_an_eager_step_is_checked_while_its_last_updates_go_on() -> None:
    shape = PipelineShape(4, 1, num_slots=1, num_slabs=2, pieces=(1,) * 4, eager=True)
    ops = build_schedule(shape)
    clip = next(op for op in ops if op.kind is Kind.CLIP)
    assert [event.name for event in clip.waits] == ["totals_ready"]
    assert ops[-1].kind is Kind.UPDATE


def test_the_step_is_reported_before_the_last_gradient_has_left() -> None:
    ops = build_schedule(shape_of(3, 2, slots=2, slabs=0, kept=1))
    (report,) = (op for op in ops if op.kind is Kind.REPORT)
    assert report.waits == ()
    (clip,) = (op for op in ops if op.kind is Kind.CLIP)
    assert [wait.name for wait in clip.waits] == ["totals_ready"]


@pytest.mark.parametrize(("lookup", "tied", "arrivals"), [(1, 0, 1), (0, 0, 2), (0, 1, 1)])
def test_the_embedding_arrives_again_only_if_its_weights_are_needed_and_gone(
    lookup: bool, tied: bool, arrivals: int
) -> None:
    shape = replace(shape_of(3, 1, slots=2, slabs=0, kept=0), lookup=bool(lookup), tied=bool(tied))
    ops = build_schedule(shape)
    check_schedule(ops, shape)
    assert sum(op.kind is Kind.STREAM_IN and op.layer == 0 for op in ops) == arrivals


def test_an_update_that_needs_the_one_before_waits_for_it() -> None:
    """The order of their lane is not enough; on any other lane it is."""
    one, two = Buffer("weights", 0), Buffer("weights", 1)
    for kind, waits in ((Kind.UPDATE, (Event("updated", one),)), (Kind.FORWARD, ())):
        ops = add_waits([Op(kind, 0, writes=(one,)), Op(kind, 1, reads=(one,), writes=(two,))])
        assert ops[1].waits == waits


def test_with_one_slot_nothing_is_fetched_ahead() -> None:
    ops = build_schedule(shape_of(2, 1, slots=1, slabs=1, kept=0))
    body = [op for op in ops if op.layer in (1, 2)]
    kinds = [op.kind for op in body if op.kind in (Kind.STREAM_IN, Kind.FORWARD)]
    assert kinds[:4] == [Kind.STREAM_IN, Kind.FORWARD] * 2


def test_the_schedule_of_one_layer_reads_as_it_runs() -> None:
    shape = PipelineShape(3, 1, num_slots=2, num_slabs=0, pieces=(1, 1, 1))
    assert schedule_text(build_schedule(shape)) == (
        """\
stream_in  stream_in  layer 0            waits updated[weights 0] -> weights_ready[slot 2]
compute    forward    layer 0 mb 0       waits weights_ready[slot 2] -> buffer_free[slot 2]
stream_in  stream_in  layer 2            waits buffer_free[slot 2], updated[weights 2]
stream_in  stream_in  layer 1            waits updated[weights 1] -> weights_ready[slot 0]
compute    forward    layer 1 mb 0       waits weights_ready[slot 0]
compute    loss       layer 2 mb 0       \
-> backward_done[device_gradient 0], buffer_free[slot 2]
stream_out stream_out layer 2            waits backward_done[device_gradient 0] \
-> grads_out[device_gradient 0]
stream_in  stream_in  layer 0            waits buffer_free[slot 2] -> weights_ready[slot 2]
compute    recompute  layer 1 mb 0
compute    backward   layer 1 mb 0       -> backward_done[device_gradient 1]
stream_out stream_out layer 1            waits backward_done[device_gradient 1]
compute    backward   layer 0 mb 0       waits weights_ready[slot 2], grads_out[device_gradient 0] \
-> backward_done[device_gradient 0]
stream_out stream_out layer 0            waits backward_done[device_gradient 0] \
-> grads_out[gradient 0]
compute    report                        -> totals_ready[totals 0]
host       clip                          waits totals_ready[totals 0] -> clipped[coefficient 0]
update     update     layer 0            waits clipped[coefficient 0], grads_out[gradient 0] \
-> updated[weights 0]
update     update     layer 2            -> updated[weights 2]
update     update     layer 1            -> updated[weights 1]"""
    )
