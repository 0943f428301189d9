"""What the system says about this machine: its name plates, nodes and limits."""

import os
import platform
import resource
from collections.abc import Iterable
from pathlib import Path

import psutil

from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.machine_file import Fingerprint, MachineFacts, NumaNode
from megatrain_cli.probe.cgroup import cpu_quota, memory_limit
from megatrain_cli.units import GIB, KIB

_SYS, _PROC = Path("/sys"), Path("/proc")


def fingerprint(machine: MachineSpec, sys: Path = _SYS, proc: Path = _PROC) -> Fingerprint:
    """What tells this machine from others, with the GPU that `machine` names."""
    total = psutil.virtual_memory().total
    return Fingerprint(
        cpu=_cpu_model(proc),
        cores=os.cpu_count() or 1,
        ram_gib=round(total / GIB),
        gpu=machine.device_name,
        driver=_driver(sys, proc) if machine.has_cuda else "",
    )


def machine_facts(pci_address: str | None, sys: Path = _SYS, proc: Path = _PROC) -> MachineFacts:
    """All facts; what the system does not tell is None or empty.

    Args:
        pci_address: Of the GPU, such as `0000:3b:00.0`; None without one.
        sys: Where `/sys` is.
        proc: Where `/proc` is.
    """
    limit = memory_limit(sys / "fs" / "cgroup", proc)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return MachineFacts(
        memory_limit_bytes=None if limit is None else limit[0],
        memory_limit_source=None if limit is None else limit[1],
        cpu_quota=cpu_quota(sys / "fs" / "cgroup", proc),
        affinity=_ranges(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()),
        numa_nodes=_numa_nodes(sys),
        device_numa_node=_device_node(sys, pci_address),
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        huge_pages=_huge_pages(sys),
    )


def _cpu_model(proc: Path) -> str:
    for line in _read(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()  # ARM kernels name no model


def _driver(sys: Path, proc: Path) -> str:
    version = _read(sys / "module" / "nvidia" / "version").strip()
    if version:
        return version
    words = _read(proc / "driver" / "nvidia" / "version").split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _numa_nodes(sys: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for folder in (sys / "devices" / "system" / "node").glob("node[0-9]*"):
        index = int(folder.name.removeprefix("node"))
        # A line is "Node 0 MemTotal: 131072 kB".
        lines = [line.split() for line in _read(folder / "meminfo").splitlines()]
        words = next((words for words in lines if "MemTotal:" in words), [])
        size = int(words[3]) * KIB if len(words) > 3 and words[3].isdigit() else 0
        nodes.append(NumaNode(index, _read(folder / "cpulist").strip(), size))
    return tuple(sorted(nodes, key=lambda node: node.index))


def _device_node(sys: Path, pci_address: str | None) -> int | None:
    if pci_address is None:
        return None
    text = _read(sys / "bus" / "pci" / "devices" / pci_address / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1: the firmware does not say


def _huge_pages(sys: Path) -> str | None:
    # The mode in force stands in brackets among all of them.
    text = _read(sys / "kernel" / "mm" / "transparent_hugepage" / "enabled")
    return text.partition("[")[2].partition("]")[0] or None


def _ranges(cores: Iterable[int]) -> str:
    """`{0, 1, 2, 8}` -> `0-2,8`."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
