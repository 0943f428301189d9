"""How long a planned run takes on a machine that was measured: steps, saves, all of it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from megatrain_cli.config.schema import CheckpointSection, EvalSection
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.pipeline.forecast import Seconds, Timeline, play, play_in_turn
from megatrain_cli.pipeline.gateway import chunk_bytes_for
from megatrain_cli.pipeline.ops import Kind, Op
from megatrain_cli.plan.cost import flops_of, speed_of
from megatrain_cli.plan.decide import copy_threads
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.plan.rates import (
    IssueCost,
    IssueTimes,
    LinkRate,
    MachineRates,
    ThreadRate,
    rate_at,
)
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.plan.tiles import DTYPE_BYTES
from megatrain_cli.train.assemble import evaluation_of, schedule_of
from megatrain_cli.train.cpu_costs import CpuCosts
from megatrain_cli.units import show_duration, show_rate, show_seconds

# Of an op that moves a few bytes and waits for nothing: what it takes to issue it.
_ISSUE_SECONDS = 1e-4

# What issuing an op takes by what issuing its layer takes: views of weights and gradients, norms
# and events come with it. A backward op of 0.5B took 2.0 to 2.7 ms where layers took 1.6 to 1.9, a
# forward op 1.1 to 1.4 where they took 0.8 to 0.9 (H200 machines).
_ENGINE = 1.4

# What packing a layer takes beside copying: its parts are handed to threads and waited for, while
# other threads issue (layers of 30 and of 154 MB, H200).
_PACK_SECONDS = 1e-3

# Micro-batches of a step that are played. Where it has more, those between the first and the last
# are alike: each of the played ones then stands for several, so that a plan takes no longer.
_PLAYED = 8


@dataclass(frozen=True)
class Forecast:
    """What to expect, with full rows.

    Attributes:
        step_seconds: From one step to the next.
        forward_seconds: Of it, until the loss is known; waiting for updates included.
        backward_seconds: From the loss to the last gradient on the host.
        tokens_per_second: Of all positions, padding included.
        tflops: 6 x parameters that a token meets x tokens.
        save_seconds: One checkpoint's writing; None where the disk was not measured.
        stall_seconds: Of it, what training waits for: all that the pool cannot take and one step
            cannot hide; all of it where `async_save` is off, and on the CPU, as the cores that
            compute also write.
        eval_seconds: One evaluation; None where there is none, or its rows are not known.
        run_seconds: All steps, what saves hold up, and evaluations whose rows are known; None where
            the number of steps depends on the data.
    """

    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    tokens_per_second: float
    tflops: float
    save_seconds: float | None
    stall_seconds: float | None
    eval_seconds: float | None
    run_seconds: float | None

    def lines(self) -> list[str]:
        """For people, a line a fact."""
        rate = f"{show_rate(self.tokens_per_second)} tokens/s, {self.tflops:.3g} TFLOPS"
        forward, backward = show_seconds(self.forward_seconds), show_seconds(self.backward_seconds)
        parts = f"{forward} until the loss, {backward} after it"
        found = [f"a step takes about {show_seconds(self.step_seconds)} ({rate}): {parts}"]
        if self.save_seconds is not None and self.stall_seconds is not None:
            found.append(
                f"a checkpoint takes about {show_seconds(self.save_seconds)} to write, of which "
                f"training waits {show_seconds(self.stall_seconds)}"
            )
        if self.eval_seconds is not None:
            found.append(f"an evaluation takes about {show_duration(self.eval_seconds)}")
        if self.run_seconds is not None:
            found.append(f"the run takes about {show_duration(self.run_seconds)}")
        return found

    def to_json(self) -> dict[str, object]:
        """For machines."""
        return asdict(self)


def forecast(
    plan: RunPlan,
    spec: ModelSpec,
    max_steps: int | None,
    saved: CheckpointSection | None = None,
    evaluated: EvalSection | None = None,
) -> Forecast | None:
    """Play the plan's schedule with the machine's rates; None where compute was not measured.

    Args:
        plan: Of the run.
        spec: Its model.
        max_steps: Of the run; None where epochs are counted.
        saved: When checkpoints are written, and whether training goes on meanwhile.
        evaluated: When the run is evaluated, if it has rows for that.
    """
    timeline, rates = timeline_of(plan, spec), plan.machine.rates
    if timeline is None or rates is None or plan.bounds is None:
        return None
    d = plan.decisions
    # Copies are played at the rates they have alone, and both ways together may be slower.
    step = max(timeline.step_seconds, plan.bounds.floor)
    loss = timeline.seconds_until_loss()
    save = stall = run = None
    known, saves = plan.known.rows, saved or CheckpointSection()
    judged = None if known is None or not known.eval_rows else _eval_seconds(plan, spec, known)
    if max_steps is None and known is not None:
        max_steps = known.steps
    if rates.disk is not None:
        save = plan.checkpoint_bytes / rates.disk.write
        pooled = d.pool_bytes / plan.checkpoint_bytes
        # On the CPU products wait for all cores, and one of them writes.
        hides = saves.async_save and plan.machine.has_cuda
        stall = max(0.0, save * (1 - pooled) - step) if hides else save
    if max_steps is not None:
        # The one at the end is waited for, whether or not it is its turn.
        on_the_way = (max_steps - 1) // saves.save_steps if saves.save_steps else 0
        run = max_steps * step + on_the_way * (stall or 0.0) + (save or 0.0)
        run += (judged or 0.0) * _evaluations(evaluated or EvalSection(), max_steps)
    return Forecast(
        step_seconds=step,
        forward_seconds=loss,
        backward_seconds=_end_of_backward(timeline) - loss,
        tokens_per_second=plan.bounds.tokens / step,
        tflops=plan.bounds.flops / step / 1e12,
        save_seconds=save,
        stall_seconds=stall,
        eval_seconds=judged,
        run_seconds=run,
    )


def timeline_of(plan: RunPlan, spec: ModelSpec) -> Timeline | None:
    """The ops of a step with their seconds; None where compute or link was not measured."""
    rates = plan.machine.rates
    if rates is None or plan.bounds is None or plan.bounds.compute is None:
        return None
    if plan.machine.has_cuda and rates.link is None:
        return None
    return _player(plan)(schedule_of(_shortened(plan)), _Durations(plan, spec, rates))


def _shortened(plan: RunPlan) -> RunPlan:
    """The plan with the micro-batches that are played."""
    d = plan.decisions
    played = replace(d, num_micro_batches=min(d.num_micro_batches, _PLAYED))
    return replace(plan, decisions=played)


def _player(plan: RunPlan) -> Callable[[Sequence[Op], Seconds], Timeline]:
    return play if plan.machine.has_cuda else play_in_turn


def _eval_seconds(plan: RunPlan, spec: ModelSpec, rows: RowFacts) -> float:
    """One evaluation: as many passes as its rows take, each of as many rows as a step's."""
    rates, d = plan.machine.rates, plan.decisions
    assert rates is not None
    ops = evaluation_of(_shortened(plan))
    one = _player(plan)(ops, _Durations(plan, spec, rates)).step_seconds
    return one * rows.eval_rows / (d.num_micro_batches * d.micro_batch_size)


def _evaluations(asked: EvalSection, steps: int) -> int:
    """How many a run makes: see `Evaluations`."""
    every = 0 if asked.steps is None else (steps - 1) // asked.steps
    return every + 1 + asked.at_start


def _end_of_backward(timeline: Timeline) -> float:
    return max(t.end for t in timeline.ops if t.op.kind in (Kind.BACKWARD, Kind.LOSS))


class _Durations:
    """Seconds of each op that is played, at the rates of a machine."""

    def __init__(self, plan: RunPlan, spec: ModelSpec, rates: MachineRates) -> None:
        self._plan, self._spec, self._rates = plan, spec, rates
        d = plan.decisions
        speed = speed_of(spec, d, plan.machine)
        assert speed is not None
        self._flops_per_second = speed
        rows, layers = plan.known.rows, range(len(spec.layers))
        self._flops = [flops_of(spec, d, plan.machine, layer, rows) for layer in layers]
        self._width = DTYPE_BYTES[d.dtype]
        self._more: Callable[[Op], float] = lambda op: 0.0
        if not plan.machine.has_cuda and rates.cpu is not None:
            self._more = CpuCosts(plan, spec, rates.cpu)
        self._issue = _issue_costs(plan, rates)
        self._chunk = chunk_bytes_for(rates, d.target_utilization)
        assert plan.bounds is not None
        # Of all updates together, at the rate of this run's masters and threads.
        self._update = plan.bounds.adam / spec.num_parameters
        more = max(0, d.num_micro_batches - _PLAYED)
        self._stands_for = 1 + more / (_PLAYED - 2)

    def __call__(self, op: Op, beside: bool) -> float:
        between = op.micro_batch is not None and 0 < op.micro_batch < _PLAYED - 1
        return self._once(op, beside=beside) * (self._stands_for if between else 1)

    def _once(self, op: Op, *, beside: bool) -> float:
        """Of an op that stands for itself; `beside` the optimizer or alone."""
        d, issue = self._plan.decisions, self._issue[beside]
        match op.kind:
            case Kind.STREAM_IN:
                return self._stream_in(self._numel(op) * self._width, beside=beside)
            case Kind.STREAM_OUT:
                return self._copy(self._numel(op) * self._width, to_host=True)
            case Kind.OFFLOAD | Kind.FETCH:
                tokens = d.micro_batch_size * d.max_length
                num_bytes = tokens * self._spec.hidden_size * self._width
                return self._copy(num_bytes, to_host=op.kind is Kind.OFFLOAD)
            case Kind.FORWARD | Kind.RECOMPUTE | Kind.SCORE:
                flops = self._flops[op.layer].forward
                return self._compute(flops, issue.forward) + self._more(op)
            case Kind.BACKWARD:
                flops = self._flops[op.layer].backward
                return self._compute(flops, issue.backward) + self._more(op)
            case Kind.LOSS:
                flops = self._flops[op.layer].forward + self._flops[op.layer].backward
                return self._compute(flops, issue.forward + issue.backward) + self._more(op)
            case Kind.ACCUMULATE:
                return self._numel(op) * self._width / self._shared(self._rates.copy)
            case Kind.UPDATE:
                return self._numel(op) * self._update
            case Kind.REPORT | Kind.CLIP | Kind.TELL:
                return _ISSUE_SECONDS

    def _numel(self, op: Op) -> int:
        """Parameters of the op's layer, or of its piece."""
        numel, size = self._spec.layers[op.layer].numel, self._plan.decisions.slab_numel
        if op.piece is None:
            return numel
        return max(0, min(size, numel - op.piece * size))

    def _compute(self, flops: float, issue: float) -> float:
        """The device computes, or waits for the thread that issues."""
        num_micro_batches = self._plan.decisions.num_micro_batches
        return max(issue, _ISSUE_SECONDS + flops / num_micro_batches / self._flops_per_second)

    def _stream_in(self, num_bytes: int, *, beside: bool) -> float:
        seconds = self._copy(num_bytes, to_host=False)
        if self._plan.decisions.pin_store or self._rates.copy_to_pinned is None:
            return seconds
        packed = self._shared(self._rates.copy_to_pinned)
        if beside and self._rates.beside is not None:
            packed = min(packed, self._rates.beside.copy_to_pinned)
        # Chunks are packed while others are on the link, but for the last.
        last = (num_bytes - 1) % self._chunk + 1
        packing = _PACK_SECONDS + num_bytes / packed + self._copy(last, to_host=False)
        return max(seconds, packing)

    def _shared(self, rates: Sequence[ThreadRate]) -> float:
        """Bytes a second of one pool of copying threads; beside a GPU the other copies too.

        Weights are packed and gradients taken in at the same time: in backward.
        """
        machine = self._plan.machine
        pools = 2 if machine.has_cuda else 1
        return rate_at(rates, pools * copy_threads(machine)) / pools

    @property
    def _in_ram(self) -> float:
        """Bytes a second that all cores copy."""
        return rate_at(self._rates.copy, self._plan.machine.num_cores)

    def _copy(self, num_bytes: int, *, to_host: bool) -> float:
        if not self._plan.machine.has_cuda:
            return num_bytes / self._in_ram
        assert self._rates.link is not None
        point = _nearest(self._rates.link, num_bytes)
        return num_bytes / (point.to_host if to_host else point.to_device)


def _issue_costs(plan: RunPlan, rates: MachineRates) -> tuple[IssueCost, IssueCost]:
    """Of an op of the compute lane, alone and beside the optimizer; nothing if not measured.

    Of a pageable store threads pack weights and take gradients in all through a step.
    """
    if rates.compute is None or not plan.machine.has_cuda:
        return IssueCost(0.0, 0.0), IssueCost(0.0, 0.0)
    compiled = rates.compute.compiled_issue if plan.decisions.compiled else None
    bare = compiled or rates.compute.issue or IssueCost(0.0, 0.0)
    alone = busy = IssueTimes(1.0, 1.0)
    if rates.beside is not None:
        alone = alone if plan.decisions.pin_store else rates.beside.copies
        optimizer = rates.beside.optimizer
        busy = IssueTimes(
            max(alone.forward, optimizer.forward), max(alone.backward, optimizer.backward)
        )
    return _issued(bare, alone), _issued(bare, busy)


def _issued(bare: IssueCost, times: IssueTimes) -> IssueCost:
    return IssueCost(
        _ENGINE * bare.forward * times.forward, _ENGINE * bare.backward * times.backward
    )


def _nearest(link: tuple[LinkRate, ...], num_bytes: int) -> LinkRate:
    """What was measured with the largest copy that is no larger."""
    return next((p for p in reversed(link) if p.num_bytes <= num_bytes), link[0])
