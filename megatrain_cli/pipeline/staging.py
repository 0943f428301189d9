"""Device slots that hold one layer's weights each."""

import torch

from megatrain_cli.errors import InternalError


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
