"""Memory that may be taken and cores that may be used, by every limit above this process.

In a container the kernel's totals are those of the host, so the limits of every cgroup above this
process count too: the smallest of all ancestors, less what is used there. Above `memory.high` the
kernel stops nobody, but takes pages back and slows the group down to almost nothing: what a run
holds are no pages to take back, so it counts as a limit as `memory.max` does.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

from megatrain_cli.probe.mapping import mapping_limits
from megatrain_cli.units import show_bytes


def host_memory(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> tuple[int, str]:
    """Bytes this process may still take, and what sets that limit: a cgroup by its path.

    Such as `cgroup v2 /job, limit 2.00 GiB`. In a container its own group is `/`.
    """
    limits = [(psutil.virtual_memory().available, "MemAvailable"), *mapping_limits(proc)]
    for folder, limit, used, version in _limits(root, proc):
        base = root if version == "cgroup v2" else root / "memory"
        path = PurePosixPath("/", folder.relative_to(base))
        source = f"{version} {path}, limit {show_bytes(limit)}"
        limits.append((max(limit - used + _reclaimable(folder), 0), source))
    return min(limits)


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> tuple[int, str] | None:
    """The smallest limit of all cgroups above this process, whatever is used; None without one."""
    limits = [(limit, version) for _, limit, _, version in _limits(root, proc)]
    return min(limits, default=None)


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """The smallest CPU quota of all cgroups above this process, in whole cores; None without."""
    quotas = (_cpu_quota(folder) for folder in _cgroup_folders(root, proc, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cores(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Cores by affinity, or fewer where a cgroup's CPU quota says so; at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cpu_quota(root, proc)
    return max(cores if quota is None else min(cores, quota), 1)


def _limits(root: Path, proc: Path) -> Iterator[tuple[Path, int, int, str]]:
    """Folder, limit, use and version of each cgroup that limits memory."""
    for folder in _cgroup_folders(root, proc, "memory"):
        for limit_name, used_name, version in (
            ("memory.max", "memory.current", "cgroup v2"),
            ("memory.high", "memory.current", "cgroup v2"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "cgroup v1"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                yield folder, limit, used, version


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
