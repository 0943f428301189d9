"""What a plan decided, in words."""

from collections.abc import Iterator

from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.model.spec import ModelSpec
from megatrain_cli.plan.cost import StepBounds
from megatrain_cli.plan.decide import Decisions, Known
from megatrain_cli.plan.kernels import length_bytes
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.tiles import DTYPE_BYTES
from megatrain_cli.units import show_bytes, show_count, show_number, show_rate, show_seconds


def summary_of(
    config: TrainConfig, spec: ModelSpec, d: Decisions, machine: MachineSpec, known: Known
) -> Iterator[tuple[str, str]]:
    """What is run and how, as label and text.

    Args:
        config: Of the run.
        spec: Of the model.
        d: What was decided.
        machine: Where it runs.
        known: What was known when it was decided.
    """
    layers = len(spec.decoder_layers)
    tied = ", tied head" if spec.tied else ""
    updates = "eager" if d.eager else "deferred"
    slot_bytes = d.slot_numel * DTYPE_BYTES[d.dtype]
    kept = f"{d.keep_layers} of {show_number(layers, 'layer')} kept"
    if d.keep_layers < layers:
        # A layer's forward is a third of its work.
        more = 100 * (layers - d.keep_layers) / (3 * layers)
        kept += f", {layers - d.keep_layers} computed twice (+{more:.0f} % work)"
    rows = f"{d.num_micro_batches} x {show_number(d.micro_batch_size, 'row')} of up to "
    rows += show_number(d.max_length, "token")
    if d.joined > 1:
        rows += f", {d.joined} micro-batches at once"
    size = f"{show_count(spec.num_parameters)} parameters"
    if spec.num_active < spec.num_parameters:
        size += f" ({show_count(spec.num_active)} active: TFLOPS are of these)"
    size += f", {show_number(layers, 'layer')}{tied}"
    masters = f"{d.tile_format.master}, updates {updates} on {show_number(d.threads, 'thread')}"
    gradients = show_number(d.num_slabs, "slab") if d.num_slabs else "straight into the tiles"
    staging = f"{show_number(d.num_slots, 'buffer')} of {show_bytes(slot_bytes)}"
    how = ", compiled" * d.compiled + ", deterministic" * d.deterministic
    yield "model", f"{spec.architecture}, {size}"
    if machine.origin:
        yield "machine", machine.origin
    yield "device", machine.device_name or "CPU"
    yield "compute", f"{d.dtype}, attention {d.attention}{how}"
    yield "masters", masters
    yield "store", "page-locked in place" if d.pin_store else "pageable"
    yield "gradients", gradients
    yield "staging", f"{staging}, embedding and head apart"
    yield "activations", kept + (", inputs offloaded" if d.offload else "")
    yield "step", rows
    yield "learning rate", f"{config.optimizer.learning_rate:g}, {config.schedule.type}"
    if known.rows_from:
        yield "rows", known.rows_from
    if known.rows is None and not machine.has_cuda and d.dtype == "bfloat16":
        each = show_bytes(length_bytes(spec, fused=d.attention != "eager"))
        yield "kernels", f"{each} for each length of rows, not billed as rows are not known yet"


def checkpoint_text(config: TrainConfig, decisions: Decisions, size: int, kept: int) -> str:
    """Checkpoints of `size` bytes on disk, `kept` at once, and what saving holds up."""
    asked = config.checkpoint
    text = f"{show_bytes(size)} each, the folder up to {show_bytes(kept * size)} ({kept} of them)"
    if asked.keep_every_steps is not None and config.train.max_steps is None:
        text += f", one more every {show_number(asked.keep_every_steps, 'step')}"
    if not asked.async_save:
        return f"{text}; training waits for each"
    pool = decisions.pool_bytes
    return f"{text}; pool of {show_bytes(pool)}" if pool else text


def speed_lines(
    config: TrainConfig, machine: MachineSpec, bounds: StepBounds | None
) -> Iterator[tuple[str, str]]:
    """What was measured, as far as a step depends on it, as label and text."""
    if machine.rates is None or bounds is None:
        yield "step takes", machine.rates_note
        return
    parts = ", ".join(f"{name} {show_seconds(s)}" for name, s in bounds.parts.items())
    at_best = f"{show_rate(bounds.tokens / bounds.floor)} tokens/s"
    if bounds.compute is None:
        at_best += ", compute not measured"
    else:
        at_best += f", {bounds.flops / bounds.floor / 1e12:.3g} TFLOPS"
    floor = show_seconds(bounds.floor)
    yield "step takes", f"at least {floor} with full rows ({at_best}): {bounds.binds} binds"
    yield "bounds", parts
    target = config.pipeline.target_pcie_utilization
    burst = machine.rates.burst_bytes(target) if machine.has_cuda else None
    if burst is not None:
        yield "link", f"copies from {show_bytes(burst)} on reach {target:.0%} of its peak"
