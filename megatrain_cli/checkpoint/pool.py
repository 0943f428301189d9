"""Room of a fixed size for copies of tiles that an update cannot wait for."""

import threading
from dataclasses import replace

import torch

from megatrain_cli.plan.tiles import PAGE_BYTES, tile_regions
from megatrain_cli.store.arena import Arena
from megatrain_cli.store.master import LayerTile, make_tile
from megatrain_cli.units import round_up


class BouncePool:
    """One mapping that copies of tiles are cut from; all of it is in RAM from the start.

    Whether a save needs it is the disk's doing: so a run has the room when it begins, or ends then,
    and no update waits for pages to be cleared. Copies are page-aligned as tiles are, so that they
    too can be written around the page cache.

    Args:
        num_bytes: All that is ever taken; 0 is a pool without room.

    Raises:
        PlanError: The system refused the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes // PAGE_BYTES * PAGE_BYTES
        self._memory: torch.Tensor | None = None
        if self.num_bytes:
            self._memory = Arena(self.num_bytes).take(self.num_bytes).zero_()
        self._lock = threading.Lock()  # guards what is taken: updates take, the saver gives back
        self._taken: dict[int, int] = {}  # first byte -> bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes that copies hold now."""
        with self._lock:
            return sum(self._taken.values())

    def take(self, tile: LayerTile, *, gradient: bool) -> LayerTile | None:
        """A tile like `tile` for a copy of it, contents undefined; None if there is no room.

        Args:
            tile: What will be copied.
            gradient: Whether its gradient will be too.
        """
        fmt = replace(tile.format, keep_gradient=gradient)
        need = sum(tile_regions(tile.layout.numel, fmt).values())
        with self._lock:
            start = self._first_fit(need)
            if start is None or self._memory is None:
                return None
            self._taken[start] = need
        return make_tile(self._memory[start : start + need], tile.index, tile.layout, fmt)

    def give_back(self, copy: LayerTile) -> None:
        """A copy from `take` is used no more."""
        assert self._memory is not None
        with self._lock:
            del self._taken[copy.linked.data_ptr() - self._memory.data_ptr()]

    def clear(self) -> None:
        """No copy is used any more."""
        with self._lock:
            self._taken.clear()

    def _first_fit(self, need: int) -> int | None:
        start = 0
        for taken in sorted(self._taken):
            if start + need <= taken:
                break
            start = round_up(taken + self._taken[taken], PAGE_BYTES)
        return start if start + need <= self.num_bytes else None


def copy_tile(source: LayerTile, target: LayerTile) -> None:
    """Copy all regions that `target` has."""
    for name in ("weights", "gradient", "remainder", "master", "exp_avg", "exp_avg_sq"):
        region: torch.Tensor | None = getattr(target, name)
        if region is not None:
            region.copy_(getattr(source, name))
