"""What a rehearsal of one layer and the head found out about device memory."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Device bytes of one micro-batch, from a rehearsal on the device itself.

    Attributes:
        graph_bytes: What autograd keeps of one layer, by layer kind.
        layer_bytes: The peak of one layer's forward and backward, its graph included, by kind.
        head_bytes: The peak of the head's chunks.
    """

    graph_bytes: Mapping[str, int]
    layer_bytes: Mapping[str, int]
    head_bytes: int
