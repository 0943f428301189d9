"""What a rehearsal of one layer and the head found out about device memory.

It also answers for micro-batches of other sizes, as advice to a run that does not fit needs it:
what autograd keeps follows the tokens, and all else is taken to stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Device bytes of one micro-batch, from a rehearsal on the device itself.

    Attributes:
        graph_bytes: What autograd keeps of one layer, by layer kind.
        layer_bytes: The peak of one layer's forward and backward, its graph included, by kind.
        head_bytes: The peak of the head's chunks.
        tokens: Of that micro-batch, padding included.
    """

    graph_bytes: Mapping[str, int]
    layer_bytes: Mapping[str, int]
    head_bytes: int
    tokens: int

    def graph_of(self, kind: str, tokens: int) -> int:
        """What autograd keeps of one layer and `tokens` tokens."""
        return self.graph_bytes[kind] * tokens // self.tokens

    def layer_of(self, kind: str, tokens: int) -> int:
        """The peak of one layer with `tokens` tokens, its graph included."""
        return self.layer_bytes[kind] - self.graph_bytes[kind] + self.graph_of(kind, tokens)
