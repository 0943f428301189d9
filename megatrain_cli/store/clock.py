"""Who may touch which tile when: the one place where loader, updates and saver meet.

[Note: The window of a snapshot]
A tile's weights and moments change in its update alone. So a snapshot of step `s` may read the
tile at any time from the end of the update of `s` to the beginning of that of `s + 1`, and a
gradient that still waits for its update is as still. `begin_update` is the only gate: it keeps the
next update out while a snapshot needs the tile. Forward and backward only read.

A tile that a snapshot holds is *queued*, then being *written*, then *saved*. An update that wants a
queued tile may have it *copied* first, if the snapshot has room, and goes on at once. One that has
to wait for a tile which is being written uses the time to have those copied that come next.
"""

import threading
import time
from collections.abc import Callable, Sequence

from megatrain_cli.errors import InternalError, MixedStateError
from megatrain_cli.store.hold import Hold, HoldCancelled, HoldState, Room


class TileClock:
    """Counts the updates of each layer, and makes threads wait for each other.

    Args:
        names: Of the layers, for messages.
        step: Updates that all layers have had.
    """

    def __init__(self, names: Sequence[str], step: int = 0) -> None:
        self._names = tuple(names)
        # Guards all below. Nobody waits for anything else, or does work, while holding it.
        self._changed = threading.Condition(threading.Lock())
        self._steps = [step] * len(self._names)
        self._weights_there = [True] * len(self._names)
        self._state_there = [True] * len(self._names)
        self._updating: set[int] = set()
        self._torn: set[int] = set()  # half updated, for good
        self._settled = False
        self._failure: BaseException | None = None
        self._refusal: BaseException | None = None
        self._hold: Hold | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Updates that each layer has had."""
        with self._changed:
            return tuple(self._steps)

    def step_of(self, layer: int) -> int:
        """Updates that a layer has had."""
        return self.steps[layer]

    @property
    def loaded(self) -> bool:
        """Whether weights and state of all layers are there."""
        with self._changed:
            return all(self._state_there) and all(self._weights_there)

    @property
    def torn(self) -> bool:
        """Whether an update has begun and has not ended, or has failed."""
        with self._changed:
            return bool(self._torn or self._updating)

    def set_steps(self, steps: Sequence[int]) -> None:
        """Say how many updates each layer has had, before the first one of this run."""
        with self._changed:
            self._steps[:] = steps

    # The loader's side.

    def await_arrival(self) -> None:
        """Nothing is there yet: a loader will say what has arrived."""
        with self._changed:
            self._weights_there[:] = [False] * len(self._names)
            self._state_there[:] = [False] * len(self._names)
            self._failure = None  # of a loader before

    def weights_arrived(self, layer: int) -> None:
        """A layer's weights are in its tile, and are right."""
        with self._changed:
            self._weights_there[layer] = True
            self._changed.notify_all()

    def state_arrived(self, layer: int, step: int) -> None:
        """The rest of a layer's tile is there too, as `step` updates left it."""
        with self._changed:
            self._steps[layer] = step
            self._state_there[layer] = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The loader failed: whoever waits for anything gets its error, now and later."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def wait_for_weights(self, layer: int) -> None:
        """Return when a layer's weights are there. Raises what the loader failed with."""
        self._wait_for(self._weights_there, layer)

    def wait_for_state(self, layer: int) -> None:
        """Return when the state is there besides. Raises what the loader failed with."""
        self._wait_for(self._weights_there, layer)
        self._wait_for(self._state_there, layer)

    # The updates' side.

    def begin_update(self, layer: int) -> None:
        """Return when a layer's tile may be changed: it is there, and no snapshot needs it.

        Every call that returns is followed by `end_update` or `fail_update`.

        Raises:
            Exception: What the loader failed with, or what `refuse_updates` was given.
        """
        self.wait_for_state(layer)
        with self._changed:
            began = time.perf_counter()
            kept_by = None
            while self._refusal is None and (hold := self._keeper(layer)) is not None:
                kept_by = hold
                found = self._copy_for(hold, layer)
                if found is None:
                    self._changed.wait()
                else:
                    self._copy(hold, *found)
            if kept_by is not None:
                kept_by.stall_seconds += time.perf_counter() - began
            if self._refusal is not None:
                raise self._refusal
            if self._settled:
                raise InternalError(f"An update of {self._names[layer]} after the last one.")
            self._updating.add(layer)

    def end_update(self, layer: int, step: int) -> None:
        """A layer's update of `step` has ended, all of it."""
        with self._changed:
            self._updating.remove(layer)
            self._steps[layer] = step
            self._changed.notify_all()

    def fail_update(self, layer: int) -> None:
        """A layer's update has failed half-way: its tile belongs to no step any more."""
        with self._changed:
            self._updating.discard(layer)
            self._torn.add(layer)
            self._changed.notify_all()

    def refuse_updates(self, error: BaseException) -> None:
        """From now on no update begins: `begin_update` raises `error`. Those begun may end."""
        with self._changed:
            self._refusal = error
            self._changed.notify_all()

    def settle(self) -> None:
        """No update is under way and none will come, as when the lanes are closed.

        One that has begun and not ended never will: its tile is torn.
        """
        with self._changed:
            self._settled = True
            self._torn |= self._updating
            self._updating.clear()
            self._changed.notify_all()

    # The saver's side.

    def hold(
        self,
        step: int,
        *,
        pending: bool = False,
        room: Room | None = None,
        order: Sequence[int] = (),
    ) -> Hold:
        """Claim all tiles as they are after the update of `step`; there is one hold at a time.

        Args:
            step: Updates that are still under way, or to come, are waited for by `acquire`.
            pending: Layers whose update of `step` has not begun are claimed as they are before it.
            room: Where updates may have tiles copied to.
            order: Layers in the order of the next updates; without it none is copied ahead.

        Raises:
            MixedStateError: A tile cannot be of that step any more.
        """
        with self._changed:
            if self._hold is not None:
                raise InternalError("Two snapshots hold the tiles.")
            if pending and not all(self._state_there):
                raise InternalError("A pending update can be saved only once all is loaded.")
            steps = []
            for layer, at in enumerate(self._steps):
                waits = pending and at == step - 1 and layer not in self._updating
                steps.append(step - 1 if waits else step)
            hold = Hold(tuple(steps), room, order)
            for layer in range(len(steps)):
                self._check(hold, layer)
            self._hold = hold
            return hold

    def acquire(self, hold: Hold, layer: int) -> bool:
        """Return when a layer's tile, or a copy of it, may be read, until `release`.

        Returns:
            Whether it is the copy that must be read.

        Raises:
            HoldCancelled: By `cancel`.
            MixedStateError: The tile is of another step, and will not be of the one that is held.
        """
        with self._changed:
            while True:
                if hold.cancelled:
                    raise HoldCancelled
                if self._failure is not None:
                    raise self._failure
                state = hold.states[layer]
                if state is HoldState.COPIED:
                    return True
                if state is not HoldState.COPYING:
                    self._check(hold, layer)
                    if self._is_at(layer, hold.steps[layer]):
                        hold.states[layer] = HoldState.WRITING
                        return False
                self._changed.wait()

    def release(self, hold: Hold, layer: int) -> None:
        """A layer is saved; the room of its copy, if there was one, is free again."""
        with self._changed:
            hold.states[layer] = HoldState.SAVED
            self._changed.notify_all()

    def renew(self, hold: Hold, forget: Callable[[], None]) -> bool:
        """Queue all tiles again, for a second try; False if one of them has moved on.

        Args:
            hold: Whose tiles; none of them is being written.
            forget: Called, under the lock, when they are queued: frees all room of copies.
        """
        with self._changed:
            self._wait_for_copies(hold)
            if not all(self._is_at(layer, step) for layer, step in enumerate(hold.steps)):
                return False
            hold.states = [HoldState.QUEUED] * len(hold.steps)
            forget()
            return True

    def cancel(self, hold: Hold) -> None:
        """Tell the hold's owner to stop; it still has to `drop` the hold."""
        with self._changed:
            hold.cancelled = True
            self._changed.notify_all()

    def drop(self, hold: Hold) -> None:
        """Let go of all tiles; returns when no copy is being made any more."""
        with self._changed:
            self._wait_for_copies(hold)
            if self._hold is hold:
                self._hold = None
            self._changed.notify_all()

    def _wait_for(self, there: list[bool], layer: int) -> None:
        with self._changed:
            while not there[layer] and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def _keeper(self, layer: int) -> Hold | None:
        """The hold that keeps a layer from being updated, if one does."""
        hold = self._hold
        if hold is None or self._steps[layer] != hold.steps[layer]:
            return None  # it holds the tile as the update that asks will leave it
        return None if hold.states[layer] in (HoldState.COPIED, HoldState.SAVED) else hold

    def _copy_for(self, hold: Hold, layer: int) -> tuple[int, Callable[[], None]] | None:
        """What an update that `hold` keeps from a layer can copy: that layer, or one behind it."""
        if hold.room is None:
            return None
        queued = [layer] if hold.states[layer] is HoldState.QUEUED else hold.order
        for one in queued:
            if hold.states[one] is HoldState.QUEUED and self._is_at(one, hold.steps[one]):
                copy = hold.room(one, hold.steps[one])
                if copy is not None:
                    return one, copy
        return None

    def _copy(self, hold: Hold, layer: int, copy: Callable[[], None]) -> None:
        """Make a copy without the lock, under which this is called."""
        hold.states[layer] = HoldState.COPYING
        self._changed.release()
        state = HoldState.QUEUED
        try:
            copy()
            state = HoldState.COPIED
        finally:
            self._changed.acquire()
            hold.states[layer] = state
            self._changed.notify_all()

    def _wait_for_copies(self, hold: Hold) -> None:
        while HoldState.COPYING in hold.states:
            self._changed.wait()

    def _is_at(self, layer: int, step: int) -> bool:
        """Whether all of a tile is there, as `step` updates left it."""
        there = self._weights_there[layer] and self._state_there[layer]
        still = layer not in self._updating and layer not in self._torn
        return there and still and self._steps[layer] == step

    def _check(self, hold: Hold, layer: int) -> None:
        """Refuse a layer that cannot come to the step at which it is held."""
        at, wanted = self._steps[layer], hold.steps[layer]
        moving = layer in self._updating
        if layer in self._torn:
            reason = f"{self._names[layer]} was left in the middle of an update"
        elif at > wanted or (at == wanted and moving) or (self._settled and at < wanted):
            reason = f"{self._names[layer]} has had {at + moving} updates, not {wanted}"
        else:
            return
        raise MixedStateError(
            f"The layers in memory belong to no one step: {reason}. Nothing of them is saved; go "
            "on from the last checkpoint."
        )
