"""How many parameters a second the optimizer updates, by threads."""

from concurrent.futures import Future
from functools import partial

import torch

from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.crew import WorkSpan
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.plan.rates import ThreadRate
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore

_FORMAT = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
_STEP = AdamStep(step=10, lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
_WIDTH = 1024
_TILES, _PASSES = 8, 4


def measure_adam(
    numel: int, threads: tuple[int, ...], stopwatch: Stopwatch, budget: float
) -> tuple[ThreadRate, ...]:
    """Updates of several tiles with the default masters, as a deferred run does them.

    Many are under way at once, so that the start and the end, where threads are idle, count little.

    Args:
        numel: Parameters of all tiles.
        threads: Numbers of threads to measure with.
        stopwatch: What measures.
        budget: Seconds for all of it.
    """
    shape = (max(numel // _TILES // _WIDTH, 1), _WIDTH)
    layouts = tuple(
        make_layout(LayerSpec(f"layer-{i}", "", (ParamSpec(f"weight-{i}", shape),)))
        for i in range(_TILES)
    )
    store = MasterStore(layouts, _FORMAT)
    try:
        for tile in store.tiles:
            _fill(tile)
        updated = _PASSES * sum(layout.numel for layout in layouts)
        rates = []
        for count in threads:
            with TileUpdater(count, fmt=_FORMAT) as updater:
                seconds = stopwatch.median(
                    partial(stopwatch.seconds_of, partial(_passes, updater, store)),
                    budget / len(threads),
                )
            rates.append(ThreadRate(count, updated / seconds))
        return tuple(rates)
    finally:
        store.close()


def _passes(updater: TileUpdater, store: MasterStore) -> None:
    under_way: list[Future[WorkSpan]] = []
    for number in range(_PASSES * len(store.tiles)):
        tile = store.tiles[number % len(store.tiles)]
        assert tile.gradient is not None
        if number >= len(store.tiles):
            under_way[number - len(store.tiles)].result()  # of the same tile
        under_way.append(updater.submit(tile, tile.gradient, 0, _STEP))
    for update in under_way:
        update.result()


def _fill(tile: LayerTile) -> None:
    """Values as a run has them: subnormal or infinite ones would take other paths."""
    noise = torch.randn(_WIDTH)
    rows = (-1, _WIDTH)
    tile.weights.view(rows).copy_(0.02 * noise)
    if tile.gradient is not None:
        tile.gradient.view(rows).copy_(1e-3 * noise)
    if tile.remainder is not None:
        tile.remainder.view(rows).copy_(1000 * noise)
    tile.exp_avg.view(rows).copy_(1e-4 * noise)
    tile.exp_avg_sq.view(rows).copy_((1e-3 * noise) ** 2)
