"""Device slots that hold one layer's weights each, and the pinned gateway of a pageable store.

A registered store is copied from in place. From ordinary memory the link runs at a tenth of its
rate, so a pageable store goes through pinned staging memory, chunk by chunk: while one chunk is on
the link, the next is being packed.
"""

import torch

from megatrain_cli.errors import InternalError
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import round_up

# Bytes per packed chunk: the link reaches 95 % of its rate from 16 MB bursts on (measured on an
# H200, PCIe 5 x16), and small chunks let packing and copying overlap early.
CHUNK_BYTES = 32 << 20


class StagingBuffer:
    """A device slot: `flat` is `(numel,)` in the compute dtype, `layer` what it holds.

    `layer` follows the order in which ops are *issued*; the schedule's events make the device
    agree with it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.zeros(numel, dtype=dtype, device=device)
        self.layer: int | None = None

    def require(self, layer: int) -> torch.Tensor:
        """The run, if it holds that layer; the tripwire against reading another layer's weights."""
        if self.layer != layer:
            raise InternalError(f"layer {layer} is read from a slot that holds {self.layer}")
        return self.flat


class Gateway:
    """Two pinned host buffers, each as large as the largest run, in front of a pageable store."""

    COUNT = 2

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        num_bytes = numel * dtype.itemsize
        self._arena = Arena(self.COUNT * round_up(num_bytes, PAGE_BYTES))
        self._buffers = [self._arena.take(num_bytes).view(dtype) for _ in range(self.COUNT)]
        for buffer in self._buffers:
            self._arena.register(buffer)
        self._copied: list[torch.cuda.Event | None] = [None] * self.COUNT
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Pack `source` (pageable) and copy it to `target` on the current stream.

        Returns when the last chunk is packed and issued; blocks while both buffers are still
        being read by the link.
        """
        turn = self._turn
        self._turn = (turn + 1) % self.COUNT
        before = self._copied[turn]
        if before is not None:
            before.synchronize()
        staging = self._buffers[turn]
        step = CHUNK_BYTES // source.element_size()
        for start in range(0, source.numel(), step):
            end = min(start + step, source.numel())
            staging[start:end].copy_(source[start:end])
            target[start:end].copy_(staging[start:end], non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record()
        self._copied[turn] = done

    def close(self) -> None:
        """Unlock and release the memory."""
        self._buffers.clear()
        self._arena.close()
