"""In every interleaving of updates and a saver, a snapshot is of one step and nobody hangs."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

import pytest

from megatrain_cli.errors import MixedStateError
from megatrain_cli.store.clock import TileClock
from megatrain_cli.store.hold import Hold
from tests.scheduler import DeadlockError, Scheduler

NAMES = ("embed", "layer-00000", "head")
SEEDS = range(60)


@pytest.mark.parametrize("wants", ["acquire", "renew", "drop"])
def test_a_tile_that_is_being_copied_is_waited_for(wants: str) -> None:
    clock, scheduler = TileClock(NAMES), Scheduler(0)
    clock._changed = cast(threading.Condition, scheduler.condition)
    order: list[str] = []

    def copy() -> None:
        order.append("copying")
        scheduler.spawn(want)
        for _ in range(20):
            scheduler.gate()
        order.append("copied")

    def want() -> None:
        order.append("wanted")
        if wants == "acquire":
            clock.acquire(hold, 1)
        elif wants == "renew":
            clock.renew(hold, lambda: None)
        else:
            clock.drop(hold)
        order.append("got")

    hold = clock.hold(0, room=lambda layer, step: copy)
    scheduler.spawn(lambda: clock.begin_update(1))
    scheduler.run()
    assert order == ["copying", "wanted", "copied", "got"]


class Ungated(TileClock):
    """The negative control: an update does not look at snapshots."""

    def _keeper(self, layer: int) -> Hold | None:
        return None


def run_steps(clock: TileClock, seed: int, reads: list[int], *, rooms: int, save_at: int) -> None:
    """Three layers, four steps, a snapshot of one of them; `reads` gets all that it has read."""
    scheduler = Scheduler(seed)
    clock._changed = cast(threading.Condition, scheduler.condition)
    tiles, copies = [[0, 0] for _ in NAMES], dict[int, list[int]]()
    free = [rooms]

    def room(layer: int, step: int) -> Callable[[], None] | None:
        if not free[0]:
            return None
        free[0] -= 1

        def copy() -> None:
            words = [tiles[layer][0]]
            scheduler.gate()
            copies[layer] = [*words, tiles[layer][1]]

        return copy

    def train() -> None:
        for step in range(1, 5):
            for layer in (2, 0, 1):
                clock.begin_update(layer)
                for word in range(2):
                    scheduler.gate()
                    tiles[layer][word] = step
                clock.end_update(layer, step)
                scheduler.gate()
            if step == save_at:
                scheduler.spawn(partial(save, clock.hold(step, room=room)))
                scheduler.gate()

    def save(hold: Hold) -> None:
        for layer in (2, 0, 1):
            copied = clock.acquire(hold, layer)
            for word in range(2):
                scheduler.gate()
                reads.append((copies if copied else tiles)[layer][word])
            if copied:
                free[0] += 1
            clock.release(hold, layer)
            scheduler.gate()
        clock.drop(hold)

    scheduler.spawn(train)
    scheduler.run()
    assert free[0] == rooms


@pytest.mark.parametrize("rooms", [0, 1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_in_any_interleaving_a_snapshot_reads_one_step_whole(seed: int, rooms: int) -> None:
    for step in range(1, 5):
        reads: list[int] = []
        run_steps(TileClock(NAMES), seed, reads, rooms=rooms, save_at=step)
        assert reads == [step] * 6


def test_without_the_gate_some_interleaving_reads_a_torn_step() -> None:
    torn = 0
    for seed in SEEDS:
        reads: list[int] = []
        with suppress(MixedStateError):  # the saver looks too: a layer had moved on by then
            run_steps(Ungated(NAMES), seed, reads, rooms=0, save_at=2)
        torn += any(step != 2 for step in reads)
    assert torn


def test_the_scheduler_sees_a_deadlock() -> None:
    clock, scheduler = TileClock(NAMES), Scheduler(0)
    clock._changed = cast(threading.Condition, scheduler.condition)
    hold = clock.hold(1)
    scheduler.spawn(lambda: clock.acquire(hold, 0))
    with pytest.raises(DeadlockError):
        scheduler.run()
