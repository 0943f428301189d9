"""A tile is never changed while a snapshot reads it, and nobody waits without need or for ever."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from megatrain_cli.errors import CorruptError, InternalError, MixedStateError
from megatrain_cli.store.clock import TileClock
from megatrain_cli.store.hold import Hold, HoldCancelled
from tests.scheduler import Watched

NAMES = ("embed", "layer-00000", "head")


@contextmanager
def asleep(clock: TileClock, call: Callable[[], object]) -> Iterator[Future[object]]:
    """`call` on a thread of its own, once it waits for the clock."""
    clock._changed = watched = Watched()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        assert watched.waits.acquire(timeout=60)
        assert not future.done()
        yield future
        future.exception(20)


def held(clock: TileClock, step: int, layer: int) -> Hold:
    """A hold whose `layer` is being written."""
    hold = clock.hold(step)
    assert not clock.acquire(hold, layer)
    return hold


def update(clock: TileClock, layer: int, step: int) -> None:
    clock.begin_update(layer)
    clock.end_update(layer, step)


def test_steps_are_counted_layer_by_layer() -> None:
    clock = TileClock(NAMES, 4)
    update(clock, 1, 5)
    assert clock.steps == (4, 5, 4)
    assert clock.step_of(1) == 5
    clock.set_steps((7, 7, 7))
    assert clock.steps == (7, 7, 7)


def test_weights_and_state_are_waited_for_each_by_itself() -> None:
    assert TileClock(NAMES).loaded
    clock = TileClock(NAMES)
    clock.await_arrival()
    with asleep(clock, lambda: clock.wait_for_weights(0)) as waiting:
        clock.weights_arrived(1)
        assert not waiting.done()
        clock.weights_arrived(0)
    with asleep(clock, lambda: clock.wait_for_state(0)) as waiting:
        clock.state_arrived(0, 12)
    clock.wait_for_weights(0)
    assert clock.step_of(0) == 12
    assert not clock.loaded
    for layer in (1, 2):
        clock.weights_arrived(layer)
        clock.state_arrived(layer, 12)
    assert clock.loaded


@pytest.mark.parametrize("wait", ["wait_for_weights", "wait_for_state", "begin_update"])
def test_a_loader_that_failed_raises_its_own_error_at_everybody_who_waits(wait: str) -> None:
    clock, error = TileClock(NAMES), CorruptError("a flipped byte")
    clock.await_arrival()
    with asleep(clock, lambda: getattr(clock, wait)(0)) as waiting:
        clock.fail(error)
        assert waiting.exception(20) is error
    clock.fail(CorruptError("a later one"))
    with pytest.raises(CorruptError) as found:
        getattr(clock, wait)(1)
    assert found.value is error
    clock.await_arrival()  # another checkpoint is tried
    clock.weights_arrived(0)
    clock.wait_for_weights(0)


def test_an_update_waits_for_its_state() -> None:
    clock = TileClock(NAMES)
    clock.await_arrival()
    clock.weights_arrived(0)
    with asleep(clock, lambda: clock.begin_update(0)) as waiting:
        clock.state_arrived(0, 3)
        waiting.result(20)
    clock.end_update(0, 4)
    assert clock.step_of(0) == 4


def test_the_next_update_waits_until_the_tile_is_saved_and_the_wait_is_counted() -> None:
    clock = TileClock(NAMES)
    hold = held(clock, 0, 1)
    with asleep(clock, lambda: clock.begin_update(1)):
        clock.release(hold, 1)
    assert hold.stall_seconds > 0


def test_the_update_that_a_snapshot_waits_for_is_not_kept_waiting() -> None:
    clock = TileClock(NAMES)
    hold = clock.hold(1)
    with asleep(clock, lambda: clock.acquire(hold, 0)) as waiting:
        clock.begin_update(0)
        assert not waiting.done()
        clock.end_update(0, 1)
        assert waiting.result(20) is False
    assert hold.stall_seconds == 0


def test_an_update_goes_on_once_its_tile_is_copied_and_the_copy_is_read() -> None:
    clock = TileClock(NAMES)
    copied: list[int] = []
    hold = clock.hold(0, room=lambda layer, step: lambda: copied.append(layer))
    update(clock, 2, 1)
    assert copied == [2]
    assert clock.acquire(hold, 2) is True
    clock.release(hold, 2)
    assert clock.acquire(hold, 1) is False


def test_an_update_takes_room_that_becomes_free_while_it_waits() -> None:
    clock, rooms = TileClock(NAMES), [0]
    copied: list[int] = []

    def room(layer: int, step: int) -> Callable[[], None] | None:
        return (lambda: copied.append(layer)) if rooms[0] else None

    hold = clock.hold(0, room=room)
    with asleep(clock, lambda: clock.begin_update(1)):
        clock.acquire(hold, 0)
        rooms[0] = 1
        clock.release(hold, 0)
    assert copied == [1]


def test_an_update_that_waits_has_the_layers_behind_it_copied_meanwhile() -> None:
    clock, left = TileClock(NAMES), [1]
    copied: list[int] = []

    def room(layer: int, step: int) -> Callable[[], None] | None:
        if not left[0]:
            return None
        left[0] -= 1
        return lambda: copied.append(layer)

    hold = clock.hold(0, room=room, order=(2, 1, 0))
    assert clock.acquire(hold, 2) is False
    with asleep(clock, lambda: clock.begin_update(2)):
        assert copied == [1]
        clock.release(hold, 2)
    update(clock, 1, 1)  # does not wait, though it is not saved
    assert clock.acquire(hold, 1) is True


def test_a_copy_that_fails_is_the_updates_failure_and_the_tile_stays_queued() -> None:
    clock = TileClock(NAMES)

    def broken() -> None:
        raise MemoryError("no pages")

    hold = clock.hold(0, room=lambda layer, step: broken)
    with pytest.raises(MemoryError):
        clock.begin_update(1)
    assert clock.acquire(hold, 1) is False


@pytest.mark.parametrize("moved", ["ended", "begun"])
def test_a_snapshot_of_a_step_that_a_layer_has_left_is_refused(moved: str) -> None:
    clock = TileClock(NAMES, 3)
    clock.begin_update(1)
    if moved == "ended":
        clock.end_update(1, 4)
    with pytest.raises(MixedStateError, match="layer-00000 has had 4 updates, not 3"):
        clock.hold(3)


def test_a_layer_left_in_the_middle_of_an_update_is_never_read() -> None:
    clock = TileClock(NAMES)
    hold = clock.hold(1)
    clock.begin_update(0)
    with asleep(clock, lambda: clock.acquire(hold, 0)) as waiting:
        clock.fail_update(0)
        assert isinstance(waiting.exception(20), MixedStateError)
    clock.drop(hold)
    for step in (0, 1):
        with pytest.raises(MixedStateError, match="embed was left in the middle of an update"):
            clock.hold(step)


def test_when_no_update_will_come_nobody_waits_for_one() -> None:
    clock = TileClock(NAMES)
    update(clock, 0, 1)
    hold = clock.hold(1)
    with asleep(clock, lambda: clock.acquire(hold, 1)) as waiting:
        clock.settle()
        assert isinstance(waiting.exception(20), MixedStateError)
    clock.drop(hold)
    with pytest.raises(MixedStateError, match="layer-00000 has had 0 updates, not 1"):
        clock.hold(1)
    with pytest.raises(InternalError, match="after the last one"):
        clock.begin_update(1)


def test_an_update_that_never_ended_is_torn_once_all_is_settled() -> None:
    clock = TileClock(NAMES)
    clock.begin_update(1)
    clock.settle()
    with pytest.raises(MixedStateError, match="in the middle"):
        clock.hold(0)


def test_updates_that_are_refused_do_not_begin_and_leave_the_tile_as_it_is() -> None:
    clock, error = TileClock(NAMES), RuntimeError("stop")
    clock.begin_update(0)
    clock.refuse_updates(error)
    clock.end_update(0, 1)
    with pytest.raises(RuntimeError, match="stop"):
        clock.begin_update(1)
    assert clock.steps == (1, 0, 0)


def test_updates_are_refused_while_they_wait_for_a_snapshot() -> None:
    clock = TileClock(NAMES)
    held(clock, 0, 0)
    with asleep(clock, lambda: clock.begin_update(0)) as waiting:
        clock.refuse_updates(RuntimeError("stop"))
        assert isinstance(waiting.exception(20), RuntimeError)


def test_a_pending_snapshot_takes_each_layer_before_or_after_its_update() -> None:
    clock = TileClock(NAMES, 4)
    update(clock, 2, 5)
    clock.begin_update(1)  # under way: will be saved as it is after it
    hold = clock.hold(5, pending=True)
    assert hold.steps == (4, 5, 5)
    clock.end_update(1, 5)
    assert [clock.acquire(hold, layer) for layer in range(3)] == [False] * 3
    with asleep(clock, lambda: clock.begin_update(0)):
        clock.release(hold, 0)


def test_a_pending_snapshot_needs_a_loaded_store() -> None:
    clock = TileClock(NAMES)
    clock.await_arrival()
    with pytest.raises(InternalError, match="once all is loaded"):
        clock.hold(1, pending=True)


def test_there_is_one_hold_at_a_time() -> None:
    clock = TileClock(NAMES)
    hold = clock.hold(0)
    with pytest.raises(InternalError, match="Two snapshots"):
        clock.hold(0)
    clock.drop(hold)
    clock.drop(clock.hold(0))


def test_a_cancelled_hold_stops_its_owner_and_then_lets_updates_go_on() -> None:
    clock = TileClock(NAMES)
    hold = clock.hold(1)
    with asleep(clock, lambda: clock.acquire(hold, 0)) as waiting:
        clock.cancel(hold)
        assert isinstance(waiting.exception(20), HoldCancelled)
    clock.drop(hold)
    clock.begin_update(0)


def test_a_save_that_failed_is_tried_again_only_while_all_tiles_are_as_they_were() -> None:
    clock = TileClock(NAMES)
    hold = held(clock, 0, 0)
    clock.release(hold, 0)
    forgotten: list[int] = []
    assert clock.renew(hold, lambda: forgotten.append(0))
    assert forgotten
    with asleep(clock, lambda: clock.begin_update(0)):  # kept again
        clock.acquire(hold, 0)
        clock.release(hold, 0)
    assert not clock.renew(hold, lambda: None)


def test_a_failed_loader_ends_a_save_that_waits_for_it() -> None:
    clock = TileClock(NAMES)
    clock.await_arrival()
    hold = clock.hold(0)
    with asleep(clock, lambda: clock.acquire(hold, 0)) as waiting:
        clock.fail(CorruptError("bad"))
        assert isinstance(waiting.exception(20), CorruptError)
