"""Gradient slabs: pinned host room for one layer's gradient between the device and its tile.

A slab holds the run of the largest decoder layer. A longer run (a large vocabulary's embedding or
head) leaves in pieces of that size, so one huge layer does not multiply the pinned memory by K.
"""

import torch

from megatrain_cli.plan.tiles import slab_bytes
from megatrain_cli.store.arena import Arena


class SlabPool:
    """K slabs of `numel` elements each; `pin` page-locks them for the link.

    Attributes:
        norms: FP64, the squared norm that belongs to what each slab holds.

    Raises:
        DeviceError: The driver refused to page-lock one of them; none is locked.
    """

    def __init__(self, count: int, numel: int, dtype: torch.dtype, *, pin: bool) -> None:
        num_bytes = numel * dtype.itemsize
        self._arena = Arena(slab_bytes(count, num_bytes))
        self._slabs = [self._arena.take(num_bytes).view(dtype) for _ in range(count)]
        self.norms = self._arena.take(count * 8).view(torch.float64)
        self.numel = numel
        if pin:
            for slab in (*self._slabs, self.norms):
                self._arena.register(slab, "gradient slabs", "set a lower `pipeline.grad_slabs`")

    def __getitem__(self, index: int) -> torch.Tensor:
        """One slab, `(numel,)` in the compute dtype."""
        return self._slabs[index]

    def close(self) -> None:
        """Unlock and release the memory."""
        self._slabs.clear()
        self._arena.close()


def piece_range(numel: int, piece: int | None, slab_numel: int) -> tuple[int, int]:
    """Elements `[start, end)` of a run that a piece covers; all of it if there are no pieces."""
    if piece is None:
        return 0, numel
    start = piece * slab_numel
    return start, min(start + slab_numel, numel)
