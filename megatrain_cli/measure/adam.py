"""How many parameters a second the optimizer updates, by threads."""

from functools import partial

import torch

from megatrain_cli.measure.stopwatch import Stopwatch
from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.plan.rates import ThreadRate
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore

_FORMAT = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
_STEP = AdamStep(step=10, lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
_WIDTH = 1024


def measure_adam(
    numel: int, threads: tuple[int, ...], stopwatch: Stopwatch, budget: float
) -> tuple[ThreadRate, ...]:
    """Updates of one tile with the default masters, as a deferred run does them."""
    shape = (max(numel // _WIDTH, 1), _WIDTH)
    layout = make_layout(LayerSpec("layer", "", (ParamSpec("weight", shape),)))
    store = MasterStore((layout,), _FORMAT)
    try:
        (tile,) = store.tiles
        assert tile.gradient is not None
        _fill(tile)
        rates = []
        for count in threads:
            with TileUpdater(count, fmt=_FORMAT) as updater:
                update = partial(updater.update, tile, tile.gradient, 0, _STEP)
                seconds = stopwatch.median(
                    partial(stopwatch.seconds_of, update), budget / len(threads)
                )
            rates.append(ThreadRate(count, layout.layer.numel / seconds))
        return tuple(rates)
    finally:
        store.close()


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
