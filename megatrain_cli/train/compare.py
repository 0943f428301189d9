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

# A plan further off than this is said to be so.
BYTES_OFF, SECONDS_OFF = 0.05, 0.15


@dataclass(frozen=True)
class Compared:
    """One figure; `planned` is None where no rates were known."""

    name: str
    planned: float | None
    measured: float
    tolerance: float
    is_bytes: bool = True

    def text(self) -> str:
        """Both numbers."""
        planned = "not planned" if self.planned is None else f"{self._show(self.planned)} planned"
        return f"{self.name} {planned}, {self._show(self.measured)} measured"

    @property
    def off(self) -> float:
        """How far above the plan the run was, as a share of the plan; below 0: under it."""
        if self.planned is None:
            return 0.0
        return self.measured / self.planned - 1

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
        figures.append(Compared("host RAM", plan.host_bytes, host, BYTES_OFF))
    if plan.machine.has_cuda:
        figures.append(Compared("GPU memory", plan.device_bytes, gpu_peak_bytes(), BYTES_OFF))
    if step_seconds:
        expected = forecast(plan, spec, None, None)
        planned = None if expected is None else expected.step_seconds
        middle = median(step_seconds[1:] or step_seconds)
        figures.append(Compared("a step", planned, middle, SECONDS_OFF, is_bytes=False))
    return lines_of(figures)


def waited_for_data(waits: Sequence[float], step_seconds: Sequence[float]) -> str:
    """One line on how long the steps were held up by their rows.

    Args:
        waits: Seconds, of each step.
        step_seconds: The same steps, these waits included.
    """
    total, longest = math.fsum(waits), max(waits)
    share = total / max(math.fsum(step_seconds), 1e-9)
    line = f"waited {total:.3g} s for data, {share:.1%} of all steps"
    if total:
        line += f"; longest {longest:.3g} s, in step {waits.index(longest) + 1} of {len(waits)}"
    return line


def lines_of(figures: Sequence[Compared]) -> list[str]:
    """All figures on one line; a second one names those that the plan had wrong."""
    if not figures:
        return []
    lines = ["; ".join(figure.text() for figure in figures)]
    wrong = [figure for figure in figures if abs(figure.off) > figure.tolerance]
    if wrong:
        parts = (
            f"{figure.name} was {abs(figure.off):.0%} {'more' if figure.off > 0 else 'less'}"
            for figure in wrong
        )
        lines.append(f"not as planned: {', '.join(parts)} than the plan said")
    return lines
