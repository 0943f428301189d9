"""What the host and the device have, as numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MachineSpec:
    """One machine at one moment.

    Attributes:
        host_bytes: Host RAM that this process may still take.
        host_source: Where that limit was read: `cgroup v2`, `MemAvailable`, ...
        num_cores: Cores that this process may use (affinity and quota).
        device: `cpu` or `cuda:N`.
        device_name: As the driver reports it; empty on the CPU.
        device_bytes: Device memory free at this moment; 0 on the CPU.
    """

    host_bytes: int
    host_source: str
    num_cores: int
    device: str
    device_name: str = ""
    device_bytes: int = 0

    @property
    def has_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")
