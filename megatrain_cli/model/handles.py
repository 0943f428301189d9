"""Keep a layer's activations without keeping its weights.

Autograd saves weights for backward, as views of the slot that held them in forward. By the time of
backward that slot may hold another layer, and this layer may lie in another slot. So each saved
view of the slot is replaced by a handle, and restored as a view of the run that holds the layer
then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_cli.errors import InternalError


@dataclass(frozen=True)
class WeightHandle:
    """A view of a flat run, without the run.

    Attributes:
        offset: In elements from the start of the run.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def saved_weights(flat: Tensor, current: Callable[[], Tensor]) -> Iterator[None]:
    """Save handles in the place of weights for a forward pass under this context.

    Args:
        flat: The run `(numel,)` that the layer's weights are views of.
        current: Called in backward, once a saved weight: the run of the same layer, of the same
            size and dtype, with the same values. Must raise if no slot holds that layer.

    Raises:
        InternalError: A weight was saved under another dtype, or `current()` returns another kind
            of run than `flat`.
    """
    start = flat.data_ptr()
    end = start + flat.numel() * flat.element_size()
    numel, dtype, device = flat.numel(), flat.dtype, flat.device

    def pack(tensor: Tensor) -> Tensor | WeightHandle:
        if tensor.device != device or tensor.numel() == 0:
            return tensor
        byte_offset = tensor.data_ptr() - start
        if not 0 <= byte_offset < end - start:
            return tensor
        if tensor.dtype != dtype:
            raise InternalError(f"A weight in {dtype} was saved for backward as {tensor.dtype}.")
        offset = byte_offset // tensor.element_size()
        return WeightHandle(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def unpack(saved: Tensor | WeightHandle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        run = current()
        if run.numel() != numel or run.dtype != dtype:
            raise InternalError(
                f"Backward was given a run of {run.numel()} x {run.dtype} for a layer that was "
                f"{numel} x {dtype} in forward."
            )
        return run.as_strided(saved.shape, saved.stride, run.storage_offset() + saved.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
