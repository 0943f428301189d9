"""What crosses the link, and what the host does to let it cross."""

import torch

from megatrain_cli.pipeline.buffers import Buffers
from megatrain_cli.pipeline.copying import CopyPool
from megatrain_cli.pipeline.gateway import Gateway
from megatrain_cli.pipeline.ops import Kind, Op
from megatrain_cli.pipeline.shape import PipelineShape
from megatrain_cli.pipeline.slabs import SlabPool, piece_range
from megatrain_cli.store.master import MasterStore


class Moves:
    """Weights in, gradients out. What it is given is closed with it.

    Args:
        gateway: None if tiles can be copied from in place.
        slabs: None if gradients land in their tiles.
        pool: Copies from slabs to tiles: not the gateway's, which packs at the same time.
    """

    def __init__(
        self,
        shape: PipelineShape,
        buffers: Buffers,
        store: MasterStore,
        gateway: Gateway | None,
        slabs: SlabPool | None,
        pool: CopyPool,
    ) -> None:
        self._shape, self._buffers, self._store = shape, buffers, store
        self._gateway, self._slabs, self._pool = gateway, slabs, pool

    def stream_in(self, op: Op) -> None:
        """Start copying a layer's weights into a slot; waits for weights that are still loaded."""
        self._store.clock.wait_for_weights(op.layer)
        slot = self._buffers.slot(op)
        slot.layer = op.layer
        source = self._store.tiles[op.layer].weights
        target = slot.flat[: source.numel()]
        if self._gateway is None:
            target.copy_(source, non_blocking=True)
        else:
            self._gateway.copy(source, target)

    def stream_out(self, op: Op) -> None:
        """Start copying a gradient, or a piece of it with its layer's norm, to the host."""
        source = self._buffers.gradient(op)
        if self._slabs is None:
            self._tile_gradient(op).copy_(source, non_blocking=True)
            return
        start, end = self._range(op)
        self._slab(op).copy_(source[start:end], non_blocking=True)
        if self._shape.eager:  # updated before the whole step is reported
            total = self._buffers.totals[op.layer : op.layer + 1]
            self._norm(op).copy_(total, non_blocking=True)

    def accumulate(self, op: Op) -> None:
        """Move a piece from its slab into the tile's gradient; every piece comes once a step."""
        start, end = self._range(op)
        self._pool.copy(self._slab(op), self._tile_gradient(op)[start:end])

    def num_bytes(self, op: Op) -> int:
        """What a `STREAM_IN` or `STREAM_OUT` moves over the link."""
        if op.kind is Kind.STREAM_IN or self._slabs is None:
            numel = self._buffers.layouts[op.layer].numel
        else:
            start, end = self._range(op)
            numel = end - start
        return numel * self._buffers.dtype.itemsize

    def landed(self, op: Op) -> tuple[torch.Tensor, int, float]:
        """What an update works on, on the host.

        Returns:
            A gradient; the element where it starts; the squared norm of its whole layer.
        """
        if self._slabs is None or op.piece is None:
            return self._tile_gradient(op), 0, float(self._buffers.host_totals[op.layer])
        return self._slab(op), self._range(op)[0], float(self._norm(op))

    def close(self) -> None:
        """End threads, then release host memory."""
        for holder in (self._pool, self._gateway, self._slabs):
            if holder is not None:
                holder.close()

    def _tile_gradient(self, op: Op) -> torch.Tensor:
        gradient = self._store.tiles[op.layer].gradient
        assert gradient is not None
        return gradient

    def _slab(self, op: Op) -> torch.Tensor:
        """The used part of the slab that an op touches."""
        assert self._slabs is not None
        start, end = self._range(op)
        return self._slabs[op.buffer("slab").number][: end - start]

    def _norm(self, op: Op) -> torch.Tensor:
        """The norm beside the slab that an op touches."""
        assert self._slabs is not None
        number = op.buffer("slab").number
        return self._slabs.norms[number : number + 1]

    def _range(self, op: Op) -> tuple[int, int]:
        assert self._slabs is not None
        return piece_range(self._buffers.layouts[op.layer].numel, op.piece, self._slabs.numel)
