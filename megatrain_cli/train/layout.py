"""Rows become micro-batches, alike for training and for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain_cli.data.batch import join, make_micro_batches
from megatrain_cli.data.held_out import Documents
from megatrain_cli.data.pack import Packs
from megatrain_cli.pipeline.compute import MicroBatch
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.units import round_up

# Lengths of rectangles of rows are rounded up to this: matrix kernels like whole tiles, and fewer
# distinct shapes mean fewer allocations.
LENGTH_STEP = 64


@dataclass(frozen=True)
class StepRows:
    """What one optimizer step takes.

    Attributes:
        num_rows: Rows of data; the rest of the micro-batches is padding.
    """

    micro_batches: list[MicroBatch]
    num_rows: int


def lay_out(
    ids: Sequence[int], documents: Documents, packs: Packs | None, d: Decisions, pad_id: int
) -> StepRows:
    """Rows of one step, or of as many rows that are evaluated.

    Args:
        ids: Places in `packs` or, without, in `documents`; at most a step's rows.
        documents: What rows hold.
        packs: Which documents share a row; None where each is a row of its own.
        d: How rows are divided.
        pad_id: What to fill with.
    """
    lengths = None
    if packs is None:
        rows = [documents.row(i) for i in ids]
    else:
        groups = [[documents.row(i) for i in packs.row(id_)] for id_ in ids]
        lengths = [[len(tokens) for tokens, _ in group] for group in groups]
        rows = [join(group) for group in groups]
    length = None
    if d.compiled:
        length = d.max_length
    elif d.micro_batch_size > 1:
        longest = max(len(ids) for ids, _ in rows)
        length = min(round_up(longest, LENGTH_STEP), d.max_length)
    micro = make_micro_batches(
        rows,
        d.micro_batch_size,
        d.num_micro_batches,
        pad_id,
        length,
        d.max_length,
        lengths,
    )
    return StepRows([MicroBatch(m.input_ids, m.labels, m.documents) for m in micro], len(rows))
