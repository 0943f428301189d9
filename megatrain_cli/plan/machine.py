"""What the host and the device have, as numbers."""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from megatrain_cli.errors import DeviceError
from megatrain_cli.plan.rates import Count, MachineRates


@dataclass(frozen=True)
class MachineSpec:
    """One machine at one moment.

    Attributes:
        host_bytes: Host RAM that this process may still take.
        host_source: What sets that limit: `cgroup v2 /job, limit 2.00 GiB`, `MemAvailable`, ...
        num_cores: Cores that this process may use (affinity and quota).
        device: `cpu` or `cuda:N`.
        device_name: As the driver reports it; empty on the CPU.
        device_bytes: Device memory free at this moment; 0 on the CPU.
        rates: As `megatrain probe` measured them; None where it has not, on this machine.
        rates_note: Where there are none, why, and what to do.
        rates_doubt: Where there are some, why they may not hold now; empty if nothing says so.
        origin: Where the numbers come from, for another machine than the one at hand.
        program_bytes: Resident set of this process before it took anything for a run; 0 where that
            is not known.
    """

    host_bytes: Count
    host_source: str
    num_cores: Annotated[Count, Field(ge=1)]
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")]
    device_name: str = ""
    device_bytes: Count = 0
    rates: MachineRates | None = None
    rates_note: str = "run `megatrain probe` to see seconds"
    rates_doubt: str = ""
    origin: str = ""
    program_bytes: Count = 0

    @property
    def has_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def on(self, device: str) -> "MachineSpec":
        """This machine as a run on `device` would see it; any `cuda:N` is its GPU.

        Raises:
            DeviceError: A GPU is asked for and it has none.
        """
        if device == "cpu":
            return replace(self, device="cpu", device_name="", device_bytes=0)
        if device.startswith("cuda") and not self.has_cuda:
            raise DeviceError(
                f"pipeline.device is {device} and the machine to plan for was measured without a "
                "GPU. Use `cpu`, or the file of another machine."
            )
        return self
