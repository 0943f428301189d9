"""Filling the store from a source of parameters, one layer at a time.

The peak is the final state plus one layer per thread: a model is never in memory twice.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

import torch

from megatrain_cli.errors import ModelError
from megatrain_cli.model.spec import LayerSpec
from megatrain_cli.store.master import LayerTile, MasterStore


class LayerSource(Protocol):
    """Where parameters come from: a folder, a checkpoint, an initialiser."""

    def read(self, layer: LayerSpec) -> Iterable[tuple[str, torch.Tensor]]:
        """Full Hugging Face name and values (any floating dtype), for each of a layer's parameters.

        Read lazily: the next tensor is asked for when the one before has been copied.
        """
        ...


def fill_store(store: MasterStore, source: LayerSource) -> None:
    """Write every master and weight of the store. Moments and gradients stay as they are.

    Raises:
        ModelError: The source has a parameter that its layer lacks, or the reverse, or a shape or
            dtype that does not fit.
        CorruptError: A file of the source is damaged.
    """
    for tile in store.tiles:
        _fill_tile(tile, source.read(tile.layout.layer))


def fill_random(
    store: MasterStore,
    make_layer: Callable[[LayerSpec], Iterable[tuple[str, torch.Tensor]]],
    threads: int,
) -> None:
    """Like `fill_store`, from a function that makes a layer's values, several layers at a time.

    Args:
        store: The store to fill.
        make_layer: Called once a layer, on any thread, in any order: it must depend on the layer
            alone (seed a generator of its own by the layer's name), and the store's contents do
            then not depend on `threads`.
        threads: Layers made at the same time.

    Raises:
        ModelError: As `fill_store`. Of several failures the first in layer order is raised, after
            all threads have stopped writing.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="fill") as pool:
        futures = [
            pool.submit(lambda t: _fill_tile(t, make_layer(t.layout.layer)), tile)
            for tile in store.tiles
        ]
        wait(futures)
    for future in futures:
        future.result()


def _fill_tile(tile: LayerTile, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    layer = tile.layout.layer.name
    entries = tile.layout.by_name
    missing = set(entries)
    for name, tensor in values:
        if name not in missing:
            known = "is filled twice" if name in entries else "is not a parameter"
            raise ModelError(f"{layer}: {name} {known} of this layer.")
        shape = entries[name].param.shape
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ModelError(
                f"{layer}: {name} is {tuple(tensor.shape)} {tensor.dtype}, not floating {shape}."
            )
        tile.write_master(name, tensor)
        missing.remove(name)
    if missing:
        raise ModelError(f"{layer}: nothing fills {', '.join(sorted(missing))}.")
