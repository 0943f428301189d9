"""Look at this machine: memory that may be taken, cores that may be used, the GPU.

In a container the kernel's totals are those of the host, so the limits of every cgroup above this
process count too: the smallest of all ancestors, less what is used there.
"""

import os
from pathlib import Path

import psutil
import torch

from megatrain_cli.errors import DeviceError
from megatrain_cli.plan.machine import MachineSpec


def probe_machine(device: str = "auto") -> MachineSpec:
    """The machine at hand.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceError: A GPU was asked for that is not there.
    """
    host_bytes, source = host_memory()
    cores = usable_cores()
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return MachineSpec(host_bytes, source, cores, "cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise DeviceError(
            f"pipeline.device is {device} and torch {torch.__version__} sees {count} CUDA "
            "device(s). Use `cpu`, or a torch build and a driver for your GPU."
        )
    free, _ = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return MachineSpec(host_bytes, source, cores, f"cuda:{index}", name, free)


def host_memory(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> tuple[int, str]:
    """Bytes this process may still take, and what sets that limit."""
    limits = [(psutil.virtual_memory().available, "MemAvailable")]
    for folder in _cgroup_folders(root, proc, "memory"):
        for limit_name, used_name, version in (
            ("memory.max", "memory.current", "cgroup v2"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "cgroup v1"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                limits.append((max(limit - used + _reclaimable(folder), 0), version))
    return min(limits)


def usable_cores(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Cores by affinity, or fewer where a cgroup's CPU quota says so; at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for folder in _cgroup_folders(root, proc, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cores = min(cores, quota)
    return max(cores, 1)


def _cpu_quota(folder: Path) -> int | None:
    """Whole cores that a cgroup's quota amounts to; None without one."""
    try:
        numbers = (folder / "cpu.max").read_text().split()
    except OSError:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # v1, where -1 is no quota
        numbers = [str(_number(folder / name) or "max") for name in names]
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return None
    quota, period = map(int, numbers)
    return -(-quota // period)


def _cgroup_folders(root: Path, proc: Path, controller: str) -> list[Path]:
    """This process's cgroup and all its ancestors, v2 and v1, as far as they can be seen."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        here = base / path.lstrip("/")
        folders += [here, *(p for p in here.parents if p == base or base in p.parents)]
    return folders


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    # v1 says "no limit" with a number near 2^63.
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _reclaimable(folder: Path) -> int:
    """File cache counted as used, which the kernel gives back before it kills anything."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines if len(line.split()) == 2)
    # Usage includes the groups below. So does v2's `inactive_file`, but of v1's only `total_...`.
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
