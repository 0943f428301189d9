"""Config, model and machine decided: what a run will hold, where, and whether it fits."""

from dataclasses import asdict, dataclass

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.model.layout import LayerLayout
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.decide import Decisions, decide
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.memory import DEVICE, PlanLine, Sizes, bill
from megatrain_cli.plan.remedies import advise, device_ways, host_ways
from megatrain_cli.units import show_bytes, show_count


@dataclass(frozen=True)
class RunPlan:
    """The plan in force.

    Attributes:
        lines: The bill, by owner.
        layer_numels: Elements of each layer's run, in order.
        tied: Whether the head shares the embedding's weights.
        shortfalls: One line for each place where the bill exceeds what there is; empty if it fits.
    """

    decisions: Decisions
    machine: MachineSpec
    layer_numels: tuple[int, ...]
    tied: bool
    lines: tuple[PlanLine, ...]
    shortfalls: tuple[str, ...]
    summary: tuple[tuple[str, str], ...]

    @property
    def host_bytes(self) -> int:
        """All host memory, pinned and pageable."""
        return sum(line.num_bytes for line in self.lines if line.place != DEVICE)

    @property
    def device_bytes(self) -> int:
        """All device memory."""
        return sum(line.num_bytes for line in self.lines if line.place == DEVICE)

    def to_json(self) -> dict[str, object]:
        """For machines: decisions, bill, verdict."""
        return {
            "fits": not self.shortfalls,
            "shortfalls": list(self.shortfalls),
            "host_peak_bytes": self.host_bytes,
            "gpu_peak_bytes": self.device_bytes,
            "decisions": asdict(self.decisions),
            "machine": asdict(self.machine),
            "lines": [asdict(line) for line in self.lines],
        }


def make_plan(
    config: TrainConfig,
    spec: ModelSpec,
    layouts: tuple[LayerLayout, ...],
    machine: MachineSpec,
    *,
    can_pin: bool = True,
) -> RunPlan:
    """Decide and add up. Never raises for a run that does not fit: see `shortfalls`."""

    def lines_of(asked: TrainConfig) -> tuple[PlanLine, ...]:
        decisions = decide(asked, spec, layouts, machine, can_pin=can_pin)
        return bill(Sizes(spec, layouts, decisions, machine.has_cuda))

    def host_bytes(asked: TrainConfig) -> int:
        return sum(line.num_bytes for line in lines_of(asked) if line.place != DEVICE)

    def device_bytes(asked: TrainConfig) -> int:
        return sum(line.num_bytes for line in lines_of(asked) if line.place == DEVICE)

    decisions = decide(config, spec, layouts, machine, can_pin=can_pin)
    lines = lines_of(config)
    host, device = host_bytes(config), device_bytes(config)
    shortfalls = []
    if host > machine.host_bytes:
        advice = advise(config, host_ways(), host_bytes, "a machine with more RAM")
        shortfalls.append(
            f"This run needs {show_bytes(host)} of host RAM and {show_bytes(machine.host_bytes)} "
            f"may be taken ({machine.host_source}): {show_bytes(host - machine.host_bytes)} are "
            f"missing. {advice}"
        )
    if machine.has_cuda and device > machine.device_bytes:
        advice = advise(config, device_ways(config), device_bytes, "a GPU with more memory")
        shortfalls.append(
            f"This run needs {show_bytes(device)} on {machine.device_name} and "
            f"{show_bytes(machine.device_bytes)} is free: "
            f"{show_bytes(device - machine.device_bytes)} are missing. {advice}"
        )
    summary = _summary(config, spec, decisions, machine)
    numels = tuple(layout.numel for layout in layouts)
    return RunPlan(decisions, machine, numels, bool(spec.tied), lines, tuple(shortfalls), summary)


def _summary(
    config: TrainConfig, spec: ModelSpec, decisions: Decisions, machine: MachineSpec
) -> tuple[tuple[str, str], ...]:
    d = decisions
    layers = len(spec.decoder_layers)
    tied = ", tied head" if spec.tied else ""
    updates = "eager" if d.eager else "deferred"
    slot_bytes = d.slot_numel * (2 if d.dtype == "bfloat16" else 4)
    kept = f"{d.keep_layers} of {layers} layers kept, others recomputed"
    rows = f"{d.num_micro_batches} x {d.micro_batch_size} rows of up to {d.max_length} tokens"
    size = f"{show_count(spec.num_parameters)} parameters, {layers} layers{tied}"
    return (
        ("model", f"{spec.architecture}, {size}"),
        ("device", machine.device_name or "CPU"),
        ("compute", f"{d.dtype}, attention {d.attention}" + ", deterministic" * d.deterministic),
        ("masters", f"{d.tile_format.master}, updates {updates} on {d.threads} threads"),
        ("store", "page-locked in place" if d.pin_store else "pageable"),
        ("gradients", f"{d.num_slabs} slabs" if d.num_slabs else "straight into the tiles"),
        ("staging", f"{d.num_slots} buffers of {show_bytes(slot_bytes)}"),
        ("activations", kept + (", inputs offloaded" if d.offload else "")),
        ("step", rows),
        ("learning rate", f"{config.optimizer.learning_rate:g}, {config.schedule.type}"),
    )
