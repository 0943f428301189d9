"""A run that is stopped in the middle of an update ends it later, equal to one never stopped."""

from pathlib import Path

import pytest

from megatrain_cli.optim.adamw import AdamStep
from megatrain_cli.optim.worker import TileUpdater
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.step import finish_update
from tests.checkpoint.loading import load
from tests.checkpoint.tiles import (
    LAYOUTS,
    ORDER,
    SPLIT,
    bits,
    fill_gradients,
    make_store,
    manifest_of,
    save,
)


@pytest.mark.parametrize("num_updated", range(len(LAYOUTS)))
def test_the_rest_of_an_update_is_done_after_a_save_and_a_load(
    num_updated: int, tmp_path: Path
) -> None:
    step = AdamStep(3, 1e-2, 0.9, 0.95, 1e-8, 0.1, grad_scale=0.25)
    stores = [make_store(), make_store()]
    with TileUpdater(1, fmt=SPLIT) as updater:
        for store in stores:
            fill_gradients(store, 3)
            store.clock.set_steps((2,) * 4)
        whole, stopped = stores
        finish_update(whole, updater, step)
        for layer in ORDER[:num_updated]:
            tile = stopped.tiles[layer]
            assert tile.gradient is not None
            stopped.clock.begin_update(layer)
            updater.update(tile, tile.gradient, 0, step)
            stopped.clock.end_update(layer, 3)
        folder = save(stopped, tmp_path, 2, pending=3)
        pending = manifest_of(folder).pending
        assert pending is not None
        fresh = MasterStore(LAYOUTS, SPLIT)
        load(folder, fresh)
        done = finish_update(fresh, updater, step)
    assert done == tuple(sorted(ORDER[num_updated:]))
    assert bits(fresh) == bits(whole)
