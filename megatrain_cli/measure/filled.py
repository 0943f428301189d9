"""A store as a run has it, of made-up layers, for what is measured with tiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatrain_cli.model.layout import make_layout
from megatrain_cli.model.spec import LayerSpec, ParamSpec
from megatrain_cli.plan.tiles import TileFormat
from megatrain_cli.store.master import LayerTile, MasterStore

DEFAULT_FORMAT = TileFormat("bfloat16", "fp32_split", keep_gradient=True)
"""Of a run whose config says nothing else."""

_WIDTH = 1024
_TILES = 16


@contextmanager
def filled_store(numel: int) -> Iterator[MasterStore]:
    """Sixteen layers with so many parameters together, in the default format; ends with the block.

    Each has a matrix and a vector. With those a layer is no whole number of pages, as few are.

    Args:
        numel: About so many; at least those of a matrix of one row each.
    """
    shape = (max(numel // _TILES // _WIDTH, 1), _WIDTH)
    layouts = tuple(
        make_layout(
            LayerSpec(
                f"layer-{i}",
                "",
                (ParamSpec(f"matrix-{i}", shape), ParamSpec(f"vector-{i}", (_WIDTH // 2,))),
            )
        )
        for i in range(_TILES)
    )
    store = MasterStore(layouts, DEFAULT_FORMAT)
    try:
        noise = torch.randn(layouts[0].numel)
        for tile in store.tiles:
            _fill(tile, noise)
        yield store
    finally:
        store.close()


def _fill(tile: LayerTile, noise: torch.Tensor) -> None:
    """Values as a run has them: subnormal or infinite ones would take other paths."""
    tile.weights.copy_(0.02 * noise)
    if tile.gradient is not None:
        tile.gradient.copy_(1e-3 * noise)
    if tile.remainder is not None:
        tile.remainder.copy_(1000 * noise)
    tile.exp_avg.copy_(1e-4 * noise)
    tile.exp_avg_sq.copy_((1e-3 * noise) ** 2)
