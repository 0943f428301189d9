"""What a plan warns of: a run that fits, and learns less or runs slower than it might."""

import math

from megatrain_cli.config.schema import KeepLayers, PipelineSection, TrainConfig
from megatrain_cli.plan.cost import StepBounds
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.hiding import Enough
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.units import show_number

# Of the weights of a decoder, as most are initialised; trained ones are of the same size.
WEIGHT_DEVIATION = 0.02
_NOTED_SHARE = 0.01


def warnings_of(
    config: TrainConfig,
    decisions: Decisions,
    machine: MachineSpec,
    bounds: StepBounds | None,
    enough: Enough | None,
) -> tuple[str, ...]:
    """One line for each thing that a user may want to change.

    Args:
        config: What was asked.
        decisions: What was decided.
        machine: Where it runs.
        bounds: Of a step.
        enough: What would hide the link, where it binds.
    """
    found = (
        _lost_updates(config),
        _link_bound(bounds, enough),
        _lone_slab(decisions),
        _kept_layers(config, decisions),
        _crowded_cores(decisions, machine),
        _idle_slabs(config, decisions),
        *_idle_without_gpu(config, machine),
        machine.rates_doubt or None,
    )
    return tuple(line for line in found if line is not None)


def vanishing_share(learning_rate: float) -> float:
    """The share of BF16 weights that an update of the size of the learning rate leaves as they are.

    BF16 has 8 bits, so from 2^e on neighbours are 2^(e - 7) apart, and an update of less than half
    of that is rounded away. Adam's updates are of about the size of the learning rate.

    Args:
        learning_rate: Above 0.
    """
    # The smallest power of two above which half of the distance exceeds the update.
    smallest = 2.0 ** (math.floor(math.log2(learning_rate)) + 9)
    return math.erfc(smallest / (WEIGHT_DEVIATION * math.sqrt(2)))


def _lost_updates(config: TrainConfig) -> str | None:
    rate = config.optimizer.learning_rate
    if config.optimizer.master != "bf16" or rate <= 0:
        return None
    share = vanishing_share(rate)
    if share < _NOTED_SHARE:
        return None
    return (
        f"`optimizer.master: bf16` rounds an update of {rate:g} away in about {share:.0%} of the "
        f"weights (of a standard deviation of {WEIGHT_DEVIATION}); `bf16_stochastic` keeps it on "
        "average, `fp32_split` exactly"
    )


def _link_bound(bounds: StepBounds | None, enough: Enough | None) -> str | None:
    if enough is None or bounds is None:
        return None
    setting = f"`train.gradient_accumulation_steps: {enough.micro_batches}`"
    hiding = f"{enough.tokens} tokens a step"
    if enough.fits:
        hiding += f" ({setting}) would hide them"
    else:
        hiding += " would hide them and do not fit here"
    return (
        f"weights and gradients take {bounds.link:.3g} s over the link and compute takes "
        f"{bounds.compute:.3g} s: {hiding}, and this step has {bounds.tokens}"
    )


def _lone_slab(decisions: Decisions) -> str | None:
    if decisions.num_slabs != 1:
        return None
    return (
        "`pipeline.grad_slabs: 1` lets no gradient leave the device while another is being added; "
        "set 2 or more"
    )


def _idle_slabs(config: TrainConfig, decisions: Decisions) -> str | None:
    asked = config.pipeline.grad_slabs
    if decisions.num_slabs or asked in ("auto", PipelineSection().grad_slabs):
        return None
    return (
        f"`pipeline.grad_slabs: {asked}` has no effect: gradients go straight into the page-locked "
        "store"
    )


def _idle_without_gpu(config: TrainConfig, machine: MachineSpec) -> list[str]:
    """Where the config names the CPU itself, its rules have said so."""
    if machine.has_cuda or config.pipeline.device == "cpu":
        return []
    default = PipelineSection().target_pcie_utilization
    asked = {
        "store.memory": config.store.memory == "pinned",
        "train.deterministic": config.train.deterministic,
        "pipeline.target_pcie_utilization": config.pipeline.target_pcie_utilization != default,
    }
    return [
        f"`{key}` has no effect: there is no GPU, and nothing is copied to one"
        for key, is_asked in asked.items()
        if is_asked
    ]


def _kept_layers(config: TrainConfig, decisions: Decisions) -> str | None:
    asked = config.pipeline.activations
    if not isinstance(asked, KeepLayers) or asked.keep_layers <= decisions.keep_layers:
        return None
    return (
        f"`pipeline.activations.keep_layers: {asked.keep_layers}` is more than the model's "
        f"{show_number(decisions.keep_layers, 'layer')}: all of them are kept"
    )


def _crowded_cores(decisions: Decisions, machine: MachineSpec) -> str | None:
    if decisions.threads <= machine.num_cores:
        return None
    return (
        f"`optimizer.threads: {decisions.threads}` is more than the {machine.num_cores} usable "
        "cores: the threads wait for each other; set `auto`"
    )
