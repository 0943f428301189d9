"""Run a schedule: look up the work of each op and hand it to its lane. No decisions are made here.

[Note: Issue order]
Python state (which layer a slot holds, which graph belongs to a micro-batch) changes where ops are
issued, each lane on its thread. What the waits order is issued in that order; the schedule's proof
says that this orders all that touches one buffer, and the state of a buffer is part of it. State of
no buffer is either one lane's own or bound to the op when it is submitted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megatrain_cli.errors import DeviceError, InternalError, MegatrainError
from megatrain_cli.pipeline.buffers import Buffers
from megatrain_cli.pipeline.compute import Compute, MicroBatch, StepInputs, make_inputs
from megatrain_cli.pipeline.lanes import Fence, Lanes, Mark, Pending, Work
from megatrain_cli.pipeline.moves import Moves
from megatrain_cli.pipeline.ops import Kind, Op
from megatrain_cli.pipeline.trace import Span


class HostWork(Protocol):
    """What the host does for one step, on the threads of the lanes `host` and `update`."""

    def clip(self, loss: float, squared_norms: Sequence[float]) -> None:
        """All of the step's gradients are known. Raises to stop the run.

        Deferred updates begin after it; eager ones may have begun, and may not have ended.
        """

    def wants_gradients(self) -> bool:
        """Whether gradients may land; else the tiles keep those that they have.

        Asked before each gradient, or piece of one, leaves for the host and before it is moved on
        there: when the updates of its layer in the steps before have ended.
        """

    def update(
        self, layer: int, gradient: torch.Tensor, start: int, squared_norm: float
    ) -> Pending | None:
        """Update elements `[start, start + len(gradient))` of a layer's tile.

        Called once for each layer, or piece of it, in the order of the schedule. If the work goes
        on after the return, what is returned says when it has ended (a
        `concurrent.futures.Future` does), and the next call comes meanwhile. Until then tile and
        gradient are touched by nobody else.
        """


@dataclass(frozen=True)
class IssuedStep:
    """A step on its way.

    Attributes:
        start, loss, end: Points on the compute lane: before, after the loss, after backward. All
            are reached when `clipped` is.
        clipped: Reached when `HostWork.clip` has returned and all gradients are on the host;
            updates may still be pending.
        num_targets: Supervised tokens.
    """

    start: Mark
    loss: Mark
    end: Mark
    clipped: Fence
    num_targets: int


@dataclass
class Score:
    """Rows that are being evaluated.

    Attributes:
        num_targets: Supervised tokens.
        told: Reached when the loss is known.
        loss_sum: Of all of them; not known before.
    """

    num_targets: int
    told: Fence = field(init=False)
    loss_sum: float = math.nan


class Executor:
    """Runs one step after the other, and evaluations between them.

    Args:
        ops: One proved step.
        hidden_size: Width of the hidden states.
        poison: Fill slots with NaN when they are given back, to show reads that come too late.
        evaluation: The proved ops of an evaluation that may come between two steps.
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
        evaluation: tuple[Op, ...] = (),
    ) -> None:
        self._ops, self._lanes, self._buffers = ops, lanes, buffers
        self._evaluation = evaluation
        self._compute, self._moves = compute, moves
        self._hidden_size, self._poison = hidden_size, poison
        self._works: dict[Kind, Callable[[Op, StepInputs, HostWork], Pending | None]] = {
            Kind.STREAM_IN: lambda op, step, host: moves.stream_in(op),
            Kind.FORWARD: lambda op, step, host: compute.forward(op, step),
            Kind.LOSS: lambda op, step, host: compute.loss(op, step),
            Kind.RECOMPUTE: lambda op, step, host: compute.recompute(op, step),
            Kind.BACKWARD: lambda op, step, host: compute.backward(op, step),
            Kind.REPORT: lambda op, step, host: compute.report(),
            Kind.STREAM_OUT: lambda op, step, host: (
                moves.stream_out(op) if host.wants_gradients() else None
            ),
            Kind.ACCUMULATE: lambda op, step, host: (
                moves.accumulate(op) if host.wants_gradients() else None
            ),
            Kind.OFFLOAD: lambda op, step, host: buffers.hidden.move(op, self._shape(op, step)),
            Kind.FETCH: lambda op, step, host: buffers.hidden.move(op, self._shape(op, step)),
            Kind.CLIP: lambda op, step, host: self._clip(host),
            Kind.UPDATE: lambda op, step, host: self._update(op, host),
        }
        self._parts: dict[Kind, Callable[[Op, StepInputs, Score], None]] = {
            Kind.STREAM_IN: lambda op, step, score: moves.stream_in(op),
            Kind.FORWARD: lambda op, step, score: compute.forward(op, step),
            Kind.SCORE: lambda op, step, score: compute.score(op, step),
            Kind.REPORT: lambda op, step, score: compute.report(),
            Kind.TELL: lambda op, step, score: self._tell(score),
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
            host: Called on the host's lanes when gradients are there.
            seed: Random seed of (layer, micro-batch), for dropout; the same in recompute.
        """
        step = make_inputs(batch, seed)
        self._begin(batch)
        start = loss = end = self._lanes.mark()
        clipped = self._lanes.fence()
        for op in self._ops:
            if op.kind is Kind.REPORT:
                # Before it and not behind: `clipped` says that the report has ended.
                end = self._lanes.mark()
            work = partial(self._run, op, partial(self._works[op.kind], op, step, host))
            self._lanes.submit(op, work, self._num_bytes(op, step))
            if op.kind is Kind.LOSS and op.last:
                loss = self._lanes.mark()
            elif op.kind is Kind.CLIP:
                clipped = self._lanes.fence()
        return IssuedStep(start, loss, end, clipped, step.num_targets)

    def evaluate(self, batch: Sequence[MicroBatch]) -> Score:
        """Issue an evaluation of as many rows as a step has and return, before it has ended.

        Waits on the device, or on the lanes' threads, for what is left of the step before. What is
        issued next may be another evaluation; a step only when the last of them is `told`.
        """
        assert self._evaluation
        step = make_inputs(batch, forward_only=True)
        self._begin(batch)
        score = Score(step.num_targets)
        for op in self._evaluation:
            work = partial(self._run, op, partial(self._parts[op.kind], op, step, score))
            self._lanes.submit(op, work, self._num_bytes(op, step))
        score.told = self._lanes.fence()
        return score

    def _begin(self, batch: Sequence[MicroBatch]) -> None:
        """What the lane that computes finds in hidden buffers and slots is of a new step."""
        self._buffers.hidden.use_shapes([(*mb.input_ids.shape, self._hidden_size) for mb in batch])
        for slot in self._buffers.slots:
            # Its weights are of the step before. No copy of that step is still to be issued: this
            # thread has issued the compute that reads it.
            slot.layer = None

    def take_spans(self) -> list[Span]:
        """What has ended since the last call, without waiting: read it when a step is `clipped`.

        All of that step is in it but the updates under way, which come with the next one.
        """
        return self._lanes.take_spans()

    def close(self) -> None:
        """Release host memory. The lanes must have been closed."""
        self._buffers.close()
        self._moves.close()

    def _run(self, op: Op, work: Work) -> Pending | None:
        with self._place(op):
            pending = work()
        if self._poison:
            self._poison_released(op)
        return None if pending is None else _Placed(pending, partial(self._place, op))

    @contextmanager
    def _place(self, op: Op) -> Iterator[None]:
        """Say of a failure where it happened."""
        try:
            yield
        except (MegatrainError, torch.OutOfMemoryError):  # say what to do about it already
            raise
        except Exception as error:  # of torch or the model: without a place it helps nobody
            reason = device_failure(error)
            if reason is not None:
                raise DeviceError(
                    f"The device failed in {self._named(op)} ({reason}). Look at the driver's log."
                ) from error
            raise InternalError(f"{self._named(op)} failed: {error}") from error

    def _named(self, op: Op) -> str:
        layouts = self._buffers.layouts
        layer = layouts[op.layer].layer.name if op.layer >= 0 else "the whole step"
        rows = "" if op.micro_batch is None else f", micro-batch {op.micro_batch}"
        return f"{op.kind} of {layer}{rows}"

    def _clip(self, host: HostWork) -> None:
        *squared_norms, loss = self._buffers.host_totals.tolist()
        host.clip(loss, squared_norms)

    def _tell(self, score: Score) -> None:
        score.loss_sum = float(self._buffers.host_totals[-1])

    def _update(self, op: Op, host: HostWork) -> Pending | None:
        gradient, start, squared_norm = self._moves.landed(op)
        return host.update(op.layer, gradient, start, squared_norm)

    def _shape(self, op: Op, step: StepInputs) -> tuple[int, ...]:
        """`(B, T, D)` of the op's micro-batch."""
        assert op.micro_batch is not None
        return (*step.batch[op.micro_batch].input_ids.shape, self._hidden_size)

    def _num_bytes(self, op: Op, step: StepInputs) -> int:
        """What an op moves over the link."""
        if op.kind in (Kind.STREAM_IN, Kind.STREAM_OUT):
            return self._moves.num_bytes(op)
        if op.kind in (Kind.OFFLOAD, Kind.FETCH):
            return math.prod(self._shape(op, step)) * self._buffers.dtype.itemsize
        return 0

    def _poison_released(self, op: Op) -> None:
        """Make any later read of a slot that this op gave back show as NaN."""
        for event in op.records:
            if event.name == "buffer_free":
                self._buffers.slots[event.buffer.number].flat.fill_(torch.nan)


# How libraries begin that pass on in words alone what a device answered.
_DEVICE_SAID = ("CUDA error", "CUDA driver error", "cuDNN error", "Triton Error [CUDA]")


def device_failure(error: Exception) -> str | None:
    """What a device that has failed said, in one line; None for an error that is none of its."""
    said = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.AcceleratorError):
        return said
    of_a_library = isinstance(error, RuntimeError) and said.startswith(_DEVICE_SAID)
    return said if of_a_library else None


class _Placed:
    """Pending work whose failure names its op."""

    def __init__(self, pending: Pending, place: Callable[[], AbstractContextManager[None]]) -> None:
        self._pending, self._place = pending, place

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        self._pending.add_done_callback(lambda _: fn(self))

    def result(self) -> object:
        with self._place():
            return self._pending.result()
