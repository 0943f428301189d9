"""What the compute lane does: one layer and one micro-batch at a time, on the current stream."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain_cli.errors import InternalError
from megatrain_cli.model.attention import PackedRows, find_documents
from megatrain_cli.model.functions import Functions
from megatrain_cli.model.handles import saved_weights
from megatrain_cli.model.loss import chunked_loss, summed_loss, supervised_positions
from megatrain_cli.model.recorder import LayerArgs
from megatrain_cli.model.template import Head, LayerTemplate, Prologue
from megatrain_cli.pipeline.buffers import Buffers
from megatrain_cli.pipeline.gradients import GradientCollector
from megatrain_cli.pipeline.ops import Op
from megatrain_cli.pipeline.shape import PipelineShape

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Rows on the host.

    Attributes:
        input_ids: `(B, T)` int64.
        labels: `(B, T)` int64, not shifted; -100 is no target.
        documents: `(B, T)` int32, the number of each token's document within its row, padding being
            one more document at the end; None is one document a row. Only where the model's
            attention is `packed`.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    documents: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class StepInputs:
    """What one step computes with.

    Attributes:
        batch: Its micro-batches.
        picked: Of each, the supervised positions and their targets.
        seed: Random seed of (layer, micro-batch), for dropout; None without dropout.
        forward_only: Nothing is kept for a backward.
        args: Of each micro-batch on its way, what its layers are given beside the hidden state.
    """

    batch: Sequence[MicroBatch]
    picked: Sequence[tuple[Positions, Positions]]
    seed: Callable[[int, int], int] | None
    forward_only: bool = False
    args: dict[int, tuple[LayerArgs, ...]] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        """Supervised tokens of the whole step."""
        return sum(len(targets) for _, targets in self.picked)

    @property
    def scale(self) -> float:
        """What one token's loss weighs, whatever micro-batch it is in."""
        return 1.0 / max(self.num_targets, 1)


def make_inputs(
    batch: Sequence[MicroBatch],
    seed: Callable[[int, int], int] | None = None,
    *,
    forward_only: bool = False,
) -> StepInputs:
    """Find the supervised positions of each micro-batch."""
    picked = [supervised_positions(mb.labels, mb.documents) for mb in batch]
    return StepInputs(batch, picked, seed, forward_only)


@dataclass(frozen=True)
class _Graph:
    """A layer's way back. Holds no output: the next layer's input buffer has a copy of it."""

    source: torch.Tensor | None
    leaves: list[torch.Tensor]
    output: GradientEdge


class Compute:
    """Forward, loss, recompute and backward of every layer."""

    def __init__(
        self,
        shape: PipelineShape,
        buffers: Buffers,
        prologue: Prologue,
        layers: Sequence[LayerTemplate],
        head: Head,
        functions: Functions,
        head_chunk: int,
        whole_chunk: int,
        tied: Sequence[str],
        device: torch.device,
    ) -> None:
        self._shape, self._buffers, self._device = shape, buffers, device
        self._prologue, self._layers, self._head = prologue, layers, head
        self._functions, self._head_chunk = functions, head_chunk
        self._whole = functions.whole_chunks(whole_chunk)
        names = [entry.param.name for entry in buffers.layouts[0].entries]
        places = [names.index(name) for name in tied]
        self._collector = GradientCollector(
            buffers.layouts, places, shape.num_micro_batches, device
        )
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def forward(self, op: Op, step: StepInputs) -> None:
        """One layer; its graph is kept only if the plan keeps its activations."""
        kept = not step.forward_only and not self._shape.recomputes(op.layer)
        with torch.set_grad_enabled(kept):
            source, leaves, result = self._apply(op, step, keep=kept)
        if kept:
            self._graphs[op.layer, _mb(op)] = _Graph(source, leaves, get_gradient_edge(result))
        self._buffers.hidden[op.writes[0]].copy_(result.detach())

    def recompute(self, op: Op, step: StepInputs) -> None:
        """Forward again, this time with a graph."""
        source, leaves, result = self._apply(op, step, keep=False)
        self._graphs[op.layer, _mb(op)] = _Graph(source, leaves, get_gradient_edge(result))

    def loss(self, op: Op, step: StepInputs) -> None:
        """The head: logits, loss and their backward over supervised positions."""
        mb = _mb(op)
        if mb == 0:
            self._collector.start_head()
        self._seed(op.layer, mb, step)
        total = self._total(first=mb == 0)
        head, tied, source, positions, targets = self._supervised(op, step)
        loss, gradient = chunked_loss(
            self._functions.chunk_loss,
            head,
            tied,
            source,
            targets,
            scale=step.scale,
            chunk=self._head_chunk,
            sums=[*self._collector.head_sums, *self._collector.tied_sums],
            whole=self._whole,
        )
        total += loss.double() * step.scale
        out = self._buffers.hidden[op.buffer("output_gradient")].flatten(0, 1)
        out.zero_()
        out.index_copy_(0, positions, gradient)
        if op.last:
            self._finish_gradient(op, [])

    def score(self, op: Op, step: StepInputs) -> None:
        """The head of an evaluation: the sum of the losses of supervised positions."""
        mb = _mb(op)
        total = self._total(first=mb == 0)
        head, tied, source, _, targets = self._supervised(op, step)
        # Eager even where layers are compiled: without a backward it takes next to nothing, and
        # its chunks are smaller than those that the plan has room for.
        total += summed_loss(
            self._functions.chunk_loss, head, tied, source, targets, chunk=self._head_chunk
        )
        del step.args[mb]

    def report(self) -> None:
        """Send the step's loss and norms to the host."""
        self._buffers.host_totals.copy_(self._buffers.totals, non_blocking=True)

    def backward(self, op: Op, step: StepInputs) -> None:
        """Through one layer's graph; the output gradient becomes that of the layer below."""
        mb = _mb(op)
        if op.layer == 0:
            del step.args[mb]  # host work may hold the step far into the next one
        graph = self._graphs.pop((op.layer, mb))
        above = self._buffers.hidden[op.buffer("output_gradient")]
        inputs = [*([] if graph.source is None else [graph.source]), *graph.leaves]
        gradients: Sequence[torch.Tensor | None]
        gradients = torch.autograd.grad([graph.output], inputs, [above], allow_unused=True)
        if graph.source is not None:
            below, *gradients = gradients
            assert below is not None
            above.copy_(below)
        self._collector.add(op.layer, gradients, first=mb == 0)
        if op.last:
            self._finish_gradient(op, gradients)

    def _apply(
        self, op: Op, step: StepInputs, *, keep: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor], torch.Tensor]:
        """Source, leaves and result of one layer."""
        mb = _mb(op)
        flat = self._buffers.slot(op).require(op.layer)
        self._seed(op.layer, mb, step)
        numel = self._buffers.layouts[op.layer].numel
        handles: AbstractContextManager[None] = nullcontext()
        if keep:
            handles = saved_weights(flat[:numel], lambda: self._run_of(op.layer)[:numel])
        if op.layer == 0:
            leaves = self._prologue.leaves(flat)
            rows = step.batch[mb]
            input_ids, packed = self._upload(rows.input_ids), None
            if rows.documents is not None:
                positions, starts = find_documents(rows.documents)
                packed = PackedRows(self._upload(positions), self._upload(starts))
            with handles:
                result, step.args[mb] = self._prologue(leaves, input_ids, packed)
            return None, leaves, result
        template = self._layers[op.layer - 1]
        leaves = template.leaves(flat)
        hidden = self._buffers.hidden[self._shape.input_of(op.layer, mb)]
        source = hidden.detach().requires_grad_()
        args = step.args[mb][op.layer - 1]
        with handles:
            return source, leaves, self._functions.layer(template, leaves, source, args)

    def _supervised(
        self, op: Op, step: StepInputs
    ) -> tuple[
        Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor
    ]:
        """Weights of the head, tied ones, hidden states `(N, D)`, their positions and targets."""
        mb = _mb(op)
        flat = self._buffers.slot(op).require(op.layer)
        embedding = flat[:0]
        if self._shape.tied:
            embedding = self._buffers.slots[self._shape.end_slot(0)].require(0)
        positions, targets = map(self._upload, step.picked[mb])
        source = self._buffers.hidden[self._shape.input_of(op.layer, mb)].flatten(0, 1)
        return (
            self._head.leaves(flat),
            self._head.tied_leaves(embedding),
            source.index_select(0, positions),
            positions,
            targets,
        )

    def _total(self, *, first: bool) -> torch.Tensor:
        """The loss so far, FP64 `()`."""
        total = self._buffers.totals[self._shape.num_layers]
        return total.zero_() if first else total

    def _run_of(self, layer: int) -> torch.Tensor:
        """The weights of a kept layer at its backward, wherever they were streamed to."""
        for slot in self._buffers.slots:
            if slot.layer == layer:
                return slot.flat
        raise InternalError(f"backward of layer {layer} ran without its weights on the device")

    def _finish_gradient(self, op: Op, gradients: Sequence[torch.Tensor | None]) -> None:
        out = self._buffers.gradient(op)
        self._buffers.totals[op.layer] = self._collector.finish(op.layer, gradients, out)

    def _seed(self, layer: int, mb: int, step: StepInputs) -> None:
        if step.seed is not None:
            torch.manual_seed(step.seed(layer, mb))

    def _upload(self, array: NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _mb(op: Op) -> int:
    assert op.micro_batch is not None
    return op.micro_batch
