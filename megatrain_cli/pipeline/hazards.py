"""Derive the waits of a schedule from what its ops read and write.

Two ops conflict when they touch one buffer and at least one writes it. Conflicting ops on
different lanes must be ordered, and an event is the only thing that orders lanes. Walking the list
with vector clocks (Mattern, "Virtual Time and Global States of Distributed Systems", 1989), an op
gets a wait only where its lane's history and its other waits do not imply the order already. So
no wait is missing and none is idle.

What a lane's history implies differs on the update lane, see [Note: The update lane] in
`pipeline/ops.py`: an op that begins there knows what those before it had waited for, not that they
have ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatrain_cli.errors import InternalError
from megatrain_cli.pipeline.ops import Buffer, Event, Kind, Lane, Op

# What has happened to a buffer, once an op of this kind is done with it.
EVENT_NAMES = {
    (Kind.STREAM_IN, "slot"): "weights_ready",
    (Kind.FORWARD, "slot"): "buffer_free",
    (Kind.LOSS, "slot"): "buffer_free",
    (Kind.SCORE, "slot"): "buffer_free",
    (Kind.BACKWARD, "slot"): "buffer_free",
    (Kind.LOSS, "device_gradient"): "backward_done",
    (Kind.BACKWARD, "device_gradient"): "backward_done",
    (Kind.STREAM_OUT, "device_gradient"): "grads_out",
    (Kind.STREAM_OUT, "slab"): "grads_out",
    (Kind.STREAM_OUT, "gradient"): "grads_out",
    (Kind.ACCUMULATE, "slab"): "slab_free",
    (Kind.UPDATE, "slab"): "slab_free",
    (Kind.UPDATE, "weights"): "updated",
    (Kind.UPDATE, "gradient"): "updated",
    (Kind.REPORT, "totals"): "totals_ready",
    (Kind.CLIP, "totals"): "totals_read",
    (Kind.TELL, "totals"): "totals_read",
    (Kind.UPDATE, "totals"): "totals_read",
    (Kind.CLIP, "coefficient"): "clipped",
    (Kind.FORWARD, "ring"): "input_ready",
    (Kind.OFFLOAD, "ring"): "input_offloaded",
    (Kind.OFFLOAD, "host_input"): "input_offloaded",
    (Kind.FETCH, "ring"): "input_fetched",
    (Kind.BACKWARD, "ring"): "input_free",
}

LANES = tuple(Lane)
Clock = list[int]


def join(clock: Clock, other: Clock) -> None:
    """Learn everything `other` knows, in place."""
    for i, count in enumerate(other):
        clock[i] = max(clock[i], count)


@dataclass
class Touches:
    """Who wrote a buffer last, and who has read it since: positions in the list of ops."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)

    def before_read(self) -> list[int]:
        """Ops that a new reader must follow."""
        return [] if self.writer is None else [self.writer]

    def before_write(self) -> list[int]:
        """Ops that a new writer must follow."""
        return [*self.before_read(), *self.readers]


def add_waits(step: Sequence[Op]) -> tuple[Op, ...]:
    """The same ops with the waits and records that order every conflict, across steps too.

    Two steps are walked, one after the other; the waits of the second are the steady state's.
    """
    waits, records = _derive([*step, *step])
    size = len(step)
    return tuple(
        _told(op, waits[size + i], records[i] | records[size + i]) for i, op in enumerate(step)
    )


def add_waits_between(
    step: Sequence[Op], between: Sequence[Op]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The ops of a step, and others that come, once or more, behind some step.

    The step's waits are those of `add_waits`: before the next step begins, all that came between
    must have ended. Its records are those, and what the others wait for besides.
    """
    waits, records = _derive([*step, *step, *between, *between])
    size, again, behind = len(step), 2 * len(step), 2 * len(step) + len(between)
    return tuple(
        _told(op, waits[size + i], records[i] | records[size + i]) for i, op in enumerate(step)
    ), tuple(
        # Each time it may be the first one behind a step, or not.
        _told(op, [*waits[again + i], *waits[behind + i]], records[again + i] | records[behind + i])
        for i, op in enumerate(between)
    )


def _told(op: Op, waits: Sequence[Event], records: set[Event]) -> Op:
    return replace(op, waits=tuple(dict.fromkeys(waits)), records=tuple(sorted(records)))


def _derive(ops: Sequence[Op]) -> tuple[list[list[Event]], list[set[Event]]]:
    """Of each op, what it must wait for, and what it must record for those behind it."""
    clocks: list[Clock] = []  # of each op: all that has ended once it has
    begun: dict[Lane, Clock] = {lane: [0] * len(LANES) for lane in LANES}
    ended: dict[Lane, Clock] = {lane: [0] * len(LANES) for lane in LANES}
    touched: dict[Buffer, Touches] = {}
    waits: list[list[Event]] = []
    records: list[set[Event]] = [set() for _ in ops]
    for position, op in enumerate(ops):
        lane = LANES.index(op.lane)
        clock = begun[op.lane]
        waits.append([])
        for earlier, buffer in sorted(_conflicts(op, touched), reverse=True):
            other = ops[earlier]
            other_lane = LANES.index(other.lane)
            if clock[other_lane] >= clocks[earlier][other_lane]:
                continue  # ordered already
            event = _event(other, buffer)
            waits[-1].append(event)
            records[earlier].add(event)
            join(clock, clocks[earlier])
        join(ended[op.lane], clock)
        ended[op.lane][lane] += 1
        clocks.append(list(ended[op.lane]))
        if op.lane is not Lane.UPDATE:
            join(clock, ended[op.lane])
        for buffer in op.reads:
            touched.setdefault(buffer, Touches()).readers.append(position)
        for buffer in op.writes:
            touched[buffer] = Touches(writer=position)
    return waits, records


def _conflicts(op: Op, touched: dict[Buffer, Touches]) -> set[tuple[int, Buffer]]:
    """Earlier ops, by position, that this one must follow, each with the buffer they share."""
    found = set()
    for buffer in op.reads:
        if buffer in touched:
            found |= {(earlier, buffer) for earlier in touched[buffer].before_read()}
    for buffer in op.writes:
        if buffer in touched:
            found |= {(earlier, buffer) for earlier in touched[buffer].before_write()}
    return found


def _event(op: Op, buffer: Buffer) -> Event:
    try:
        return Event(EVENT_NAMES[op.kind, buffer.kind], buffer)
    except KeyError:
        raise InternalError(f"no event says that {op.kind} is done with {buffer}") from None
