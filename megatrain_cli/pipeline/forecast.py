"""How long the ops of a step take together: the schedule played through with given durations.

The same ops that will run, on the same lanes, held by the same waits. An op may take longer while
the optimizer works, which takes RAM and cores from whatever runs beside it, and for no longer than
that: so whatever takes longer never makes a step shorter.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain_cli.pipeline.ops import Event, Kind, Lane, Op

Seconds = Callable[[Op, bool], float]
"""How long an op takes, alone or, with the second argument, while the optimizer works: no less."""

# Steps that are played: the first begins with an idle machine; from the second on they are alike.
_STEPS = 4


@dataclass(frozen=True)
class TimedOp:
    """An op with the seconds at which it begins and ends, counted from the step's first op."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step among others like it.

    Attributes:
        ops: In the order of the list. Updates may end after the step: the next one overlaps them.
        step_seconds: From one step to the next.
    """

    ops: tuple[TimedOp, ...]
    step_seconds: float

    def seconds_until_loss(self) -> float:
        """From the first op of the compute lane until the loss is known."""
        return max(timed.end for timed in self.ops if timed.op.kind is Kind.LOSS)


def play_in_turn(ops: Sequence[Op], seconds: Seconds) -> Timeline:
    """Ops one after the other, as the CPU does them: a step is their sum."""
    ends = list(accumulate(seconds(op, False) for op in ops))
    timed = zip(ops, [0.0, *ends], ends, strict=False)
    return Timeline(tuple(TimedOp(*one) for one in timed), ends[-1])


def play(ops: Sequence[Op], seconds: Seconds) -> Timeline:
    """Play a schedule, step after step, until steps are alike.

    Lanes work off their ops in order. Updates begin in order too and share the optimizer's threads:
    these are at one at a time, see [Note: The update lane] in `pipeline/ops.py`. The ops of a step
    are issued once the step before is clipped and its gradients are on the host.

    Args:
        ops: Of one step.
        seconds: How long each op takes.
    """
    lanes: dict[Lane, float] = defaultdict(float)
    records: dict[Event, float] = {}
    optimizer = 0.0  # when the optimizer's threads are free
    issued = before = 0.0
    timed: list[TimedOp] = []
    for _ in range(_STEPS):
        before, on_host, timed = issued, 0.0, []
        for op in ops:
            waits = [records[event] for event in op.waits if event in records]
            start = begins = max(lanes[op.lane], issued, *waits, 0.0)
            if op.lane is Lane.UPDATE:
                start = max(begins, optimizer)
            # The list has updates where they may begin, so those at work by now have been played.
            end = _end_of(op, start, start if op.lane is Lane.UPDATE else optimizer, seconds)
            lanes[op.lane] = end
            if op.lane is Lane.UPDATE:
                lanes[op.lane], optimizer = begins, end
            elif op.lane in (Lane.HOST, Lane.STREAM_OUT):
                on_host = max(on_host, end)
            records.update(dict.fromkeys(op.records, end))
            timed.append(TimedOp(op, start, end))
        issued = max(issued, on_host)
    shifted = tuple(TimedOp(t.op, t.start - before, t.end - before) for t in timed)
    return Timeline(shifted, issued - before)


def _end_of(op: Op, start: float, optimizer: float, seconds: Seconds) -> float:
    """When an op ends that is beside the optimizer until `optimizer`, and alone from then on."""
    alone = seconds(op, False)
    if start >= optimizer:
        return start + alone
    beside = seconds(op, True)
    if start + beside <= optimizer:
        return start + beside
    return optimizer + alone * (1 - (optimizer - start) / beside)
