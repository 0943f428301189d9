"""What each remedy frees and costs: the run is planned and played again with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from megatrain_cli.config.schema import KeepLayers, TrainConfig
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.plan import HOST_RAM, RunPlan, make_plan
from megatrain_cli.plan.remedies import Way, device_ways, host_ways
from megatrain_cli.plan.verdict import DOES_NOT_FIT, FITS, TIGHT, show_places
from megatrain_cli.train.forecast import forecast
from megatrain_cli.units import show_bytes, show_seconds

# More slabs that make a step this much shorter are worth a word.
_NOTED_GAIN = 0.02
# Of a step: what differs by less is as long.
_NOTED_SECONDS = 1e-3


@dataclass(frozen=True)
class Remedy:
    """A change of the config, and what follows from it.

    Attributes:
        way: What to set.
        text: The same for people, without what is set already.
        host_freed: Bytes of host RAM; below 0 where it takes more.
        device_freed: Bytes of GPU memory.
        step_seconds: Of a step with it; None where no rates are known.
        more_seconds: That a step takes longer with it.
        learns_the_same: What is learnt stays as it was.
        verdict: Of the run with it.
        is_pair: Two ways, neither of which is enough alone.
    """

    way: Way
    text: str
    host_freed: int
    device_freed: int
    step_seconds: float | None
    more_seconds: float | None
    learns_the_same: bool
    verdict: str
    is_pair: bool = False

    def line(self) -> str:
        """For people."""
        freed = {"host RAM": self.host_freed, "GPU memory": self.device_freed}
        parts = [f"{show_bytes(n)} of {place}" for place, n in freed.items() if n > 0]
        # A tight run may keep more layers in what a remedy frees.
        text = f"{self.text} frees {' and '.join(parts)}" if parts else f"{self.text} gives room"
        taken = [f"takes {show_bytes(-n)} of {place}" for place, n in freed.items() if n < 0]
        text = ", ".join([text, *taken])
        if self.way.price:
            text += f" ({self.way.price})"
        if self.more_seconds is not None:
            text += f"; a step is {self._slower(self.more_seconds)}"
        return text if self.verdict == DOES_NOT_FIT else f"{text}; then it fits"

    def _slower(self, more: float) -> str:
        if abs(more) < _NOTED_SECONDS * (self.step_seconds or 0.0):
            return "as long"
        return f"{show_seconds(abs(more))} {'longer' if more > 0 else 'shorter'}"

    def to_json(self) -> dict[str, object]:
        """For machines."""
        changes = {
            key: value.model_dump() if isinstance(value, KeepLayers) else value
            for key, value in self.way.changes.items()
        }
        return {
            "changes": changes,
            "text": self.line(),
            "host_bytes_freed": self.host_freed,
            "gpu_bytes_freed": self.device_freed,
            "step_seconds": self.step_seconds,
            "more_step_seconds": self.more_seconds,
            "learns_the_same": self.learns_the_same,
            "verdict": self.verdict,
        }


def price(config: TrainConfig, skeleton: Skeleton, plan: RunPlan) -> tuple[Remedy, ...]:
    """The remedies of a run that does not fit, or hardly; those that cost the user least first.

    What changes nothing that is learnt comes before what does; of these the fewest more seconds,
    then the most bytes. Rows and lengths are halved until the run fits, or that place is large
    enough, if they can be. A run that hardly fits is given only what makes it fit with room: if no
    remedy does, the cheapest two that do together.
    """
    if plan.verdict == FITS:
        return ()
    length, on_gpu = plan.decisions.max_length, plan.machine.has_cuda
    of_host, of_device = host_ways(config, length, on_gpu=on_gpu), device_ways(config, length)
    trial = _Trial(config, skeleton, plan)
    if plan.verdict == TIGHT:
        found = _giving_room(trial, [*of_host, *of_device])
        return tuple(sorted(found, key=_cost))
    freeing: dict[str, Remedy] = {}
    host, _ = plan.places[HOST_RAM]
    for place in plan.places:
        if not _short(plan, place):
            continue
        on_host = place == HOST_RAM
        for way in of_host if on_host else of_device:
            if not way.is_new(config):
                continue
            remedy = trial.priced(*trial.taken_as_far_as_needed(way, place))
            helps = remedy.host_freed > 0 if on_host else remedy.device_freed > 0
            if host <= plan.machine.host_bytes < host - remedy.host_freed:
                continue  # the shortage would only move to the host
            if helps:
                freeing[remedy.text] = remedy
    return tuple(sorted(freeing.values(), key=_cost))


def _short(plan: RunPlan, place: str) -> bool:
    needed, limit = plan.places[place]
    return needed > limit


def _giving_room(trial: "_Trial", ways: Sequence[Way]) -> list[Remedy]:
    """Each way that gives a tight run room; where none does, the cheapest two that do."""
    named = {way.text(trial.config): way for way in ways if way.is_new(trial.config)}
    tried = [(way, trial.planned(way)) for way in named.values()]
    alone = [trial.priced(way, then) for way, then in tried if then.verdict == FITS]
    if alone:
        return alone
    before = sum(trial.plan.wanting.values())
    helping = [way for way, then in tried if sum(then.wanting.values()) < before]
    both = [pair for a, b in combinations(helping, 2) if (pair := a.beside(b)) is not None]
    planned = [(way, trial.planned(way)) for way in both]
    found = [trial.priced(way, then) for way, then in planned if then.verdict == FITS]
    return [replace(min(found, key=_cost), is_pair=True)] if found else []


def starving_slabs(config: TrainConfig, skeleton: Skeleton, plan: RunPlan) -> str | None:
    """A line where twice as many gradient slabs would shorten a step; None where nothing says so.

    Planned and played with the machine's rates; without rates nothing is known. Slabs that have no
    room are not named.
    """
    slabs = plan.decisions.num_slabs
    trial = _Trial(config, skeleton, plan)
    if not slabs or trial.before is None:
        return None
    then = trial.planned(Way({"pipeline.grad_slabs": 2 * slabs}))
    before, after = trial.before, step_seconds(then, skeleton)
    if after is None or after > before * (1 - _NOTED_GAIN):
        return None
    if then.verdict not in (FITS, plan.verdict):
        return None
    return (
        f"gradients wait for slabs: with `pipeline.grad_slabs: {2 * slabs}` a step takes "
        f"{after:.3g} s in place of {before:.3g} s"
    )


def lines_of(plan: RunPlan, remedies: Sequence[Remedy]) -> list[str]:
    """For people, a line a remedy; of a tight run that none gives room, one line on that."""
    wanting = show_places(plan.wanting)
    if plan.verdict == TIGHT and not remedies:
        more = " and ".join(plan.wanting)
        return [
            f"remedy: no change and no two give it the {wanting}: use a machine with more {more}"
        ]
    none = f"no change alone gives it the {wanting}; "
    return [f"remedy: {none * remedy.is_pair}{remedy.line()}" for remedy in remedies]


class _Trial:
    """Plans a run again with other values."""

    def __init__(self, config: TrainConfig, skeleton: Skeleton, plan: RunPlan) -> None:
        self.config, self.plan = config, plan
        self._skeleton = skeleton
        self.before = step_seconds(plan, skeleton)

    def planned(self, way: Way) -> RunPlan:
        """With what the way sets."""
        spec, layouts = self._skeleton.spec, self._skeleton.layouts
        asked, plan = way.apply(self.config), self.plan
        return make_plan(asked, spec, layouts, plan.machine, plan.known, advised=False)

    def taken_as_far_as_needed(self, way: Way, place: str) -> tuple[Way, RunPlan]:
        """The least of its steps after which the run fits, or that place does; else the first."""
        tried = [(step, self.planned(step)) for step in (way, *way.further)]
        fits = [step for step in tried if step[1].verdict != DOES_NOT_FIT]
        large_enough = [step for step in tried if not _short(step[1], place)]
        return [*fits, *large_enough, *tried][0]

    def priced(self, way: Way, then: RunPlan) -> Remedy:
        """What the way frees and costs; `then` is the plan with it."""
        before, after = self.before, step_seconds(then, self._skeleton)
        return Remedy(
            way=way,
            text=way.text(self.config),
            host_freed=self.plan.host_bytes - then.host_bytes,
            device_freed=self.plan.device_bytes - then.device_bytes,
            step_seconds=after,
            more_seconds=None if before is None or after is None else after - before,
            learns_the_same=way.learns_the_same(self.config),
            verdict=then.verdict,
        )


def step_seconds(plan: RunPlan, skeleton: Skeleton) -> float | None:
    """Of a step that is played; None where no rates are known."""
    found = forecast(plan, skeleton.spec, None)
    return None if found is None else found.step_seconds


def _cost(remedy: Remedy) -> tuple[bool, float, int]:
    more = remedy.more_seconds or 0.0
    return not remedy.learns_the_same, more, -(remedy.host_freed + remedy.device_freed)
