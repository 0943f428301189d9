"""The machine at hand: what may be taken of its RAM and cores, and its GPU."""

from dataclasses import replace
from functools import cache
from operator import attrgetter

import torch

from megatrain_cli.errors import DeviceError, MegatrainError
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.machine_file import default_path, load_machine_file
from megatrain_cli.probe.cgroup import host_memory, usable_cores
from megatrain_cli.probe.facts import fingerprint
from megatrain_cli.probe.peaks import host_resident_bytes


def probe_machine(device: str = "auto", key: str = "pipeline.device") -> MachineSpec:
    """The machine at hand.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        key: Where that was asked for, for the message.

    Raises:
        DeviceError: A GPU was asked for that is not there.
    """
    host_bytes, source = host_memory()
    cores = usable_cores()
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return MachineSpec(host_bytes, source, cores, "cpu", program_bytes=_program_bytes())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise DeviceError(
            f"{key} is {device} and torch {torch.__version__} sees {count} CUDA "
            "device(s). Use `cpu`, or a torch build and a driver for your GPU."
        )
    free, _ = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return MachineSpec(host_bytes, source, cores, f"cuda:{index}", name, free)


def pci_address(machine: MachineSpec) -> str | None:
    """Where the GPU is plugged in, such as `0000:3b:00.0`; None on the CPU."""
    if not machine.has_cuda:
        return None
    found = torch.cuda.get_device_properties(machine.device)
    # By name, as torch's type stubs leave these out.
    domain, bus, place = attrgetter("pci_domain_id", "pci_bus_id", "pci_device_id")(found)
    return f"{domain:04x}:{bus:02x}:{place:02x}.0"


@cache
def _program_bytes() -> int:
    """Of this process when it first asked: later there may be a store."""
    return host_resident_bytes() or 0


def with_rates(machine: MachineSpec) -> MachineSpec:
    """The machine at hand with the rates that `megatrain probe` stored for it.

    A file that is damaged, or of another machine or version, stops nothing: it is named in
    `rates_note` and left alone.
    """
    try:
        file = load_machine_file()
    except MegatrainError as error:
        return replace(machine, rates_note=f"not known: {error}")
    if file is None:
        return machine
    if not file.fingerprint.fits(fingerprint(machine)):
        there = file.fingerprint
        return replace(
            machine,
            rates_note=(
                f"not known: {default_path()} was measured on another machine ({there.cpu}, "
                f"{there.cores} cores, {there.ram_gib} GiB, {there.gpu or 'no GPU'}): ignored, run "
                "`megatrain probe`"
            ),
        )
    measured = file.machine.num_cores
    doubt = ""
    if measured != machine.num_cores:
        doubt = (
            f"`megatrain probe` measured with {measured} usable cores and {machine.num_cores} are "
            "usable now, so seconds may be far from these; run it again"
        )
    return replace(machine, rates=file.machine.rates, rates_doubt=doubt)
