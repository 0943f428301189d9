"""Config, model and machine decided: what a run will hold, where, and whether it fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.activations import choose_activations
from megatrain_cli.plan.checkpoints import checkpoint_bytes, kept_checkpoints, pool_bytes
from megatrain_cli.plan.cost import StepBounds, step_bounds
from megatrain_cli.plan.decide import Before, Decisions, Known, decide, ways_to_join
from megatrain_cli.plan.estimates import Sizes
from megatrain_cli.plan.hiding import Attempt, fewest_that_hide
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.memory import DEVICE, MAPPED, PlanLine, bill
from megatrain_cli.plan.remedies import Way, advise, device_ways, host_ways
from megatrain_cli.plan.summary import checkpoint_text, speed_lines, summary_of
from megatrain_cli.plan.verdict import DOES_NOT_FIT, FITS, TIGHT, short_of_room, verdict_line
from megatrain_cli.plan.warnings import warnings_of
from megatrain_cli.units import GIB, show_bytes

HOST_RAM, GPU_MEMORY = "host RAM", "GPU memory"

# What `activations: auto` leaves free, of RAM and of the device, for whatever else may come.
SPARE_BYTES = 1 * GIB


@dataclass(frozen=True)
class RunPlan:
    """The plan in force.

    Attributes:
        lines: The bill, by owner.
        layer_numels: Elements of each layer's run, in order.
        tied: Whether the head shares the embedding's weights.
        lookup: Whether the embedding's backward reads no weights.
        known: What it was made with beside config, model and machine.
        shortfalls: One line for each place where the bill exceeds what there is, with what would
            help; empty if it fits.
        bounds: How short a step can be; None on a machine that was not measured.
        checkpoint_bytes: Of one checkpoint on disk.
        folder_bytes: Of all checkpoints that the run folder holds at once, as far as that is known.
        warnings: What a user may want to change in a run that fits.
        wanting: Bytes by place that it is short of room even without all that `auto` may give
            up: activations that are kept, the bounce pool, micro-batches that pass together. Empty
            where it has room.
        missing: The shortfalls alone, without what would help.
    """

    decisions: Decisions
    machine: MachineSpec
    layer_numels: tuple[int, ...]
    tied: bool
    lookup: bool
    lines: tuple[PlanLine, ...]
    shortfalls: tuple[str, ...]
    summary: tuple[tuple[str, str], ...]
    known: Known
    bounds: StepBounds | None = None
    checkpoint_bytes: int = 0
    folder_bytes: int = 0
    warnings: tuple[str, ...] = ()
    wanting: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`FITS`, `TIGHT` or `DOES NOT FIT`."""
        if self.shortfalls:
            return DOES_NOT_FIT
        return TIGHT if self.wanting else FITS

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Bytes that are needed and bytes that may be taken, by place."""
        needed = _total(self.lines, device=False)
        found = {HOST_RAM: (needed, self.machine.host_bytes)}
        if self.machine.has_cuda:
            found[GPU_MEMORY] = (self.device_bytes, self.machine.device_bytes)
        return found

    @property
    def verdict_line(self) -> str:
        """The verdict, and what is missing or stays free in each place."""
        return verdict_line(self.verdict, self.places, self.wanting)

    @property
    def host_bytes(self) -> int:
        """The peak resident set: all host memory, with pages of files that could leave."""
        return sum(line.num_bytes for line in self.lines if line.place != DEVICE)

    @property
    def device_bytes(self) -> int:
        """All device memory."""
        return _total(self.lines, device=True)

    def to_json(self) -> dict[str, object]:
        """For machines: decisions, bill, verdict."""
        return {
            "fits": not self.shortfalls,
            "verdict": self.verdict,
            "shortfalls": list(self.shortfalls),
            "host_peak_bytes": self.host_bytes,
            "gpu_peak_bytes": self.device_bytes,
            "warnings": list(self.warnings),
            "decisions": asdict(self.decisions),
            "machine": asdict(self.machine),
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_folder_bytes": self.folder_bytes,
            "bounds": None if self.bounds is None else self.bounds.to_json(),
            "lines": [asdict(line) for line in self.lines],
        }


def make_plan(
    config: TrainConfig,
    spec: ModelSpec,
    layouts: tuple[LayerLayout, ...],
    machine: MachineSpec,
    known: Known = Known(),  # noqa: B008  has no state
    *,
    advised: bool = True,
) -> RunPlan:
    """Decide and add up. Never raises for a run that does not fit: see `shortfalls`.

    Args:
        config: What was asked.
        spec: The model.
        layouts: Of all layers, in order.
        machine: What there is.
        known: What has been learned since the first plan.
        advised: Shortfalls say what would help. Each way is planned for that, so that a plan that
            does not fit takes several times as long.
    """

    def lines_of(decisions: Decisions) -> tuple[PlanLine, ...]:
        return bill(
            Sizes(
                spec,
                layouts,
                decisions,
                machine.has_cuda,
                known.measured,
                known.rows,
                machine.program_bytes,
            )
        )

    def fits(decisions: Decisions, spare: int = SPARE_BYTES) -> bool:
        lines = lines_of(decisions)
        free = machine.host_bytes - _total(lines, device=False)
        if not machine.has_cuda:
            return free >= spare
        if _total(lines, device=True) + spare > machine.device_bytes:
            return False
        # Inputs that wait on the host take much of it; elsewhere a host that is too small is no
        # matter of activations.
        return not decisions.offload or free >= spare

    def with_activations(asked: TrainConfig, decisions: Decisions) -> Decisions:
        if asked.pipeline.activations != "auto":
            return decisions

        def adapted(keep_layers: int, offload: bool) -> Decisions:
            return replace(decisions, keep_layers=keep_layers, offload=offload)

        chosen = choose_activations(len(spec.decoder_layers), lambda n, o: fits(adapted(n, o)))
        return adapted(chosen.keep_layers, chosen.offload)

    def with_pool(asked: TrainConfig, decisions: Decisions) -> Decisions:
        saves = asked.checkpoint
        if saves.bounce_pool != "auto" or not saves.async_save or saves.save_steps is None:
            return decisions
        size = pool_bytes(layouts[1:-1], decisions.tile_format)
        pooled = replace(decisions, pool_bytes=size)
        host = _total(lines_of(pooled), device=False)
        return pooled if host + SPARE_BYTES <= machine.host_bytes else decisions

    def as_before(asked: TrainConfig, before: Before) -> Decisions | None:
        if before.joined not in ways_to_join(asked, spec, machine, known):
            return None
        decisions = decide(asked, spec, layouts, machine, known, joined=before.joined)
        if asked.pipeline.activations == "auto":
            kept = min(before.keep_layers, len(spec.decoder_layers))
            decisions = replace(decisions, keep_layers=kept, offload=before.offload)
        return decisions if fits(decisions, spare=0) else None

    def decide_all(asked: TrainConfig) -> Decisions:
        same = None if known.before is None else as_before(asked, known.before)
        if same is not None:
            return with_pool(asked, same)
        *more, least = ways_to_join(asked, spec, machine, known)
        made = []
        for joined in (*more, least):
            decisions = decide(asked, spec, layouts, machine, known, joined=joined)
            made.append(with_activations(asked, decisions))
            if fits(made[-1]):
                return with_pool(asked, made[-1])
        # Gradients of a single pass are not summed, so the fewest at once may need more.
        *others, last = made
        barely = (one for one in (last, *others) if fits(one, spare=0))
        return with_pool(asked, next(barely, last))

    def shortages(decisions: Decisions) -> dict[str, int]:
        lines = lines_of(decisions)
        short = {HOST_RAM: short_of_room(_total(lines, device=False), machine.host_bytes)}
        if machine.has_cuda:
            needed = _total(lines, device=True)
            short[GPU_MEMORY] = short_of_room(needed, machine.device_bytes)
        return {place: num_bytes for place, num_bytes in short.items() if num_bytes}

    def least_shortages() -> dict[str, int]:
        found = []
        for joined in ways_to_join(config, spec, machine, known):
            least = decide(config, spec, layouts, machine, known, joined=joined)
            ways = [least]
            if config.pipeline.activations == "auto":
                ways = [replace(least, keep_layers=0, offload=o) for o in (False, True)]
            for way in ways:
                found.append(shortages(way))
                if not found[-1]:
                    return {}
        return min(found, key=lambda short: sum(short.values()))

    def attempt(asked: TrainConfig) -> Attempt:
        found = decide_all(asked)
        bounds = step_bounds(spec, found, machine, known.rows)
        needed = lines_of(found)
        worse = (
            host <= machine.host_bytes < _total(needed, device=False),
            device <= machine.device_bytes < _total(needed, device=True),
        )
        return Attempt(bounds, found.num_micro_batches, not any(worse))

    def host_bytes(asked: TrainConfig) -> int:
        return _total(lines_of(decide_all(asked)), device=False)

    def device_bytes(asked: TrainConfig) -> int:
        asked_lines = lines_of(decide_all(asked))
        if host <= machine.host_bytes < _total(asked_lines, device=False):
            return device  # a way that only moves the shortage to the host frees nothing
        return _total(asked_lines, device=True)

    def advice_on(ways: Sequence[Way], measure: Callable[[TrainConfig], int], there: str) -> str:
        return f" {advise(config, ways, measure, there)}" if advised else ""

    decisions = decide_all(config)
    lines = lines_of(decisions)
    host, device = _total(lines, device=False), _total(lines, device=True)
    missing, advice, length = [], [], decisions.max_length
    if host > machine.host_bytes:
        ways = host_ways(config, length, on_gpu=machine.has_cuda)
        advice.append(advice_on(ways, host_bytes, "a machine with more RAM"))
        missing.append(
            f"This run needs {show_bytes(host)} of host RAM and {show_bytes(machine.host_bytes)} "
            f"may be taken ({machine.host_source}): {show_bytes(host - machine.host_bytes)} are "
            "missing."
        )
    if machine.has_cuda and device > machine.device_bytes:
        ways = device_ways(config, length)
        advice.append(advice_on(ways, device_bytes, "a GPU with more memory"))
        missing.append(
            f"This run needs {show_bytes(device)} on {machine.device_name} and "
            f"{show_bytes(machine.device_bytes)} is free: "
            f"{show_bytes(device - machine.device_bytes)} are missing."
        )
    bounds = step_bounds(spec, decisions, machine, known.rows)
    enough = fewest_that_hide(config, bounds, attempt) if advised else None
    checkpoint = checkpoint_bytes(spec, decisions.tile_format)
    kept = kept_checkpoints(config.checkpoint, config.train.max_steps)
    return RunPlan(
        decisions,
        machine,
        tuple(layout.numel for layout in layouts),
        bool(spec.tied),
        spec.lookup,
        lines,
        tuple(map("".join, zip(missing, advice, strict=True))),
        (
            *summary_of(config, spec, decisions, machine, known),
            ("checkpoint", checkpoint_text(config, decisions, checkpoint, kept)),
            *speed_lines(config, machine, bounds),
        ),
        known,
        bounds,
        checkpoint,
        kept * checkpoint,
        warnings_of(config, decisions, machine, bounds, enough),
        least_shortages(),
        tuple(missing),
    )


def _total(lines: Sequence[PlanLine], *, device: bool) -> int:
    """What a place must have: pages of files leave where RAM is short."""
    needed = [line for line in lines if line.place != MAPPED]
    return sum(line.num_bytes for line in needed if (line.place == DEVICE) == device)
