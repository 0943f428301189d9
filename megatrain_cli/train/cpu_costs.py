"""What ops take on the CPU beside their products: weights, gradients, logits, memory, kernels.

A GPU does all of it in the shadow of its products.
"""

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.pipeline.ops import Kind, Op
from megatrain_cli.plan.cost import rows_of
from megatrain_cli.plan.heap import BLOCK_BYTES
from megatrain_cli.plan.kernels import most_lengths, product_shapes
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.plan.rates import CpuRates
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.plan.tiles import DTYPE_BYTES

# FP32 blocks as large as the logits: themselves, their logarithms, and the gradients of both.
_LOGIT_BLOCKS = 4


class CpuCosts:
    """Seconds of an op beyond its products, at the rates of the cores."""

    def __init__(self, plan: RunPlan, spec: ModelSpec, cpu: CpuRates) -> None:
        d = plan.decisions
        self._spec, self._fresh_rate = spec, cpu.fresh
        self._cores = cpu.of(d.dtype)
        self._row = self._cores.cost(spec.hidden_size).row
        self._width = DTYPE_BYTES[d.dtype]
        self._single = d.num_micro_batches == 1
        self._last = len(spec.layers) - 1
        _, self._tokens = rows_of(d, plan.machine, plan.known.rows)
        self._chunk = min(self._tokens, d.head_chunk)
        self._new_length = 0.0
        if plan.known.rows is not None:
            share = _new_lengths(plan.known.rows, d.num_micro_batches, most_lengths(spec))
            self._new_length = share * self._cores.new_product * len(product_shapes(spec))

    def __call__(self, op: Op) -> float:
        """Of a forward, recompute, backward, loss or score."""
        match op.kind:
            case Kind.BACKWARD:
                return self._weights(op) * 2 / 3 + self._gradient(op.layer) + self._sums(op)
            case Kind.LOSS:
                head = 0 if self._spec.tied else op.layer
                seconds = self._weights(op) + self._gradient(head) + self._logits()
                return seconds + self._sums(op)
            case _:
                is_first = op.layer == 1 and op.kind is not Kind.RECOMPUTE
                return self._weights(op) / 3 + (self._new_length if is_first else 0.0)

    def _weights(self, op: Op) -> float:
        """Reading a layer's weights in forward and in backward and writing their gradient, a row.

        An embedding is looked up.
        """
        if op.layer == 0:
            return 0.0
        tied_head = op.layer == self._last and self._spec.tied
        return self._row * self._spec.layers[0 if tied_head else op.layer].active_numel

    def _gradient(self, layer: int) -> float:
        """What new memory for a layer's gradients takes, a row."""
        return sum(
            self._fresh(param.numel * self._width) for param in self._spec.layers[layer].params
        )

    def _logits(self) -> float:
        vocab = self._spec.vocab_size
        seconds = self._tokens * vocab / self._cores.logits
        chunks, logits = self._tokens / self._chunk, self._chunk * vocab
        fresh = _LOGIT_BLOCKS * self._fresh(4 * logits)
        if self._width < 4:  # the product and its gradient, beside their FP32 forms
            fresh += 2 * self._fresh(self._width * logits)
        return seconds + chunks * fresh

    def _sums(self, op: Op) -> float:
        """Adding a row's gradients up; at last rounding, and a norm."""
        numel, sums = self._spec.layers[op.layer].numel, self._cores.sums
        shared = self._spec.embed.numel if self._spec.tied else 0
        seconds = 0.0
        if op.kind is Kind.LOSS:
            seconds = (numel + shared) / sums.more  # to zeros at first
        elif not self._single:
            seconds = numel / (sums.more if op.micro_batch else sums.first)
        if op.last:
            seconds += numel / sums.finish
            if op.layer == 0:
                seconds += shared / sums.more  # to the head's part
        return seconds

    def _fresh(self, num_bytes: float) -> float:
        """Of a block that is mapped when it is needed; smaller ones come again from the heap."""
        return num_bytes / self._fresh_rate if num_bytes >= BLOCK_BYTES else 0.0


def _new_lengths(rows: RowFacts, step_rows: int, most: int) -> float:
    """The share of rows for whose length there are no kernels: not yet, or no more."""
    if rows.lengths > most:
        return 1.0
    return min(1.0, rows.lengths / max(1, rows.steps * step_rows))
