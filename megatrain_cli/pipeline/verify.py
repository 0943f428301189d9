"""Prove a schedule: no race, the right memory for every op, everything done exactly once.

Independent of how a schedule was built. Three steps are walked in a row, so that what one step
leaves behind for the next is proved too. Happened-before is tracked with vector clocks (Mattern,
1989): lanes are processes, events are messages. The update lane is held to less than the others
promise: its ops may overlap ([Note: The update lane] in `pipeline/ops.py`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline.ops import Buffer, Event, Kind, Lane, Op
from megatrain_cli.pipeline.shape import PipelineShape

STEPS = 3
_What = tuple[Kind, int, int | None, int | None]  # kind, layer, micro-batch, piece
_LANE_INDEX = {lane: i for i, lane in enumerate(Lane)}


class ScheduleError(InternalError):
    """The schedule would race, or compute something else than what it is for."""


def check_schedule(ops: Sequence[Op], shape: PipelineShape) -> None:
    """Raise `ScheduleError` unless the ops are one exact, race-free optimizer step."""
    _check_counts(ops, shape)
    _check_contents(ops, shape)
    _check_races([ops] * STEPS)


def check_evaluation(step: Sequence[Op], ops: Sequence[Op], shape: PipelineShape) -> None:
    """Raise `ScheduleError` unless the ops are one exact evaluation that may come between steps.

    Args:
        step: A proved step; the next one is issued when `TELL` has ended.
        ops: The evaluation, which may come before all steps, and several times in a row.
        shape: Of both.
    """
    _check_evaluation_counts(ops, shape)
    _check_contents(ops, shape)
    _check_races([ops, ops, step, step, ops, step, ops, ops, step])


def _check_races(parts: Sequence[Sequence[Op]]) -> None:
    recorded = {event for ops in parts for op in ops for event in op.records}
    begun = [(0,) * len(Lane) for _ in Lane]  # what each lane knows when its next op begins
    ended = [(0,) * len(Lane) for _ in Lane]  # what its latest op's record says has ended
    told = (0,) * len(Lane)  # what the end of the latest evaluation says has ended
    events: dict[Event, tuple[int, ...]] = {}
    writer: dict[Buffer, tuple[int, int, Op]] = {}  # lane, count on that lane, op
    readers: dict[Buffer, dict[int, tuple[int, Op]]] = {}  # the latest of each lane

    for op, begins_step in _in_order(parts):
        if begins_step:  # it is issued by who waited for the evaluation before it
            begun = [tuple(map(max, known, told)) for known in begun]
        lane = _LANE_INDEX[op.lane]
        clock = begun[lane]
        for event in op.waits:
            if event in events:
                clock = tuple(map(max, clock, events[event]))
            elif event not in recorded:
                raise ScheduleError(f"{_name(op)} waits for {event}, which nothing records")
        for buffer in (*op.reads, *op.writes):
            if buffer in writer:
                other_lane, other_count, other = writer[buffer]
                if clock[other_lane] < other_count:
                    raise ScheduleError(f"{_name(op)} races with {_name(other)} for {buffer}")
        count = ended[lane][lane] + 1
        after = tuple(map(max, clock, ended[lane]))
        after = (*after[:lane], count, *after[lane + 1 :])
        for buffer in op.writes:
            for other_lane, (other_count, other) in readers.pop(buffer, {}).items():
                if clock[other_lane] < other_count:
                    raise ScheduleError(f"{_name(op)} overwrites {buffer} under {_name(other)}")
            writer[buffer] = (lane, count, op)
        for buffer in op.reads:
            readers.setdefault(buffer, {})[lane] = (count, op)
        for event in op.records:
            events[event] = after
        ended[lane] = after
        begun[lane] = clock if op.lane is Lane.UPDATE else after
        if op.kind is Kind.TELL:
            told = after


def _in_order(parts: Sequence[Sequence[Op]]) -> Iterator[tuple[Op, bool]]:
    """All ops, and whether a step begins with one."""
    for ops in parts:
        is_step = all(op.kind is not Kind.TELL for op in ops)
        for position, op in enumerate(ops):
            yield op, is_step and position == 0


def _check_contents(ops: Sequence[Op], shape: PipelineShape) -> None:
    """Every op finds in each buffer what it needs: the right layer, micro-batch and piece.

    And says so: a buffer that an op touches without naming it would be in no race.
    """
    holds: dict[Buffer, object] = {}
    complete: set[int] = set()
    landed: Counter[int] = Counter()  # pieces of each layer's gradient in its tile
    scored = 0  # micro-batches of an evaluation

    def expect(op: Op, buffer: Buffer, content: object) -> None:
        """The op works on what the buffer holds."""
        if holds.get(buffer) != content:
            raise ScheduleError(
                f"{_name(op)} needs {content} in {buffer}, which holds {holds.get(buffer)}"
            )
        named(op, buffer, (*op.reads, *op.writes))

    def leave(op: Op, buffer: Buffer, content: object) -> None:
        """The op fills the buffer."""
        named(op, buffer, op.writes)
        holds[buffer] = content

    def named(op: Op, buffer: Buffer, touched: tuple[Buffer, ...]) -> None:
        if buffer not in touched:
            raise ScheduleError(f"{_name(op)} touches {buffer} and does not say so")

    for op in ops:
        mb = op.micro_batch or 0
        content = ("input", op.layer, mb)
        above = Buffer("output_gradient", 0, mb)
        gradient = Buffer("gradient", op.layer)
        if op.kind in (Kind.FORWARD, Kind.LOSS, Kind.SCORE, Kind.RECOMPUTE, Kind.BACKWARD):
            if not (shape.lookup and op.kind is Kind.BACKWARD and op.layer == 0):
                expect(op, _one(op, "slot", op.reads), op.layer)
            if op.layer > 0:
                expect(op, shape.input_of(op.layer, mb), content)
        match op.kind:
            case Kind.STREAM_IN:
                leave(op, _one(op, "slot", op.writes), op.layer)
                if set(op.reads) != set(_weights(op.layer, shape)):
                    raise ScheduleError(f"{_name(op)} does not read just the layer's weights")
            case Kind.FORWARD:
                leave(op, shape.input_of(op.layer + 1, mb), ("input", op.layer + 1, mb))
            case Kind.OFFLOAD:
                expect(op, shape.input_of(op.layer, mb), content)
                leave(op, Buffer("host_input", op.layer, mb), content)
            case Kind.FETCH:
                expect(op, Buffer("host_input", op.layer, mb), content)
                leave(op, shape.input_of(op.layer, mb), content)
            case Kind.LOSS | Kind.SCORE:
                if shape.tied:
                    expect(op, Buffer("slot", shape.end_slot(0)), 0)
                if op.kind is Kind.LOSS:
                    leave(op, above, op.layer)
                else:
                    scored += 1
            case Kind.BACKWARD:
                expect(op, above, op.layer + 1)
                leave(op, above, op.layer)
            case Kind.STREAM_OUT:
                expect(op, _one(op, "device_gradient", op.reads), ("gradient", op.layer))
                if shape.num_slabs:
                    leave(op, _one(op, "slab", op.writes), (op.layer, op.piece))
                else:
                    landed[op.layer] += 1
                    leave(op, gradient, landed[op.layer])
            case Kind.ACCUMULATE:
                expect(op, _one(op, "slab", op.reads), (op.layer, op.piece))
                landed[op.layer] += 1
                leave(op, gradient, landed[op.layer])
            case Kind.UPDATE:
                leave(op, Buffer("weights", op.layer, op.piece or 0), "updated")
                if shape.eager:
                    expect(op, _one(op, "slab", op.reads), (op.layer, op.piece))
                else:
                    expect(op, gradient, shape.pieces[op.layer])
                    expect(op, Buffer("totals"), "all")
                    expect(op, Buffer("coefficient"), "all")
            case Kind.REPORT:
                if len(complete) != shape.num_layers and scored != shape.num_micro_batches:
                    raise ScheduleError(f"{_name(op)} comes before all is complete")
                leave(op, Buffer("totals"), "all")
            case Kind.CLIP:
                expect(op, Buffer("totals"), "all")
                leave(op, Buffer("coefficient"), "all")
            case Kind.TELL:
                expect(op, Buffer("totals"), "all")
            case Kind.RECOMPUTE:
                pass  # leaves nothing that another op looks for in a buffer
        if op.last:
            complete.add(op.layer)
            leave(op, _one(op, "device_gradient", op.writes), ("gradient", op.layer))


def _check_counts(ops: Sequence[Op], shape: PipelineShape) -> None:
    """Each layer and micro-batch once forward, once back; each gradient out once; one update."""
    micro_batches = range(shape.num_micro_batches)
    layers = range(shape.num_layers)
    body = range(shape.head)
    wanted: Counter[_What] = Counter(
        [(Kind.FORWARD, i, mb, None) for i in body for mb in micro_batches]
        + [
            (Kind.RECOMPUTE, i, mb, None)
            for i in body[1:]  # the embedding's graph is always kept
            for mb in micro_batches
            if i not in shape.kept
        ]
        + [(Kind.BACKWARD, i, mb, None) for i in body for mb in micro_batches]
        + [(Kind.LOSS, shape.head, mb, None) for mb in micro_batches]
        + [(Kind.REPORT, -1, None, None), (Kind.CLIP, -1, None, None)]
    )
    pieces: list[tuple[int, int | None]] = [
        (i, p) for i in layers for p in (range(shape.pieces[i]) if shape.num_slabs else [None])
    ]
    wanted += Counter((Kind.STREAM_OUT, i, None, p) for i, p in pieces)
    if shape.eager:
        wanted += Counter((Kind.UPDATE, i, None, p) for i, p in pieces)
    else:
        wanted += Counter((Kind.UPDATE, i, None, None) for i in layers)
        if shape.num_slabs:
            wanted += Counter((Kind.ACCUMULATE, i, None, p) for i, p in pieces)
    moves = (Kind.STREAM_IN, Kind.OFFLOAD, Kind.FETCH)
    _compare(ops, moves, wanted, "step")


def _check_evaluation_counts(ops: Sequence[Op], shape: PipelineShape) -> None:
    """Each layer and micro-batch once forward; nothing else but weights on their way in."""
    micro_batches = range(shape.num_micro_batches)
    wanted: Counter[_What] = Counter(
        [(Kind.FORWARD, i, mb, None) for i in range(shape.head) for mb in micro_batches]
        + [(Kind.SCORE, shape.head, mb, None) for mb in micro_batches]
        + [(Kind.REPORT, -1, None, None), (Kind.TELL, -1, None, None)]
    )
    _compare(ops, (Kind.STREAM_IN,), wanted, "evaluation")


def _compare(ops: Sequence[Op], moves: Sequence[Kind], wanted: Counter[_What], what: str) -> None:
    found = Counter(
        (op.kind, op.layer, op.micro_batch, op.piece) for op in ops if op.kind not in moves
    )
    if found != wanted:
        missing, extra = wanted - found, found - wanted
        raise ScheduleError(f"not one {what}: missing {dict(missing)}, too many {dict(extra)}")


def _weights(layer: int, shape: PipelineShape) -> list[Buffer]:
    """All of a layer's weights: eager updates write them piece by piece."""
    pieces = shape.pieces[layer] if shape.eager else 1
    return [Buffer("weights", layer, piece) for piece in range(pieces)]


def _one(op: Op, kind: str, touched: tuple[Buffer, ...]) -> Buffer:
    """The buffer of a kind whose number is the schedule's choice; of several, the first."""
    for buffer in touched:
        if buffer.kind == kind:
            return buffer
    raise ScheduleError(f"{_name(op)} names no {kind}")


def _name(op: Op) -> str:
    part = "" if op.micro_batch is None else f" mb {op.micro_batch}"
    return f"{op.kind} of layer {op.layer}{part}"
