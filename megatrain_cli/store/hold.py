"""A snapshot's claim on the tiles of a store; `TileClock` makes it and keeps to it."""

from collections.abc import Callable, Sequence
from enum import Enum, auto

Room = Callable[[int, int], Callable[[], None] | None]
"""Finds room for a copy of a layer's tile, given the layer and the step that it is held at: what
makes the copy, or None. Called under the clock's lock, so it must be quick and must not call the
clock; what it returns is called without the lock. Room that is given back must be announced by
`TileClock.release`."""


class HoldCancelled(Exception):  # noqa: N818  not a fault: the saver is told to stop
    """The hold was cancelled by `TileClock.cancel`."""


class HoldState(Enum):
    """How far the saving of one tile has come."""

    QUEUED = auto()
    COPYING = auto()
    COPIED = auto()
    WRITING = auto()
    SAVED = auto()


class Hold:
    """A snapshot's claim on all tiles, made by `TileClock.hold`.

    Attributes:
        steps: The step that each layer's tile is to be saved at, by layer.
        order: Layers in the order in which updates will come to them.
        room: Where updates may have tiles copied to.
        states: Of each layer; guarded by the clock's lock, as all of this.
        cancelled: Whether it is to stop.
        stall_seconds: How long updates have been kept waiting by it, copies included.
    """

    def __init__(
        self, steps: tuple[int, ...], room: Room | None, order: Sequence[int] = ()
    ) -> None:
        self.steps, self.order = steps, tuple(order)
        self.cancelled = False
        self.stall_seconds = 0.0
        self.room = room
        self.states = [HoldState.QUEUED] * len(steps)
