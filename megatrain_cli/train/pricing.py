"""What each remedy frees and costs: the run is planned and played again with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatrain_cli.config.schema import KeepLayers, TrainConfig
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.plan import RunPlan, make_plan
from megatrain_cli.plan.remedies import Way, device_ways, host_ways
from megatrain_cli.plan.verdict import DOES_NOT_FIT, FITS, has_room
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
    """

    way: Way
    text: str
    host_freed: int
    device_freed: int
    step_seconds: float | None
    more_seconds: float | None
    learns_the_same: bool
    verdict: str

    def line(self) -> str:
        """For people."""
        freed = {"host RAM": self.host_freed, "GPU memory": self.device_freed}
        parts = [f"{show_bytes(n)} of {place}" for place, n in freed.items() if n > 0]
        text = f"{self.text} frees {' and '.join(parts)}"
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
    then the most bytes. A run that hardly fits is given only what makes it fit with room.
    """
    if plan.verdict == FITS:
        return ()
    found: dict[str, Remedy] = {}
    length, on_gpu = plan.decisions.max_length, plan.machine.has_cuda
    before, (host, _) = step_seconds(plan, skeleton), plan.places["host RAM"]
    for place, (needed, limit) in plan.places.items():
        if has_room(needed, limit):
            continue
        on_host = place == "host RAM"
        of_host = host_ways(config, length, on_gpu=on_gpu)
        for way in of_host if on_host else device_ways(config, length):
            if not way.is_new(config):
                continue
            remedy = _priced(config, skeleton, plan, way, before)
            helps = remedy.host_freed > 0 if on_host else remedy.device_freed > 0
            if host <= plan.machine.host_bytes < host - remedy.host_freed:
                continue  # the shortage would only move to the host
            if helps and (plan.verdict == DOES_NOT_FIT or remedy.verdict == FITS):
                found[remedy.text] = remedy
    return tuple(sorted(found.values(), key=_cost))


def starving_slabs(skeleton: Skeleton, plan: RunPlan) -> str | None:
    """A line where twice as many gradient slabs would shorten a step; None where nothing says so.

    Played with the machine's rates; without rates nothing is known.
    """
    slabs = plan.decisions.num_slabs
    before = step_seconds(plan, skeleton)
    if not slabs or before is None:
        return None
    more = replace(plan, decisions=replace(plan.decisions, num_slabs=2 * slabs))
    after = step_seconds(more, skeleton)
    if after is None or after > before * (1 - _NOTED_GAIN):
        return None
    return (
        f"gradients wait for slabs: with `pipeline.grad_slabs: {2 * slabs}` a step takes "
        f"{after:.3g} s in place of {before:.3g} s"
    )


def lines_of(remedies: Sequence[Remedy]) -> list[str]:
    """For people, a line a remedy."""
    return [f"remedy: {remedy.line()}" for remedy in remedies]


def _priced(
    config: TrainConfig, skeleton: Skeleton, plan: RunPlan, way: Way, before: float | None
) -> Remedy:
    changed = way.apply(config)
    then = make_plan(
        changed, skeleton.spec, skeleton.layouts, plan.machine, plan.known, advised=False
    )
    after = step_seconds(then, skeleton)
    return Remedy(
        way=way,
        text=way.text(config),
        host_freed=plan.host_bytes - then.host_bytes,
        device_freed=plan.device_bytes - then.device_bytes,
        step_seconds=after,
        more_seconds=None if before is None or after is None else after - before,
        learns_the_same=way.learns_the_same(config),
        verdict=then.verdict,
    )


def step_seconds(plan: RunPlan, skeleton: Skeleton) -> float | None:
    """Of a step that is played; None where no rates are known."""
    found = forecast(plan, skeleton.spec, None)
    return None if found is None else found.step_seconds


def _cost(remedy: Remedy) -> tuple[bool, float, int]:
    more = remedy.more_seconds or 0.0
    return not remedy.learns_the_same, more, -(remedy.host_freed + remedy.device_freed)
