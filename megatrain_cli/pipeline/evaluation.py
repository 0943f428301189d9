"""Build the ops of an evaluation: forward, and the loss of some rows.

Layers come as in a step's forward: in the same order, into the same slots, every micro-batch
through a layer while it is there. Layer inputs lie in the buffers that a step has for them anyway,
so an evaluation needs no memory of its own. It begins right behind a step: layer by layer it waits
for updates that are still under way, for slots and for inputs, as the next step would. `TELL` is
its end: all else of it, and of the step before, has ended then.
"""

from megatrain_cli.pipeline.hazards import add_waits_between
from megatrain_cli.pipeline.ops import Buffer, Kind, Op
from megatrain_cli.pipeline.schedule import build_schedule
from megatrain_cli.pipeline.shape import PipelineShape


def build_with_evaluation(shape: PipelineShape) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The ops of one step, and those of an evaluation of as many micro-batches.

    The step's ops are those of `build_schedule` and record what the evaluation waits for. Before
    the next step is issued, `TELL` must have ended.
    """
    step = build_schedule(shape)
    return add_waits_between(step, _forward(shape))


def _forward(shape: PipelineShape) -> list[Op]:
    ops: list[Op] = []
    free = list(range(shape.num_slots))  # of decoder layers, that given back first in front
    slot_of: dict[int, Buffer] = {}
    coming = [shape.visits[visit] for visit in shape.arrivals[: shape.num_layers]]

    def stream_in() -> None:
        while coming:
            layer = coming[0]
            if 0 < layer < shape.head:
                if not free:
                    return
                slot = free.pop(0)
            else:
                slot = shape.end_slot(layer)
                if layer == shape.head and slot == shape.end_slot(0) and 0 in slot_of:
                    return  # until the embedding has been read
            coming.pop(0)
            slot_of[layer] = Buffer("slot", slot)
            ops.append(
                Op(
                    Kind.STREAM_IN,
                    layer,
                    reads=tuple(shape.weights(layer)),
                    writes=(slot_of[layer],),
                )
            )

    for layer in range(shape.num_layers):
        stream_in()
        slot = slot_of[layer]
        for mb in range(shape.num_micro_batches):
            reads = [slot, *([shape.input_of(layer, mb)] if layer else [])]
            if layer < shape.head:
                writes = (shape.input_of(layer + 1, mb),)
                ops.append(Op(Kind.FORWARD, layer, mb, reads=tuple(reads), writes=writes))
                continue
            if shape.tied:
                reads.append(slot_of[0])
            ops.append(Op(Kind.SCORE, layer, mb, reads=tuple(reads)))
        if 0 < layer < shape.head:
            free.append(slot_of.pop(layer).number)
        elif layer == 0 and not shape.tied:
            del slot_of[0]
    totals = Buffer("totals")
    ops.append(Op(Kind.REPORT, -1, writes=(totals,)))
    ops.append(Op(Kind.TELL, -1, reads=(totals,)))
    return ops
