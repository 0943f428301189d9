"""Run a schedule: look up the work of each op and hand it to its lane. No decisions are made here.

[Note: Issue order]
Python state (which layer a slot holds, which graph belongs to a micro-batch) follows the order in
which ops are issued. The device follows the events. The schedule's proof says the two agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from megatrain_cli.errors import DeviceError, InternalError, MegatrainError
from megatrain_cli.pipeline.buffers import Buffers
from megatrain_cli.pipeline.compute import Compute, MicroBatch, StepInputs, make_inputs
from megatrain_cli.pipeline.lanes import Fence, Lanes, Mark
from megatrain_cli.pipeline.moves import Moves
from megatrain_cli.pipeline.ops import Kind, Lane, Op


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


class Executor:
    """Runs one step after the other.

    Args:
        ops: One proved step.
        hidden_size: Width of the hidden states.
        poison: Fill slots with NaN when they are given back, to show reads that come too late.
    """

    def __init__(
        self,
        ops: tuple[Op, ...],
        lanes: Lanes,
        buffers: Buffers,
        compute: Compute,
        moves: Moves,
        hidden_size: int,
        *,
        poison: bool = False,
    ) -> None:
        self._ops, self._lanes, self._buffers = ops, lanes, buffers
        self._compute, self._moves = compute, moves
        self._hidden_size, self._poison = hidden_size, poison
        self._works: dict[Kind, Callable[[Op, StepInputs, HostWork], None]] = {
            Kind.STREAM_IN: lambda op, step, host: moves.stream_in(op),
            Kind.FORWARD: lambda op, step, host: compute.forward(op, step),
            Kind.LOSS: lambda op, step, host: compute.loss(op, step),
            Kind.RECOMPUTE: lambda op, step, host: compute.recompute(op, step),
            Kind.BACKWARD: lambda op, step, host: compute.backward(op, step),
            Kind.STREAM_OUT: lambda op, step, host: moves.stream_out(op),
            Kind.ACCUMULATE: lambda op, step, host: moves.accumulate(op),
            Kind.OFFLOAD: lambda op, step, host: buffers.hidden.move(op),
            Kind.FETCH: lambda op, step, host: buffers.hidden.move(op),
            Kind.CLIP: lambda op, step, host: self._clip(host),
            Kind.UPDATE: lambda op, step, host: self._update(op, host),
        }

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
        step = make_inputs(batch, seed)
        self._buffers.hidden.use_shapes([(*mb.input_ids.shape, self._hidden_size) for mb in batch])
        for slot in self._buffers.slots:
            slot.layer = None  # its weights are of the step before
        start = loss = self._lanes.mark()
        clipped = self._lanes.fence()
        for op in self._ops:
            self._lanes.submit(op, partial(self._run, op, step, host))
            if op.kind is Kind.LOSS and op.last:
                loss = self._lanes.mark()
            elif op.kind is Kind.CLIP:
                clipped = self._lanes.fence()
        return IssuedStep(start, loss, self._lanes.mark(), clipped, step.num_targets)

    def close(self) -> None:
        """Release host memory. The lanes must have been drained."""
        self._buffers.close()
        self._moves.close()

    def _run(self, op: Op, step: StepInputs, host: HostWork) -> None:
        try:
            self._works[op.kind](op, step, host)
        except (MegatrainError, torch.OutOfMemoryError):  # say what to do about it already
            raise
        except torch.AcceleratorError as error:
            reason = str(error).splitlines()[0]
            raise DeviceError(
                f"The device failed in {self._named(op)} ({reason}). Look at the driver's log; the "
                "step was not finished and nothing was written."
            ) from error
        except Exception as error:  # of torch or the model: without a place it helps nobody
            raise InternalError(f"{self._named(op)} failed: {error}") from error
        if self._poison and op.lane is not Lane.HOST:
            self._poison_released(op)

    def _named(self, op: Op) -> str:
        layouts = self._buffers.layouts
        layer = layouts[op.layer].layer.name if op.layer >= 0 else "the whole step"
        rows = "" if op.micro_batch is None else f", micro-batch {op.micro_batch}"
        return f"{op.kind} of {layer}{rows}"

    def _clip(self, host: HostWork) -> None:
        *squared_norms, loss = self._buffers.host_totals.tolist()
        host.clip(loss, squared_norms)

    def _update(self, op: Op, host: HostWork) -> None:
        gradient, start = self._moves.landed(op)
        host.update(op.layer, gradient, start, float(self._buffers.host_totals[op.layer]))

    def _poison_released(self, op: Op) -> None:
        """Make any later read of a slot that this op gave back show as NaN."""
        for event in op.records:
            if event.name == "buffer_free":
                self._buffers.slots[event.buffer.number].flat.fill_(torch.nan)
