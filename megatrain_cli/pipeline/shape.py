"""What the order of a step depends on, and the orders that follow: of visits, weights, updates."""

from dataclasses import dataclass
from functools import cached_property

from megatrain_cli.pipeline.ops import Buffer

# Decoder layers that are copied to the device while the optimizer updates one: it moves 26 bytes a
# parameter at the rate of RAM, the link 2. Too many would hold up the layer that is needed first.
COPIES_AN_UPDATE = 4


@dataclass(frozen=True)
class PipelineShape:
    """Everything the order of a step depends on.

    Attributes:
        num_layers: Layers of the sequence, embedding and head included; at least 2.
        num_slots: Device staging buffers that decoder layers take turns in, at least 1.
        num_slabs: Pinned gradient slabs; 0 lets gradients land straight in their tiles, which
            needs the tiles to be reachable by the link and deferred updates.
        pieces: Slab-sized pieces of each layer's run; all 1 without slabs.
        kept: Decoder layers whose activations are kept from forward to backward.
        offload: Inputs of recomputed decoder layers wait in host memory for their backward.
        eager: Layers are updated from their slabs as gradients land, before the norm is known.
        tied: The head also reads the embedding's weights, which stay on the device until then.
        lookup: The embedding's backward reads no weights: they are not needed a second time.
    """

    num_layers: int
    num_micro_batches: int
    num_slots: int
    num_slabs: int
    pieces: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    offload: bool = False
    eager: bool = False
    tied: bool = False
    lookup: bool = False

    def __post_init__(self) -> None:
        """Refuse shapes no schedule exists for; the plan never makes one."""
        assert self.num_layers >= 2
        assert min(self.num_micro_batches, self.num_slots) >= 1
        assert self.num_slabs >= 1 or not self.eager
        assert len(self.pieces) == self.num_layers
        assert self.kept <= set(range(1, self.num_layers - 1))

    @property
    def head(self) -> int:
        """Index of the head."""
        return self.num_layers - 1

    @cached_property
    def visits(self) -> tuple[int, ...]:
        """Layers in the order in which they compute: forward to the head, and back."""
        return (*range(self.num_layers), *range(self.num_layers - 2, -1, -1))

    @cached_property
    def arrivals(self) -> tuple[int, ...]:
        """The visits that need weights on the device, in the order in which these are streamed in.

        The head's come before the last decoder layer's: they have a slot to themselves, and are
        there when that layer, whose update ends last, has been computed.
        """
        last = self.head - 1
        order = [*range(last), self.head, last, *range(self.head + 1, len(self.visits))]
        window = min(1 + self.num_slots, last)  # visits with a free slot each as a step begins
        order[:window] = self._by_readiness(order[:window])
        return tuple(order[:-1] if self.lookup else order)

    def _by_readiness(self, window: list[int]) -> list[int]:
        """Visits in the order in which their layers can have arrived.

        Eager updates end with the tail's, one by one: layers updated before them fill the link
        meanwhile.
        """
        late = [visit for visit in window if self.visits[visit] in self.tail_layers]
        early = [visit for visit in window if visit not in late]
        order: list[int] = []
        for visit in late:
            room = COPIES_AN_UPDATE * self.pieces[self.visits[visit]]
            order += [*early[:room], visit]
            early = early[room:]
        return order + early

    @cached_property
    def tail(self) -> tuple[tuple[int, int], ...]:
        """The pieces `(layer, piece)` that eager updates come to last, in the order of forward.

        Gradients land in the order of backward, and the next forward begins at the other end. So
        the last ones, as many as there are slabs, wait there until all have landed and are then
        taken in the order of forward, which follows right behind.
        """
        if not self.eager:
            return ()
        landed = [
            (layer, piece)
            for layer in range(self.head, -1, -1)
            for piece in range(self.pieces[layer])
        ]
        return tuple(sorted(landed[-self.num_slabs :]))

    @cached_property
    def tail_layers(self) -> frozenset[int]:
        """Layers of which a piece is in the tail."""
        return frozenset(layer for layer, _ in self.tail)

    @property
    def updates(self) -> tuple[int, ...]:
        """Layers in the order of their deferred updates: as they are streamed in, but for one.

        The embedding's gradient is the last to leave the device; the first decoder layer is updated
        meanwhile.
        """
        order = [self.visits[visit] for visit in self.arrivals[: self.num_layers]]
        if order[1] != self.head:
            order[:2] = order[1::-1]
        return tuple(order)

    @property
    def num_end_slots(self) -> int:
        """Slots behind the `num_slots` of decoder layers: see `end_slot`."""
        return 2 if self.tied else 1

    def end_slot(self, layer: int) -> int:
        """The slot of the embedding or the head.

        They take turns in one; but a tied embedding stays, and its head has a second one.
        """
        return self.num_slots + (1 if self.tied and layer == self.head else 0)

    def recomputes(self, layer: int) -> bool:
        """Whether a layer is computed again before its backward.

        The embedding's graph is kept: it is a list of token ids, as a rule.
        """
        return 0 < layer < self.head and layer not in self.kept

    def weights(self, layer: int) -> list[Buffer]:
        """All of a layer's weights; eager updates of its pieces run at the same time."""
        pieces = self.pieces[layer] if self.eager else 1
        return [Buffer("weights", layer, piece) for piece in range(pieces)]

    def input_of(self, layer: int, micro_batch: int) -> Buffer:
        """The device buffer that holds a layer's input."""
        if self.offload and self.recomputes(layer):
            return Buffer("ring", layer % 2, micro_batch)
        return Buffer("input", layer, micro_batch)
