"""Build the ops of one optimizer step.

Layer-major: every micro-batch passes through a layer while its weights are on the device, so
weights cross the link twice and gradients once per step, whatever the accumulation count. The
layers are visited `0, 1, ..., U-1` and back to 0; the last is the head, whose forward and backward
are one op.

Which op must wait for which is not written here but *derived* from what the ops read and write
(`pipeline/hazards.py`), so a new op cannot forget a wait; `pipeline/verify.py` proves the result
without knowing how it was made.
"""

from dataclasses import dataclass, field

from megatrain_cli.pipeline.hazards import add_waits
from megatrain_cli.pipeline.ops import Buffer, Kind, Op
from megatrain_cli.pipeline.shape import PipelineShape

# Device gradient buffers: one is filled by backward while the other leaves for the host.
GRADIENT_BUFFERS = 2


def build_schedule(shape: PipelineShape) -> tuple[Op, ...]:
    """The ops of one step, in the order in which they are issued, with waits and records."""
    builder = _Builder(shape)
    for visit, layer in enumerate(shape.visits):
        builder.prefetch(visit - 1)
        builder.compute(visit, layer)
    builder.finish()
    return add_waits(builder.ops)


@dataclass
class _Builder:
    """Emits ops visit by visit and keeps track of what each slot and ring buffer holds."""

    shape: PipelineShape
    ops: list[Op] = field(default_factory=list)
    slot_of_visit: dict[int, int] = field(default_factory=dict)
    slot_layer: dict[int, int] = field(default_factory=dict)
    slot_busy_until: dict[int, int] = field(default_factory=dict)
    ring_layer: dict[int, int] = field(default_factory=dict)
    num_arrived: int = 0
    next_fetch: int = 0
    slabs_used: int = 0
    tail_slabs: dict[tuple[int, int], Buffer] = field(default_factory=dict)
    gradients_used: int = 0

    def prefetch(self, done: int) -> None:
        """Stream in and fetch for coming visits, as far as memory freed by visit `done` allows."""
        shape = self.shape
        for visit in shape.arrivals[self.num_arrived :]:
            layer = shape.visits[visit]
            slot = self._slot_with(layer)
            if slot is None:
                slot = self._slot_to_fill(done, visit)
                if slot is None:
                    break
                reads, writes = shape.weights(layer), [Buffer("slot", slot)]
                self._emit(Kind.STREAM_IN, layer, reads=reads, writes=writes)
                self.slot_layer[slot] = layer
            self.slot_of_visit[visit] = slot
            self.slot_busy_until[slot] = visit
            self.num_arrived += 1
        self._fetch_inputs(done)

    def compute(self, visit: int, layer: int) -> None:
        """All micro-batches of one visit, and the way out of the gradient when it is complete."""
        shape = self.shape
        slots = [Buffer("slot", self.slot_of_visit[visit])] if visit in self.slot_of_visit else []
        backward = visit > shape.head
        target = Buffer("device_gradient", self.gradients_used % GRADIENT_BUFFERS)
        for mb in range(shape.num_micro_batches):
            last = mb == shape.num_micro_batches - 1
            gradient = [target] if last else []
            above = Buffer("output_gradient", 0, mb)
            source = [shape.input_of(layer, mb)] if layer else []  # token ids come with the op
            if layer == shape.head:
                reads = [*slots, *source]
                if shape.tied:
                    reads.append(Buffer("slot", shape.end_slot(0)))
                self._emit(Kind.LOSS, layer, mb, last=last, reads=reads, writes=[above, *gradient])
            elif backward:
                reads = [*slots, *source]
                if shape.recomputes(layer):
                    self._emit(Kind.RECOMPUTE, layer, mb, reads=reads)
                self._emit(
                    Kind.BACKWARD, layer, mb, last=last, reads=reads, writes=[above, *gradient]
                )
            else:
                result = shape.input_of(layer + 1, mb)
                self._emit(Kind.FORWARD, layer, mb, reads=[*slots, *source], writes=[result])
                self._offload(layer + 1, mb, result)
        if layer == shape.head or backward:
            self.gradients_used += 1
            self._stream_out(layer, target)

    def finish(self) -> None:
        """Global norm, then the updates that have not been made yet."""
        shape = self.shape
        totals, coefficient = Buffer("totals"), Buffer("coefficient")
        self._emit(Kind.REPORT, -1, reads=[], writes=[totals])
        self._emit(Kind.CLIP, -1, reads=[totals], writes=[coefficient])
        for layer, piece in shape.tail:
            self._update_piece(layer, piece, self.tail_slabs[layer, piece])
        if not shape.eager:
            for layer in shape.updates:
                self._emit(
                    Kind.UPDATE,
                    layer,
                    reads=[Buffer("gradient", layer), totals, coefficient],
                    writes=[Buffer("weights", layer)],
                )

    def _stream_out(self, layer: int, source: Buffer) -> None:
        shape = self.shape
        if not shape.num_slabs:
            self._emit(Kind.STREAM_OUT, layer, reads=[source], writes=[Buffer("gradient", layer)])
            return
        for piece in range(shape.pieces[layer]):
            slab = Buffer("slab", self.slabs_used % shape.num_slabs)
            self.slabs_used += 1
            self._emit(Kind.STREAM_OUT, layer, piece=piece, reads=[source], writes=[slab])
            if not shape.eager:
                result = Buffer("gradient", layer)
                self._emit(Kind.ACCUMULATE, layer, piece=piece, reads=[slab], writes=[result])
            elif (layer, piece) in shape.tail:
                self.tail_slabs[layer, piece] = slab
            else:
                self._update_piece(layer, piece, slab)

    def _update_piece(self, layer: int, piece: int, slab: Buffer) -> None:
        result = Buffer("weights", layer, piece)
        self._emit(Kind.UPDATE, layer, piece=piece, reads=[slab], writes=[result])

    def _offload(self, layer: int, mb: int, source: Buffer) -> None:
        if source.kind != "ring":
            return
        self.ring_layer[source.number] = layer
        host = Buffer("host_input", layer, mb)
        self._emit(Kind.OFFLOAD, layer, mb, reads=[source], writes=[host])

    def _fetch_inputs(self, done: int) -> None:
        """Bring offloaded inputs back, in visit order, once their ring buffer has been read."""
        shape = self.shape
        self.next_fetch = max(self.next_fetch, shape.head + 1)
        while done >= shape.head and self.next_fetch < len(shape.visits):
            layer = shape.visits[self.next_fetch]
            ring = shape.input_of(layer, 0)
            if ring.kind == "ring" and self.ring_layer.get(ring.number) != layer:
                if self._ring_pending(ring.number, done):
                    break
                for mb in range(shape.num_micro_batches):
                    host = Buffer("host_input", layer, mb)
                    out = [shape.input_of(layer, mb)]
                    self._emit(Kind.FETCH, layer, mb, reads=[host], writes=out)
                self.ring_layer[ring.number] = layer
            self.next_fetch += 1

    def _ring_pending(self, ring: int, done: int) -> bool:
        """Whether the layer in a ring buffer still has its backward visit to come."""
        holder = self.ring_layer.get(ring)
        return holder is not None and holder in self.shape.visits[done + 1 :]

    def _slot_with(self, layer: int) -> int | None:
        """The slot that already holds a layer: at the turn, the last layers are still there."""
        return next((s for s, held in self.slot_layer.items() if held == layer), None)

    def _slot_to_fill(self, done: int, visit: int) -> int | None:
        """A slot no coming visit is assigned to; of several, that needed again the latest."""
        shape = self.shape
        layer = shape.visits[visit]
        mine = range(shape.num_slots)
        if not 0 < layer < shape.head:
            mine = range(shape.end_slot(layer), shape.end_slot(layer) + 1)
        idle = [s for s in mine if self.slot_busy_until.get(s, -1) <= done]
        rest = [shape.visits[v] for v in shape.arrivals[self.num_arrived :]]

        def next_use(slot: int) -> int:
            held = self.slot_layer.get(slot)
            return rest.index(held) if held in rest else len(rest)

        return max(idle, key=lambda s: (next_use(s), -s), default=None)

    def _emit(
        self,
        kind: Kind,
        layer: int,
        micro_batch: int | None = None,
        *,
        piece: int | None = None,
        last: bool = False,
        reads: list[Buffer],
        writes: list[Buffer] | None = None,
    ) -> None:
        op = Op(kind, layer, micro_batch, piece, last, tuple(reads), tuple(writes or ()))
        self.ops.append(op)
