"""The pinned gateway of a pageable store.

A registered store is copied from in place. From ordinary memory the link runs at a tenth of its
rate, so a pageable store goes through pinned staging memory, chunk by chunk: while one chunk is on
the link, the next is being packed, and packing runs ahead of the link as far as there is room.
"""

from collections.abc import Callable
from functools import partial

import torch

from megatrain_cli.pipeline.copying import CopyPool, Wait
from megatrain_cli.plan.rates import MachineRates
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import MIB, round_up, show_bytes

# The link reaches 95 % of its rate from 16 MB bursts on (measured on an H200, PCIe 5 x16). Twice
# that halves how often threads meet: in chunks of 1 MiB, which are enough for 80 % of that link,
# packing came to 3.4 GB/s. Small chunks let packing and copying overlap early.
CHUNK_BYTES = 32 * MIB

Link = Callable[[torch.Tensor, torch.Tensor], Wait]
"""Starts a copy from pinned memory to the device; the wait returns when its source was read."""


def chunk_bytes_for(rates: MachineRates | None, target_utilization: float) -> int:
    """Bytes of a chunk: for packing `CHUNK_BYTES`, and more where the link needs more.

    Args:
        rates: Of the machine; None if it was not measured.
        target_utilization: Share of the link's peak that a chunk must reach.
    """
    needed = None if rates is None else rates.burst_bytes(target_utilization)
    return max(CHUNK_BYTES, needed or 0)


def cuda_link(source: torch.Tensor, target: torch.Tensor) -> Wait:
    """Copy on the current stream."""
    target.copy_(source, non_blocking=True)
    read = torch.cuda.Event(blocking=True)  # the waiting thread sleeps
    read.record()
    return read.synchronize


class Gateway:
    """A ring of pinned chunks, in all as large as two of the largest runs.

    A ring and not two buffers, so that smaller layers are packed further ahead: beside an embedding
    of a gigabyte, four decoder layers.

    Args:
        run_bytes: Of the largest run.
        pool: Packs; closed with the gateway.
        link: How a chunk gets to the device.
        chunk_bytes: See `chunk_bytes_for`; used in whole pages, and at most the largest run.

    Raises:
        DeviceError: The driver refused to page-lock the ring; nothing is locked.
    """

    def __init__(
        self,
        run_bytes: int,
        pool: CopyPool,
        link: Link = cuda_link,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        whole = round_up(run_bytes, PAGE_BYTES)
        self._chunk_bytes = min(round_up(chunk_bytes, PAGE_BYTES), whole)
        count = 2 * whole // self._chunk_bytes
        self.num_bytes = count * self._chunk_bytes
        self._arena = Arena(self.num_bytes)
        ring = self._arena.take(self.num_bytes)
        self._arena.register(
            ring,
            f"pinned staging of {show_bytes(self.num_bytes)}",
            "compute on the CPU with `pipeline.device: cpu`",
        )
        self._chunks = list(ring.split(self._chunk_bytes))
        self._read: list[Wait] = [_nothing] * count
        self._next = 0
        self._pool, self._link = pool, link

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Pack a run from ordinary memory and send it to `target` on the current stream.

        Returns when all of it is packed and its last chunk is issued: `source` may change then, and
        `target` is complete in the stream's order. Blocks while packing lasts, and while the ring
        is full of chunks that the link has not read. One thread at a time.

        Args:
            source: Flat, at most `run_bytes`.
            target: On the device, as many bytes.
        """
        source, target = source.view(torch.uint8), target.view(torch.uint8)
        send_previous: Wait = _nothing
        for start in range(0, source.numel(), self._chunk_bytes):
            end = min(start + self._chunk_bytes, source.numel())
            place, self._next = self._next, (self._next + 1) % len(self._chunks)
            self._read[place]()
            packed = self._pool.start(source[start:end], self._chunks[place][: end - start])
            send_previous()
            send_previous = partial(self._send, place, packed, target[start:end])
        send_previous()

    def close(self) -> None:
        """Unlock and release the memory. No copy may be in flight."""
        self._pool.close()
        self._chunks.clear()
        self._arena.close()

    def _send(self, place: int, packed: Wait, target: torch.Tensor) -> None:
        packed()
        self._read[place] = self._link(self._chunks[place][: target.numel()], target)


def _nothing() -> None:
    """Nothing was sent yet, so there is nothing to wait for."""
