"""A word where a step's micro-batches divide badly: planned and played with others beside it.

Those that pass through a layer at once divide a step's micro-batches, so 37 of them pass one by one
where 32 would fit, and 38 pass by 19.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.decide import most_joined
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.remedies import Way
from megatrain_cli.plan.verdict import FITS
from megatrain_cli.train.pricing import starving_slabs, step_seconds
from megatrain_cli.units import show_number, show_seconds

# A row that takes this many times as long as elsewhere is worth a word.
_NOTED = 1.1
# Micro-batches more or fewer that are tried.
_FURTHEST = 4
# A micro-batch may have this many times the tokens that are joined at most.
_LARGER = 2


@dataclass(frozen=True)
class _Tried:
    """Another division of a step, or another number of rows.

    Attributes:
        seconds: Of a step.
        rows: Of a step.
        together: Rows that pass through a layer at once.
    """

    way: Way
    seconds: float
    rows: int
    together: int

    def row_seconds(self, rows: int) -> float:
        """Of one row, beside a step of `rows`; more rows share what a step takes anyway."""
        return self.seconds / min(self.rows, rows)


def warned(config: TrainConfig, skeleton: Skeleton, plan: RunPlan) -> RunPlan:
    """The plan with what playing it otherwise warns of."""
    found = starving_slabs(config, skeleton, plan), poor_division(config, skeleton, plan)
    lines = tuple(line for line in found if line is not None)
    return replace(plan, warnings=(*plan.warnings, *lines))


def poor_division(config: TrainConfig, skeleton: Skeleton, plan: RunPlan) -> str | None:
    """A line where rows would pass more than a tenth faster in a step that divides better.

    The same rows in larger micro-batches come first: the updates stay the same. None without
    rates, where the run does not fit, where a rehearsal has found no room for what would pass
    together by the plan, and where nothing near is better.
    """
    train, d = config.train, plan.decisions
    free = replace(plan.known, joined=None)
    most = most_joined(config, skeleton.spec, plan.machine, free)
    before = step_seconds(plan, skeleton)
    if plan.shortfalls or d.joined >= most or before is None or plan.bounds is None:
        return None
    if before <= _NOTED * plan.bounds.floor:
        return None  # nothing is much faster than the floor

    def planned(asked: TrainConfig) -> RunPlan:
        spec, layouts = skeleton.spec, skeleton.layouts
        return make_plan(asked, spec, layouts, plan.machine, free, advised=False)

    if plan.known.joined is not None and planned(config).decisions.joined > d.joined:
        return None
    rows = train.micro_batch_size * train.gradient_accumulation_steps

    def tried(way: Way) -> _Tried | None:
        asked = way.apply(config)
        then = planned(asked)
        after = step_seconds(then, skeleton)
        if after is None or then.verdict not in (FITS, plan.verdict):
            return None
        made = asked.train.micro_batch_size * asked.train.gradient_accumulation_steps
        found = _Tried(way, after, made, then.decisions.micro_batch_size)
        return found if before / rows > _NOTED * found.row_seconds(rows) else None

    for ways in _ways(config, most, d.joined):
        found = [one for way in ways if (one := tried(way)) is not None]
        if found:
            best = min(found, key=lambda one: one.row_seconds(rows))
            return (
                f"{train.gradient_accumulation_steps} micro-batches a step divide badly: with "
                f"{show_number(d.micro_batch_size, 'row')} in a layer at once {rows} rows take "
                f"{show_seconds(before)}. Set {best.way.text(config)}: with "
                f"{show_number(best.together, 'row')} at once {best.rows} rows take "
                f"{show_seconds(best.seconds)}"
            )
    return None


def _ways(config: TrainConfig, most: int, joined: int) -> Iterator[list[Way]]:
    """What may divide better, the least change first."""
    rows, asked = config.train.micro_batch_size, config.train.gradient_accumulation_steps
    total, furthest = rows * asked, _LARGER * rows * most
    whole = [n for n in range(rows * joined + 1, min(total, furthest) + 1) if total % n == 0]
    # Multiples of a micro-batch up to the bound have been tried: they pass together by themselves.
    whole = [n for n in whole if n % rows or n // rows > most]
    yield [
        Way({"train.micro_batch_size": n, "train.gradient_accumulation_steps": total // n})
        for n in whole[:1]
    ]
    for more in range(1, _FURTHEST + 1):
        near = [
            n for n in (asked + more, asked - more) if n > 0 and _best_divisor(n, most) > joined
        ]
        yield [Way({"train.gradient_accumulation_steps": n}) for n in near]


def _best_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if number % n == 0)
