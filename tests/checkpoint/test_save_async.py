"""A save that goes on beside training writes the bytes of one made while nothing moves.

Whole optimizer steps and a saver run in interleavings drawn from seeds, switched at every write and
at every half of every update.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Shard
from megatrain_cli.checkpoint.save import Saver
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import InternalError, MixedStateError
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.store.clock import TileClock
from megatrain_cli.store.hold import Hold
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.step import StepUpdate
from tests.checkpoint.tiles import (
    LAYOUTS,
    ORDER,
    Inline,
    SlowUpdater,
    as_any,
    bits,
    make_store,
    manifest_of,
    pieces_of,
    save,
    set_bits,
    snapshot_of,
)
from tests.scheduler import Scheduler

SAVE_AT, STEPS = 2, 4
ALL = 1 << 20  # room for every tile
SEEDS = range(12)


@pytest.fixture(autouse=True)
def one_save_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in every file's header: equal ids, so that equal files are equal to the last bit."""
    monkeypatch.setattr("uuid.uuid4", lambda: UUID(int=7))


class GatedFileSystem(FileSystem):
    """Others may come in before each write."""

    def __init__(self, gate: Callable[[], None]) -> None:
        self._gate = gate

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._gate()
        return super().write(fd, buffer, offset)


class ScheduledSaver(Saver):
    """Runs on a thread of the test's scheduler."""

    scheduler: Scheduler

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        self.scheduler.spawn(work)
        return cast("threading.Thread", None)

    def _workers(self) -> Executor:
        return Inline()


class Ungated(TileClock):
    """The negative control: updates do not look at snapshots."""

    def _keeper(self, layer: int) -> Hold | None:
        return None


class Careless(Ungated):
    """Nor does the saver look at the steps of what it takes up."""

    def _check(self, hold: Hold, layer: int) -> None:
        pass

    def _is_at(self, layer: int, step: int) -> bool:
        return self._steps[layer] >= step


def train(store: MasterStore, scheduler: Scheduler, after: Callable[[int], object]) -> None:
    """Steps as the update lane does them; `after` is called when a step's updates are under way."""
    updater = SlowUpdater(scheduler.spawn, scheduler.gate)
    for step in range(1, STEPS + 1):
        update = StepUpdate(
            step=step,
            base=AdamStep(step, 1e-3, 0.9, 0.95, 1e-8, 0.1),
            max_grad_norm=None,
            eager=True,
            spec=as_any(None),
            store=store,
            updater=as_any(updater),
        )
        futures = []
        for layer in ORDER:
            tile = store.tiles[layer]
            for start, end in pieces_of(tile.layout.numel, 1 + layer % 3):
                future = update.update(layer, tile.weights[start:end], start, 1.0)
                assert future is not None
                futures.append(future)
            scheduler.gate()
        after(step)
        while not all(future.done() for future in futures):
            scheduler.gate()


def run(folder: Path, seed: int, clock: type[TileClock] = TileClock, **options: Any) -> Saver:
    """Train with one save on the way; the store's end state is left in the saver's store."""
    scheduler = Scheduler(seed)
    store = make_store()
    store.clock = clock([layout.layer.name for layout in LAYOUTS])
    store.clock._changed = cast("threading.Condition", scheduler.condition)
    fs = GatedFileSystem(scheduler.gate)
    writer = FileWriter(fs, chunk_bytes=4096)
    saver = ScheduledSaver(store, folder / "checkpoints", ORDER, fs=fs, writer=writer, **options)
    saver.scheduler = scheduler

    def after(step: int) -> None:
        if step == SAVE_AT:
            assert saver.begin(snapshot_of(store, step))

    scheduler.spawn(lambda: train(store, scheduler, after))
    scheduler.run()
    return saver


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Shard, ...], list[bytes]]:
    """The shards of a save that nothing disturbs, and the state at the end of training."""
    patch = pytest.MonkeyPatch()
    patch.setattr("uuid.uuid4", lambda: UUID(int=7))
    scheduler = Scheduler(0)
    store = make_store()
    store.clock._changed = cast("threading.Condition", scheduler.condition)
    stops: list[list[bytes]] = []

    def stop(step: int) -> None:
        while store.clock.steps != (step,) * len(LAYOUTS):
            scheduler.gate()
        stops.append(bits(store))

    scheduler.spawn(lambda: train(store, scheduler, stop))
    scheduler.run()
    still = make_store()
    set_bits(still, stops[SAVE_AT - 1])
    still.clock.set_steps((SAVE_AT,) * len(LAYOUTS))
    shards = manifest_of(save(still, tmp_path_factory.mktemp("alone"), SAVE_AT)).shards
    patch.undo()
    return shards, stops[-1]


@pytest.mark.parametrize("pool_bytes", [0, 3 << 15, ALL])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_file_is_the_one_of_a_save_that_nothing_disturbs(
    seed: int, pool_bytes: int, tmp_path: Path, alone: tuple[tuple[Shard, ...], list[bytes]]
) -> None:
    saver = run(tmp_path, seed, pool_bytes=pool_bytes, paranoid=True)
    (report,) = saver.poll()
    shards, end = alone
    assert manifest_of(report.folder).shards == shards
    assert bits(saver._store) == end  # and training does not notice
    assert saver.pool.taken_bytes == 0


def test_without_the_gate_the_saver_sees_that_layers_have_moved_on(tmp_path: Path) -> None:
    refused = 0
    for seed in SEEDS:
        try:
            run(tmp_path / str(seed), seed, Ungated).poll()
        except MixedStateError:
            refused += 1
        assert not list((tmp_path / str(seed) / "checkpoints").glob(".tmp*"))
    assert refused


def test_without_gate_and_look_bytes_of_another_step_are_saved(
    tmp_path: Path, alone: tuple[tuple[Shard, ...], list[bytes]]
) -> None:
    reports = [run(tmp_path / str(seed), seed, Careless).poll()[0] for seed in SEEDS]
    assert any(manifest_of(report.folder).shards != alone[0] for report in reports)


def test_without_gate_and_look_the_paranoid_mode_tells(tmp_path: Path) -> None:
    told = 0
    for seed in SEEDS:
        saver = run(tmp_path / str(seed), seed, Careless, paranoid=True)
        with suppress(InternalError):
            saver.poll()
            continue
        told += 1
        assert not list((tmp_path / str(seed) / "checkpoints").iterdir())
    assert told
