"""What a run took beside what was planned, said at its end."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.probe.peaks import gpu_peak_bytes, host_peak_bytes
from megatrain_cli.train.assemble import Engine
from megatrain_cli.train.forecast import forecast
from megatrain_cli.units import show_bytes

# A plan further off than this is said to be so. Bytes that were not planned may end a run, those
# that were not needed cost little.
BYTES_OVER, BYTES_UNDER, SECONDS_OFF = 0.05, 0.02, 0.15


@dataclass(frozen=True)
class Compared:
    """One figure; `planned` is None where no rates were known."""

    name: str
    planned: float | None
    measured: float
    is_bytes: bool = True

    def text(self) -> str:
        """Both numbers."""
        measured = f"{self._show(self.measured)} measured"
        if self.planned is None:
            return f"{self.name} {measured}, not planned without the rates of `megatrain probe`"
        return f"{self.name} {self._show(self.planned)} planned, {measured}"

    @property
    def off(self) -> float:
        """How far above the run the plan was, as a share of the run; below 0: under it."""
        if self.planned is None:
            return 0.0
        return self.planned / self.measured - 1

    @property
    def is_right(self) -> bool:
        """Whether the plan was as near as a plan is meant to be."""
        if not self.is_bytes:
            return abs(self.off) <= SECONDS_OFF
        return -BYTES_UNDER <= self.off <= BYTES_OVER

    def _show(self, value: float) -> str:
        return show_bytes(round(value)) if self.is_bytes else f"{value:.3g} s"


def tell_compared(engine: Engine, seconds: Sequence[float], say: Callable[[str], None]) -> None:
    """Say how an engine's run came out, see `measured_beside_planned`."""
    for line in measured_beside_planned(engine.plan, engine.skeleton.spec, seconds):
        say(line)


def measured_beside_planned(
    plan: RunPlan, spec: ModelSpec, step_seconds: Sequence[float]
) -> list[str]:
    """The lines of this process's run.

    Args:
        plan: That was in force.
        spec: The model.
        step_seconds: Of each step, in order. The first one warms up and counts only where it is
            the only one.
    """
    figures = []
    host = host_peak_bytes()
    if host is not None:
        figures.append(Compared("host RAM", plan.host_bytes, host))
    if plan.machine.has_cuda:
        figures.append(Compared("GPU memory", plan.device_bytes, gpu_peak_bytes()))
    if step_seconds:
        expected = forecast(plan, spec, None)
        planned = None if expected is None else expected.step_seconds
        middle = median(step_seconds[1:] or step_seconds)
        figures.append(Compared("a step", planned, middle, is_bytes=False))
    return lines_of(figures)


def waited_for_data(waits: Sequence[float], step_seconds: Sequence[float], completed: int) -> str:
    """One line on how long the steps of this process were held up by their rows.

    Args:
        waits: Seconds, of each step.
        step_seconds: The same steps, these waits included.
        completed: Steps of the run before them.
    """
    total, longest = math.fsum(waits), max(waits)
    share = total / max(math.fsum(step_seconds), 1e-9)
    line = f"waited {total:.3g} s for data, {share:.1%} of all steps"
    if total:
        line += f"; longest {longest:.3g} s, in step {completed + waits.index(longest) + 1}"
    return line


def lines_of(figures: Sequence[Compared]) -> list[str]:
    """All figures on one line; a second one names those that the plan had wrong."""
    if not figures:
        return []
    lines = ["; ".join(figure.text() for figure in figures)]
    wrong = [figure for figure in figures if not figure.is_right]
    if wrong:
        parts = (
            f"{abs(figure.off):.0%} too {'much' if figure.off > 0 else 'little'} for {figure.name}"
            for figure in wrong
        )
        lines.append(f"not as planned: the plan had {', '.join(parts)}")
    return lines
