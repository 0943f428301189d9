"""How many parameters a second the optimizer updates, by threads; and an optimizer kept at work."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from megatrain_cli.measure.filled import DEFAULT_FORMAT
from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.crew import WorkSpan
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.plan.rates import ThreadRate
from megatrain_cli.store.master import LayerTile, MasterStore

_STEP = AdamStep(step=10, lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def measure_adam(
    store: MasterStore,
    threads: Sequence[int],
    stopwatch: Stopwatch,
    budget: float,
    cores: Callable[[int], Sequence[int] | None] = lambda threads: None,
) -> tuple[ThreadRate, ...]:
    """Updates of several tiles with the default masters, as a deferred run does them.

    Many are under way at once, so that the start and the end, where threads are idle, count little.

    Args:
        store: With all that an update needs, from `filled_store`.
        threads: Numbers of threads to measure with.
        stopwatch: What measures.
        budget: Seconds for all of it.
        cores: Those that a number of threads is bound to; None binds them to none.
    """
    updated = sum(tile.layout.numel for tile in store.tiles)
    rates = []
    for count in threads:
        with TileUpdater(count, fmt=DEFAULT_FORMAT, cores=cores(count)) as updater:
            seconds = stopwatch.median(
                partial(stopwatch.seconds_of, partial(_update_all, updater, store)),
                budget / len(threads),
            )
        rates.append(ThreadRate(count, updated / seconds))
    return tuple(rates)


@contextmanager
def busy_optimizer(store: MasterStore, threads: int, cores: Sequence[int] | None) -> Iterator[None]:
    """Keep an optimizer at work: each tile is handed to it again when its update has ended.

    So all tiles are under way at once, no thread ever waits, and another one hands tiles over, all
    as in a deferred run.

    Args:
        store: With all that an update needs, from `filled_store`.
        threads: Of the optimizer.
        cores: Those that they are bound to; None binds them to none.
    """
    enough = threading.Event()
    ended: queue.SimpleQueue[tuple[LayerTile, Future[WorkSpan]]] = queue.SimpleQueue()
    with (
        TileUpdater(threads, fmt=DEFAULT_FORMAT, cores=cores) as updater,
        ThreadPoolExecutor(1, thread_name_prefix="measure") as pool,
    ):

        def hand_over(tile: LayerTile) -> None:
            _submit(updater, tile).add_done_callback(lambda done: ended.put((tile, done)))

        def go_on() -> None:
            while not enough.is_set():
                tile, done = ended.get()
                done.result()
                hand_over(tile)

        # Here and not on the other thread: what the updater makes once a tile is no part of the
        # work, and takes Python's lock from whoever is measured.
        for tile in store.tiles:
            hand_over(tile)
        worked = pool.submit(go_on)
        try:
            yield
        finally:
            enough.set()
        worked.result()  # raises what it failed with


def _update_all(updater: TileUpdater, store: MasterStore) -> None:
    for update in [_submit(updater, tile) for tile in store.tiles]:
        update.result()


def _submit(updater: TileUpdater, tile: LayerTile) -> Future[WorkSpan]:
    assert tile.gradient is not None
    return updater.submit(tile, tile.gradient, 0, _STEP)
