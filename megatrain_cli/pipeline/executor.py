"""Run a schedule: look up the work of each op and hand it to its lane. No decisions are made here.

[Note: Issue order]
Python state (which layer a slot holds, which graph belongs to a micro-batch) follows the order in
which ops are issued. The device follows the events. The schedule's proof says the two agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch

from megatrain_cli.errors import InternalError, MegatrainError
from megatrain_cli.model.handles import saved_weights
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.loss import chunked_loss, supervised_positions
from megatrain_cli.model.recorder import LayerArgs
from megatrain_cli.model.template import Head, LayerTemplate, Prologue
from megatrain_cli.pipeline.activations import HiddenBuffers
from megatrain_cli.pipeline.gradients import GradientCollector
from megatrain_cli.pipeline.lanes import Fence, Lanes, Mark
from megatrain_cli.pipeline.ops import Kind, Lane, Op
from megatrain_cli.pipeline.schedule import GRADIENT_BUFFERS, PipelineShape
from megatrain_cli.pipeline.slabs import SlabPool, piece_range
from megatrain_cli.pipeline.staging import Gateway, StagingBuffer
from megatrain_cli.store.master import MasterStore


@dataclass(frozen=True)
class MicroBatch:
    """Rows on the host: `input_ids` and `labels` are `(B, T)` int64; -100 is no target."""

    input_ids: np.ndarray
    labels: np.ndarray


class HostWork(Protocol):
    """What the host lane does for one step; called on the host lane's thread."""

    def clip(self, loss: float, squared_norms: Sequence[float]) -> None:
        """All of the step's gradients are known. Raises to stop the run before any update."""

    def update(self, layer: int, gradient: torch.Tensor, start: int, squared_norm: float) -> None:
        """Update elements `[start, start + len(gradient))` of a layer's tile."""


@dataclass(frozen=True)
class IssuedStep:
    """A step on its way.

    Attributes:
        start, loss, end: Points on the compute lane: before, after the loss, after backward.
        clipped: Reached when `HostWork.clip` has returned; updates may still be pending.
        num_targets: Supervised tokens.
    """

    start: Mark
    loss: Mark
    end: Mark
    clipped: Fence
    num_targets: int


@dataclass
class _Running:
    """One step's own state, so that the host lane may lag behind the issuing thread."""

    batch: Sequence[MicroBatch]
    picked: Sequence[tuple[np.ndarray, np.ndarray]]  # supervised positions, their targets
    scale: float  # 1 / supervised tokens of the whole step
    seed: Callable[[int, int], int] | None
    host: HostWork
    args: dict[int, tuple[LayerArgs, ...]] = field(default_factory=dict)


@dataclass
class _Graph:
    source: torch.Tensor | None
    leaves: list[torch.Tensor]
    result: torch.Tensor


class Executor:
    """Owns the device's buffers and runs one step after the other.

    Args:
        ops: One proved step.
        shape: What it was built from.
        store: Tiles in layer order; the only home of weights between steps.
        head_chunk: Positions per chunk of the head.
        max_elements: Elements of the largest `(B, T, D)` hidden state.
        tied: Names of the embedding's parameters that the head uses too.
        gateway: None if tiles can be copied from in place.
        slabs: None if gradients land in their tiles.
        poison: Fill slots with NaN when they are given back, to show reads that come too late.
    """

    def __init__(
        self,
        *,
        ops: tuple[Op, ...],
        shape: PipelineShape,
        lanes: Lanes,
        store: MasterStore,
        prologue: Prologue,
        layers: Sequence[LayerTemplate],
        head: Head,
        dtype: torch.dtype,
        device: torch.device,
        head_chunk: int,
        max_elements: int,
        hidden_size: int,
        tied: Sequence[str],
        gateway: Gateway | None,
        slabs: SlabPool | None,
        poison: bool = False,
    ) -> None:
        self._ops, self._shape, self._lanes, self._store = ops, shape, lanes, store
        self._prologue, self._layers, self._head = prologue, layers, head
        self._device, self._head_chunk, self._hidden_size = device, head_chunk, hidden_size
        self._gateway, self._slabs, self._poison = gateway, slabs, poison
        self._layouts: list[LayerLayout] = [tile.layout for tile in store.tiles]
        self._tied_at = self._layouts[-1].numel  # the embedding's place in the head's slot
        names = [entry.param.name for entry in self._layouts[0].entries]
        tied_places = [names.index(name) for name in tied]
        slot_numel = max(self.slot_numel(i) for i in range(shape.num_layers))
        self._slots = [StagingBuffer(slot_numel, dtype, device) for _ in range(shape.num_slots)]
        largest = max(layout.numel for layout in self._layouts)
        self._gradients = [
            torch.zeros(largest, dtype=dtype, device=device) for _ in range(GRADIENT_BUFFERS)
        ]
        self._collector = GradientCollector(
            self._layouts, tied_places, shape.num_micro_batches, device
        )
        self._hidden = HiddenBuffers(ops, max_elements, dtype, device)
        # One squared norm a layer, then the loss.
        self._totals = torch.zeros(shape.num_layers + 1, dtype=torch.float64, device=device)
        self._host_totals = torch.zeros(shape.num_layers + 1, dtype=torch.float64)
        if device.type == "cuda":
            self._host_totals = self._host_totals.pin_memory()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._works: dict[Kind, Callable[[Op, _Running], None]] = {
            Kind.STREAM_IN: self._stream_in,
            Kind.FORWARD: self._forward,
            Kind.LOSS: self._loss,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.STREAM_OUT: self._stream_out,
            Kind.ACCUMULATE: self._accumulate,
            Kind.OFFLOAD: lambda op, _: self._hidden.move(op),
            Kind.FETCH: lambda op, _: self._hidden.move(op),
            Kind.CLIP: self._clip,
            Kind.UPDATE: self._update,
        }

    def slot_numel(self, layer: int) -> int:
        """Elements that a layer needs in a slot; a tied head brings the embedding along."""
        numel = self._layouts[layer].numel
        return numel + (self._layouts[0].numel if self._borrows(layer) else 0)

    def run_step(
        self,
        batch: Sequence[MicroBatch],
        host: HostWork,
        seed: Callable[[int, int], int] | None = None,
    ) -> IssuedStep:
        """Issue one optimizer step and return, with host work possibly still pending.

        Args:
            batch: All of the step's micro-batches; their shapes may differ.
            host: Called on the host lane when gradients are there.
            seed: Random seed of (layer, micro-batch), for dropout; the same in recompute.
        """
        picked = [supervised_positions(mb.labels) for mb in batch]
        num_targets = sum(len(targets) for _, targets in picked)
        step = _Running(batch, picked, 1.0 / max(num_targets, 1), seed, host)
        self._hidden.use_shapes([(*mb.input_ids.shape, self._hidden_size) for mb in batch])
        for slot in self._slots:
            slot.layer = None  # its weights are of the step before
        start = loss = self._lanes.mark()
        clipped = self._lanes.fence()
        for op in self._ops:
            self._lanes.submit(op, partial(self._run, op, step))
            if op.kind is Kind.LOSS and op.last:
                loss = self._lanes.mark()
            elif op.kind is Kind.CLIP:
                clipped = self._lanes.fence()
        return IssuedStep(start, loss, self._lanes.mark(), clipped, num_targets)

    def close(self) -> None:
        """Release host memory. The lanes must have been drained."""
        for holder in (self._hidden, self._gateway, self._slabs):
            if holder is not None:
                holder.close()

    def _run(self, op: Op, step: _Running) -> None:
        try:
            self._works[op.kind](op, step)
        except (MegatrainError, torch.OutOfMemoryError):  # say what to do about it already
            raise
        except Exception as error:  # of torch or the model: without a place it helps nobody
            raise InternalError(f"{self._named(op)} failed: {error}") from error
        if self._poison and op.lane is not Lane.HOST:
            self._poison_released(op)

    def _named(self, op: Op) -> str:
        layer = self._layouts[op.layer].layer.name if op.layer >= 0 else "the whole step"
        rows = "" if op.micro_batch is None else f", micro-batch {op.micro_batch}"
        return f"{op.kind} of {layer}{rows}"

    # ------------------------------------------------------------------ stream_in, stream_out

    def _stream_in(self, op: Op, step: _Running) -> None:
        del step
        slot = self._slots[op.buffer("slot").number]
        slot.layer = op.layer
        numel = self._layouts[op.layer].numel
        self._copy_in(self._store.tiles[op.layer].weights, slot.flat[:numel])
        if self._borrows(op.layer):
            embed = self._store.tiles[0].weights
            self._copy_in(embed, slot.flat[numel : numel + embed.numel()])

    def _copy_in(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._gateway is None:
            target.copy_(source, non_blocking=True)
        else:
            self._gateway.copy(source, target)

    def _stream_out(self, op: Op, step: _Running) -> None:
        del step
        source = self._gradients[op.buffer("device_gradient").number]
        numel = self._layouts[op.layer].numel
        if self._slabs is None:
            target = self._store.tiles[op.layer].gradient
            assert target is not None
            target.copy_(source[:numel], non_blocking=True)
        else:
            start, end = piece_range(numel, op.piece, self._slabs.numel)
            slab = self._slabs[op.buffer("slab").number]
            slab[: end - start].copy_(source[start:end], non_blocking=True)
        self._send_total(op.layer)
        if op.layer == self._shape.head:
            self._send_total(self._shape.num_layers)

    def _send_total(self, index: int) -> None:
        self._host_totals[index : index + 1].copy_(
            self._totals[index : index + 1], non_blocking=True
        )

    # ------------------------------------------------------------------ compute

    def _forward(self, op: Op, step: _Running) -> None:
        kept = op.layer in self._shape.kept
        with torch.set_grad_enabled(kept):
            graph = self._apply(op, step, keep=kept)
        if kept:
            self._graphs[op.layer, self._mb(op)] = graph
        self._hidden[op.writes[0]].copy_(graph.result.detach())

    def _recompute(self, op: Op, step: _Running) -> None:
        self._graphs[op.layer, self._mb(op)] = self._apply(op, step, keep=False)

    def _apply(self, op: Op, step: _Running, *, keep: bool) -> _Graph:
        mb = self._mb(op)
        slot = self._slots[op.buffer("slot").number]
        flat = slot.require(op.layer)
        self._seed(op.layer, mb, step)
        if op.layer == 0:
            leaves = self._prologue.leaves(flat)
            input_ids = self._upload(step.batch[mb].input_ids)
            hidden, step.args[mb] = self._prologue(leaves, input_ids)
            return _Graph(None, leaves, hidden)
        template = self._layers[op.layer - 1]
        leaves = template.leaves(flat)
        source = self._hidden[self._shape.input_of(op.layer, mb)].detach().requires_grad_()
        args = step.args[mb][op.layer - 1]
        if not keep:
            return _Graph(source, leaves, template(leaves, source, args))
        numel = self._layouts[op.layer].numel
        with saved_weights(flat[:numel], lambda: self._slot_with(op.layer)[:numel]):
            return _Graph(source, leaves, template(leaves, source, args))

    def _loss(self, op: Op, step: _Running) -> None:
        mb = self._mb(op)
        flat = self._slots[op.buffer("slot").number].require(op.layer)
        if mb == 0:
            self._collector.start_head()
            self._totals[self._shape.num_layers].zero_()
        self._seed(op.layer, mb, step)
        positions, targets = map(self._upload, step.picked[mb])
        tied = self._head.tied_leaves(flat[self._tied_at :]) if self._shape.tied else []
        hidden = self._hidden[self._shape.input_of(op.layer, mb)].view(-1, self._hidden_size)
        loss, gradient = chunked_loss(
            self._head,
            self._head.leaves(flat),
            tied,
            hidden.index_select(0, positions),
            targets,
            scale=step.scale,
            chunk=self._head_chunk,
            sums=[*self._collector.head_sums, *self._collector.tied_sums],
        )
        self._totals[self._shape.num_layers] += loss.double() * step.scale
        out = self._hidden[op.buffer("output_gradient")].view(-1, self._hidden_size)
        out.zero_()
        out.index_copy_(0, positions, gradient)
        if op.last:
            self._finish_gradient(op, [])

    def _backward(self, op: Op, step: _Running) -> None:
        mb = self._mb(op)
        if op.layer == 0:
            del step.args[mb]  # host work may hold the step far into the next one
        graph = self._graphs.pop((op.layer, mb))
        above = self._hidden[op.buffer("output_gradient")]
        inputs = [*([] if graph.source is None else [graph.source]), *graph.leaves]
        gradients: Sequence[torch.Tensor | None]
        gradients = torch.autograd.grad([graph.result], inputs, [above], allow_unused=True)
        if graph.source is not None:
            below, *gradients = gradients
            assert below is not None
            above.copy_(below)
        self._collector.add(op.layer, gradients, first=mb == 0)
        if op.last:
            self._finish_gradient(op, gradients)

    def _finish_gradient(self, op: Op, gradients: Sequence[torch.Tensor | None]) -> None:
        out = self._gradients[op.buffer("device_gradient").number]
        numel = self._layouts[op.layer].numel
        self._totals[op.layer] = self._collector.finish(op.layer, gradients, out[:numel])

    # ------------------------------------------------------------------ host

    def _accumulate(self, op: Op, step: _Running) -> None:
        del step
        gradient = self._store.tiles[op.layer].gradient
        assert gradient is not None
        assert self._slabs is not None
        start, end = piece_range(gradient.numel(), op.piece, self._slabs.numel)
        gradient[start:end].copy_(self._slabs[op.buffer("slab").number][: end - start])

    def _clip(self, op: Op, step: _Running) -> None:
        del op
        totals = self._host_totals.tolist()
        step.host.clip(totals[-1], totals[:-1])

    def _update(self, op: Op, step: _Running) -> None:
        tile = self._store.tiles[op.layer]
        norm = float(self._host_totals[op.layer])
        if self._slabs is None or op.piece is None:
            assert tile.gradient is not None
            step.host.update(op.layer, tile.gradient, 0, norm)
            return
        start, end = piece_range(tile.layout.numel, op.piece, self._slabs.numel)
        slab = self._slabs[op.buffer("slab").number]
        step.host.update(op.layer, slab[: end - start], start, norm)

    # ------------------------------------------------------------------ small parts

    def _poison_released(self, op: Op) -> None:
        """Make any later read of a slot that this op gave back show as NaN."""
        for event in op.records:
            if event.name == "buffer_free":
                self._slots[event.buffer.number].flat.fill_(torch.nan)

    def _slot_with(self, layer: int) -> torch.Tensor:
        """The run of a kept layer at its backward, wherever it was streamed to."""
        for slot in self._slots:
            if slot.layer == layer:
                return slot.flat
        raise InternalError(f"backward of layer {layer} ran without its weights on the device")

    def _borrows(self, layer: int) -> bool:
        return layer == self._shape.head and self._shape.tied

    def _seed(self, layer: int, mb: int, step: _Running) -> None:
        if step.seed is not None:
            torch.manual_seed(step.seed(layer, mb))

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """To the device, on the current stream: only ever called inside an op of that stream."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    @staticmethod
    def _mb(op: Op) -> int:
        assert op.micro_batch is not None
        return op.micro_batch
