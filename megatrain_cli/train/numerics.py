"""What the last bit of a step depends on: equal fingerprints promise equal bits, others do not.

Left out is what was proved to change no bit: threads of the optimizer, slots, slabs, the kind of
host memory, when updates run.
"""

import platform
from collections.abc import Mapping

import numba
import torch
import transformers
from pydantic import JsonValue

from megatrain_cli.checkpoint.facts import Facts
from megatrain_cli.model.kernels import dispatched_kernel
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.decide import Before
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.probe.facts import fingerprint


def numerics_of(skeleton: Skeleton, plan: RunPlan) -> dict[str, JsonValue]:
    """The fingerprint of a run on this machine, after its warm-up has settled the kernels."""
    d, machine = plan.decisions, plan.machine
    device = torch.device(machine.device)
    attention, sm = d.attention, None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        sm = f"{major}.{minor}"
        if attention == "sdpa":
            shape = d.micro_batch_size, d.max_length
            kernel = dispatched_kernel(skeleton.hf_config, skeleton.dtype, device, *shape)
            attention = f"sdpa by {kernel}"
    return {
        "gpu": machine.device_name or None,
        "sm": sm,
        "driver": fingerprint(machine).driver or None,
        "cuda": torch.version.cuda if machine.has_cuda else None,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "numba": numba.__version__,
        "attention": attention,
        "deterministic": d.deterministic,
        "cpu": platform.machine(),
        "cpu_simd": torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": torch.get_num_threads(),
        "dtype": d.dtype,
        "compiled": d.compiled,
        "rows_at_once": d.micro_batch_size,
        "row_length": d.max_length if d.compiled else None,
        "keep_layers": d.keep_layers,
        "world_size": 1,
        "norm_order": "layer-f64",
    }


def chosen_before(saved: Facts, machine: MachineSpec) -> Before | None:
    """What the run that goes on had chosen, if this is the same kind of device.

    Elsewhere bits are not the same anyway, and what is free should be used.
    """
    if saved.numerics.get("gpu") != (machine.device_name or None):
        return None
    joined, kept, offload = (saved.plan.get(key) for key in ("joined", "keep_layers", "offload"))
    if not (isinstance(joined, int) and isinstance(kept, int) and isinstance(offload, bool)):
        return None  # a program that did not choose these
    return Before(joined, kept, offload)


def differences(saved: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> list[str]:
    """What differs between two fingerprints, as `torch 2.11.0 -> 2.13.0`; empty for equal ones.

    A key that only one of them has says nothing: another version did not look at it.
    """
    shared = (key for key in saved if key in now)
    return [
        f"{key} {_show(saved[key])} -> {_show(now[key])}"
        for key in shared
        if saved[key] != now[key]
    ]


def not_bit_exact(changed: list[str]) -> str | None:
    """The one line for the user; None where bits are promised."""
    if not changed:
        return None
    return (
        f"not bit-exact from here on: {'; '.join(changed)}. State and rows are exactly those that "
        "were saved"
    )


def _show(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else ascii(value).strip("'\"")
