"""The shortest a step can take on a measured machine: link, optimizer or compute, whichever binds.

Bounds, not a forecast: each part alone, at the rate that it reached alone.
"""

from dataclasses import asdict, dataclass

from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.flops import LayerFlops, layer_flops
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.rates import MachineRates, rate_at
from megatrain_cli.plan.row_facts import RowFacts
from megatrain_cli.plan.tiles import DTYPE_BYTES

# Bytes that an update reads and writes a parameter, by master; RAM bounds it, so the rate measured
# with `fp32_split` is scaled by them. FP32 weights are their own master: 28 too.
_ADAM_BYTES = {"fp32_split": 26, "bf16": 22, "bf16_stochastic": 22, "fp32": 28}


@dataclass(frozen=True)
class StepBounds:
    """Seconds that parts of a step take at least, each alone; None where nothing is measured.

    Attributes:
        link: Weights in (see `weights_in`) and gradients out, both at once.
        compute: Forward, recompute of the layers that are not kept, backward.
        backward: The part of `compute` after the loss.
        adam: All updates.
        serial: Whether no update starts before backward has ended (deferred updates).
        tokens: Of a step with full rows.
        flops: 6 x parameters that a token meets x tokens.
    """

    link: float | None
    compute: float | None
    backward: float | None
    adam: float
    serial: bool
    tokens: int
    flops: int

    @property
    def parts(self) -> dict[str, float]:
        """What may bind, in seconds."""
        last = {"backward + Adam" if self.serial and self.backward else "Adam": self._tail}
        others = {"link": self.link, "compute": self.compute}
        return {name: s for name, s in others.items() if s is not None} | last

    @property
    def _tail(self) -> float:
        return self.adam + (self.backward or 0.0) * self.serial

    @property
    def floor(self) -> float:
        """No step whose rows are full is shorter than this."""
        return max(self.parts.values())

    @property
    def binds(self) -> str:
        """The part that the floor is made of."""
        return max(self.parts, key=self.parts.__getitem__)

    def to_json(self) -> dict[str, object]:
        """For machines: the parts, and what follows from them."""
        return {**asdict(self), "floor": self.floor, "binds": self.binds}


def step_bounds(
    spec: ModelSpec, decisions: Decisions, machine: MachineSpec, rows: RowFacts | None = None
) -> StepBounds | None:
    """The bounds of one step; None for a machine that was not measured.

    Args:
        spec: The model.
        decisions: Of the plan.
        machine: With its rates.
        rows: What is known of them: the CPU fills no row up.
    """
    rates = machine.rates
    if rates is None:
        return None
    count, length = rows_of(decisions, machine, rows)
    tokens = round(count * length)
    compute = backward = None
    speed = speed_of(spec, decisions, machine)
    if speed is not None:
        work = [flops_of(spec, decisions, machine, i, rows) for i in range(len(spec.layers))]
        # Recomputed layers make their forward once more.
        again = work[1 : len(work) - 1 - decisions.keep_layers]
        operations = sum(one.backward for one in work) + sum(one.forward for one in again)
        backward = operations / speed
        compute = backward + sum(one.forward for one in work) / speed
    link = _link_seconds(spec, decisions, rates) if machine.has_cuda else None
    adam_rate = rate_at(rates.adam, decisions.threads)
    adam_rate *= _ADAM_BYTES["fp32_split"] / _ADAM_BYTES[decisions.tile_format.master]
    return StepBounds(
        link=link,
        compute=compute,
        backward=backward,
        adam=spec.num_parameters / adam_rate,
        serial=not decisions.eager,
        tokens=tokens,
        flops=6 * spec.num_active * tokens,
    )


def speed_of(spec: ModelSpec, decisions: Decisions, machine: MachineSpec) -> float | None:
    """Operations a second of this run's layers; None where they were not measured.

    Rates of a GPU are of BF16 alone.
    """
    rates = machine.rates
    if rates is None:
        return None
    if not machine.has_cuda:
        cpu = rates.cpu
        # What rows cost beside their tokens is left out: a floor is a floor.
        return None if cpu is None else 6 / cpu.of(decisions.dtype).cost(spec.hidden_size).token
    if decisions.dtype != "bfloat16" or rates.compute is None:
        return None
    return rates.compute.of_layers(spec.hidden_size, compiled=decisions.compiled)


def flops_of(
    spec: ModelSpec, decisions: Decisions, machine: MachineSpec, layer: int, rows: RowFacts | None
) -> LayerFlops:
    """Operations of a layer over all rows of a step."""
    count, length = rows_of(decisions, machine, rows)
    whole = decisions.attention != "packed"
    return layer_flops(spec, layer, count, round(length), whole=whole)


def rows_of(decisions: Decisions, machine: MachineSpec, rows: RowFacts | None) -> tuple[int, float]:
    """How many rows a step has, and how long they are: as planned, or on a CPU on average."""
    count = decisions.num_micro_batches * decisions.micro_batch_size
    if machine.has_cuda or rows is None:
        return count, decisions.max_length
    return count, max(1.0, rows.mean_tokens / count)


def weights_in(spec: ModelSpec, num_slots: int) -> int:
    """Parameters that are copied to the device in a step.

    Every decoder layer's twice, for forward and for backward; those that are still in their slots
    at the turn once. The head's once. The embedding's once where they stay (a tied head reads them
    too) or where its backward needs none; else twice.
    """
    body = spec.decoder_layers
    twice = sum(layer.numel for layer in body[: max(len(body) - num_slots, 0)])
    again = 0 if spec.tied or spec.lookup else spec.embed.numel
    return spec.num_parameters + twice + again


def _link_seconds(spec: ModelSpec, decisions: Decisions, rates: MachineRates) -> float | None:
    if rates.link is None:
        return None
    width = DTYPE_BYTES[decisions.dtype]
    inward = weights_in(spec, decisions.num_slots) * width
    outward = spec.num_parameters * width
    bounds = [
        inward / max(point.to_device for point in rates.link),
        outward / max(point.to_host for point in rates.link),
        (inward + outward) / (2 * max(point.both_ways for point in rates.link)),
    ]
    if not decisions.pin_store and rates.copy_to_pinned is not None:
        bounds.append(inward / max(point.rate for point in rates.copy_to_pinned))
    return max(bounds)
