"""Hidden states on their way: layer inputs, the gradient coming back, and kept graphs.

All buffers are allocated once, for the longest rows; a micro-batch of shorter rows uses the front
of each. They are filled by copies, so the caching allocator's memory never crosses a stream.
"""

import math

import torch

from megatrain_cli.pipeline.ops import Buffer, Kind, Op
from megatrain_cli.plan.tiles import PAGE_BYTES
from megatrain_cli.store.arena import Arena
from megatrain_cli.units import round_up


class HiddenBuffers:
    """One buffer of `max_elements` for each `input`, `ring` and `output_gradient` of a schedule.

    With offloading, each `host_input` has a host twin, page-locked on a CUDA device.
    """

    def __init__(
        self, ops: tuple[Op, ...], max_elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        touched = sorted({b for op in ops for b in (*op.reads, *op.writes)})
        on_device = [b for b in touched if b.kind in ("input", "ring", "output_gradient")]
        self._flat = {b: torch.zeros(max_elements, dtype=dtype, device=device) for b in on_device}
        self._arena: Arena | None = None
        offloaded = [b for b in touched if b.kind == "host_input"]
        if offloaded:
            num_bytes = max_elements * dtype.itemsize
            self._arena = Arena(len(offloaded) * round_up(num_bytes, PAGE_BYTES))
            for buffer in offloaded:
                cut = self._arena.take(num_bytes)
                if device.type == "cuda":
                    otherwise = "set `pipeline.activations: recompute`"
                    self._arena.register(cut, "offloaded inputs", otherwise)
                self._flat[buffer] = cut.view(dtype)
        self._shapes: list[tuple[int, ...]] = []

    def use_shapes(self, shapes: list[tuple[int, ...]]) -> None:
        """The `(B, T, D)` of each micro-batch of the step that is issued next."""
        self._shapes = shapes

    def __getitem__(self, buffer: Buffer) -> torch.Tensor:
        """The buffer as `(B, T, D)`, for the lane that computes."""
        return self._front(buffer, self._shapes[buffer.part])

    def move(self, op: Op, shape: tuple[int, ...]) -> None:
        """Carry out an `OFFLOAD` or a `FETCH` of `(B, T, D)` on the current stream.

        The shape comes along: this runs on a copying lane's thread, maybe after `use_shapes`.
        """
        assert op.kind in (Kind.OFFLOAD, Kind.FETCH)
        source, target = (self._front(b, shape) for b in (op.reads[0], op.writes[0]))
        target.copy_(source, non_blocking=True)

    def _front(self, buffer: Buffer, shape: tuple[int, ...]) -> torch.Tensor:
        return self._flat[buffer][: math.prod(shape)].view(shape)

    def close(self) -> None:
        """Unlock and release host memory."""
        self._flat.clear()
        if self._arena is not None:
            self._arena.close()
