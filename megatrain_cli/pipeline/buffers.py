"""What the ops of a step share: allocated once, at plan sizes, and owned until the run ends."""

from collections.abc import Sequence

import torch

from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.pipeline.activations import HiddenBuffers
from megatrain_cli.pipeline.ops import Op
from megatrain_cli.pipeline.schedule import GRADIENT_BUFFERS
from megatrain_cli.pipeline.shape import PipelineShape
from megatrain_cli.pipeline.staging import StagingBuffer


class Buffers:
    """Device memory of the pipeline, looked up by op.

    Attributes:
        layouts: Of all layers, in order.
        dtype: Of weights, gradients and hidden states.
        slots: Staging buffers: those of decoder layers, each as large as the largest of them, then
            those of embedding and head.
        hidden: Layer inputs and output gradients.
        totals: FP64 on the device: each layer's squared gradient norm, then the loss.
        host_totals: The same on the host, of the step that was reported last.
    """

    def __init__(
        self,
        ops: tuple[Op, ...],
        shape: PipelineShape,
        layouts: Sequence[LayerLayout],
        max_elements: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layouts, self.dtype = layouts, dtype
        self._shape = shape
        sizes = [max(layout.numel for layout in layouts[1:-1])] * shape.num_slots
        sizes += [0] * shape.num_end_slots
        for layer in (0, shape.head):
            slot = shape.end_slot(layer)
            sizes[slot] = max(sizes[slot], layouts[layer].numel)
        self.slots = [StagingBuffer(numel, dtype, device) for numel in sizes]
        largest = max(layout.numel for layout in layouts)
        self._gradients = [
            torch.zeros(largest, dtype=dtype, device=device) for _ in range(GRADIENT_BUFFERS)
        ]
        self.totals = torch.zeros(shape.num_layers + 1, dtype=torch.float64, device=device)
        self.host_totals = torch.zeros(shape.num_layers + 1, dtype=torch.float64)
        if device.type == "cuda":
            self.host_totals = self.host_totals.pin_memory()
        # Last, since it page-locks memory: nothing may fail between that and `close`.
        self.hidden = HiddenBuffers(ops, max_elements, dtype, device)

    def slot(self, op: Op) -> StagingBuffer:
        """The slot that an op reads or fills."""
        return self.slots[op.buffer("slot").number]

    def gradient(self, op: Op) -> torch.Tensor:
        """The run `(numel,)` of the op's layer in the device gradient buffer that it touches."""
        return self._gradients[op.buffer("device_gradient").number][: self.layouts[op.layer].numel]

    def close(self) -> None:
        """Release host memory."""
        self.hidden.close()
