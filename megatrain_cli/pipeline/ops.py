"""One optimizer step as plain data: what runs, on which lane, touching which memory.

[Note: Lanes and events]
Ops of one lane run in the order of the list. Lanes know nothing of each other except through
events: an op *waits* for the latest earlier record of each event that it names; an event that was
never recorded counts as done, since all memory is free before the first step. The list repeats
every step, so a wait may refer to an op of the step before.

[Note: The update lane]
Ops of the update lane begin in the order of the list and count as ended in that order, but they may
overlap: one begins when the one before has *begun*, so that the optimizer never waits between two
layers. Its record says that it and all before it have ended. Whatever needs the end of an update
must wait for that record, the next op of the same lane too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Lane(StrEnum):
    """Where an op runs. The first three are CUDA streams, the others belong to the host."""

    STREAM_IN = "stream_in"
    COMPUTE = "compute"
    STREAM_OUT = "stream_out"
    HOST = "host"
    UPDATE = "update"  # see [Note: The update lane]


class Kind(StrEnum):
    """What an op does."""

    STREAM_IN = "stream_in"  # host tile -> staging buffer (slot)
    FORWARD = "forward"  # one layer, one micro-batch
    LOSS = "loss"  # the head: forward, loss and its backward, chunk by chunk
    SCORE = "score"  # of an evaluation: the head's forward and loss
    RECOMPUTE = "recompute"  # forward again, this time with a graph
    BACKWARD = "backward"  # one layer, one micro-batch
    STREAM_OUT = "stream_out"  # gradient buffer -> slab, or straight into the tile
    ACCUMULATE = "accumulate"  # slab -> the tile's gradient
    REPORT = "report"  # the step's loss and norm partials, device -> host
    OFFLOAD = "offload"  # a layer's input, device -> host
    FETCH = "fetch"  # a layer's input, host -> device
    CLIP = "clip"  # loss and global norm are on the host: check them, find the coefficient
    TELL = "tell"  # of an evaluation: its loss is on the host: note it
    UPDATE = "update"  # one layer's optimizer step


LANE_OF = {
    Kind.STREAM_IN: Lane.STREAM_IN,
    Kind.FETCH: Lane.STREAM_IN,
    Kind.FORWARD: Lane.COMPUTE,
    Kind.LOSS: Lane.COMPUTE,
    Kind.SCORE: Lane.COMPUTE,
    Kind.RECOMPUTE: Lane.COMPUTE,
    Kind.BACKWARD: Lane.COMPUTE,
    Kind.REPORT: Lane.COMPUTE,
    Kind.STREAM_OUT: Lane.STREAM_OUT,
    Kind.OFFLOAD: Lane.STREAM_OUT,
    Kind.ACCUMULATE: Lane.HOST,
    Kind.CLIP: Lane.HOST,
    Kind.TELL: Lane.HOST,
    Kind.UPDATE: Lane.UPDATE,
}


# Of each kind, in a picture of a step.
LETTERS: dict[str, str] = {
    Kind.STREAM_IN: "i",
    Kind.FETCH: "f",
    Kind.FORWARD: "F",
    Kind.LOSS: "L",
    Kind.SCORE: "S",
    Kind.RECOMPUTE: "R",
    Kind.BACKWARD: "B",
    Kind.REPORT: "r",
    Kind.STREAM_OUT: "o",
    Kind.OFFLOAD: "x",
    Kind.ACCUMULATE: "a",
    Kind.CLIP: "c",
    Kind.TELL: "t",
    Kind.UPDATE: "U",
}


class Buffer(NamedTuple):
    """A piece of memory that ops share, such as `slot 1` or `input 3.1` (layer 3, micro-batch 1).

    Kinds: `weights` and `gradient` are a tile's, by layer, and the weights of eager updates by
    layer and piece; `slot` a device staging buffer; `device_gradient` a device buffer that holds
    one layer's gradient; `slab` pinned host room for a piece and its layer's norm; `input` a
    layer's input, kept in a buffer of its own; `ring` one of two input buffers that offloaded
    layers share; `host_input` an offloaded input; `output_gradient` dL/d(output); `totals` the
    step's loss and norm partials on the host; `coefficient` the clip coefficient.

    Attributes:
        part: Micro-batch or piece, where there is one buffer of each.
    """

    kind: str
    number: int = 0
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" + (f".{self.part}" if self.part else "")


class Event(NamedTuple):
    """Something that has happened to a buffer: `weights_ready[slot 1]`."""

    name: str
    buffer: Buffer

    def __str__(self) -> str:
        return f"{self.name}[{self.buffer}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work.

    Attributes:
        layer: Index into the model's layers; -1 for `REPORT`, `CLIP` and `TELL`.
        micro_batch: None for work done once a layer.
        piece: Which slab-sized piece of the layer's run; None where the run is moved whole.
        last: Whether this is the layer's last micro-batch: its gradient is then complete.
    """

    kind: Kind
    layer: int
    micro_batch: int | None = None
    piece: int | None = None
    last: bool = False
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    waits: tuple[Event, ...] = ()
    records: tuple[Event, ...] = ()

    @property
    def lane(self) -> Lane:
        """The lane that runs it."""
        return LANE_OF[self.kind]

    def buffer(self, kind: str) -> Buffer:
        """The buffer of that kind that the op touches; of several, its own layer's."""
        return next(b for b in (*self.writes, *self.reads) if b.kind == kind)

    def touches(self, kind: str) -> bool:
        """Whether the op touches a buffer of that kind."""
        return any(b.kind == kind for b in (*self.writes, *self.reads))


def schedule_text(ops: Iterable[Op]) -> str:
    """The schedule as one line an op, for people and for literal comparisons in tests."""
    lines = []
    for op in ops:
        where = f"layer {op.layer}" if op.layer >= 0 else ""
        where += f" mb {op.micro_batch}" if op.micro_batch is not None else ""
        where += f" piece {op.piece}" if op.piece is not None else ""
        waits = ", ".join(map(str, op.waits))
        records = ", ".join(map(str, op.records))
        lines.append(
            f"{op.lane:<10} {op.kind:<10} {where:<18}"
            + (f" waits {waits}" if waits else "")
            + (f" -> {records}" if records else "")
        )
    return "\n".join(line.rstrip() for line in lines)
