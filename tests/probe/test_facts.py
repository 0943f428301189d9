"""Facts are what the system's files say; what they do not say is None or empty."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain_cli.plan.machine_file import NumaNode
from megatrain_cli.probe.facts import fingerprint, machine_facts
from tests.plan.small import CPU, GPU


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_everything_a_system_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 8, 10, 11}, raising=False)
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    put(proc / "self" / "cgroup", "0::/job\n")
    put(sys / "fs/cgroup/job/memory.max", "4096\n")
    put(sys / "fs/cgroup/job/memory.current", "1\n")
    put(sys / "fs/cgroup/job/cpu.max", "250000 100000\n")
    for index, cores in ((1, "8-15"), (0, "0-7")):
        node = sys / "devices/system/node" / f"node{index}"
        put(node / "cpulist", f"{cores}\n")
        put(
            node / "meminfo", f"Node {index} MemTotal:   {64 + index} kB\nNode {index} MemFree: 1\n"
        )
    put(sys / "bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
    put(sys / "kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    found = machine_facts("0000:3b:00.0", sys, proc)
    assert (found.memory_limit_bytes, found.memory_limit_source) == (4096, "cgroup v2")
    assert found.cpu_quota == 3
    assert found.affinity == "0-2,8,10-11"
    assert found.numa_nodes == (
        NumaNode(0, "0-7", 64 << 10),
        NumaNode(1, "8-15", 65 << 10),
    )
    assert found.device_numa_node == 1
    assert found.huge_pages == "madvise"


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = machine_facts("0000:3b:00.0", tmp_path, tmp_path)
    assert found.memory_limit_bytes is None
    assert found.memory_limit_source is None
    assert found.cpu_quota is None
    assert found.numa_nodes == ()
    assert found.device_numa_node is None
    assert found.huge_pages is None
    put(tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node", "-1\n")
    assert machine_facts("0000:3b:00.0", tmp_path, tmp_path).device_numa_node is None
    assert machine_facts(None, tmp_path, tmp_path).device_numa_node is None


def test_a_fingerprint_names_the_hardware_and_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = (128 << 30) - (700 << 20)  # what a kernel leaves of 128 GiB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    put(tmp_path / "cpuinfo", "processor : 0\nmodel name\t: Xeon 8480\n\nmodel name : other\n")
    put(tmp_path / "driver/nvidia/version", "NVRM version: NVIDIA Module  570.1.2  Tue\nGCC 12\n")
    here = fingerprint(GPU, tmp_path, tmp_path)
    assert (here.cpu, here.ram_gib, here.gpu, here.driver) == (
        "Xeon 8480",
        127,
        "NVIDIA H200",
        "570.1.2",
    )
    put(tmp_path / "module/nvidia/version", "580.3\n")
    assert fingerprint(GPU, tmp_path, tmp_path).driver == "580.3"
    on_cpu = fingerprint(CPU, tmp_path, tmp_path)
    assert (on_cpu.gpu, on_cpu.driver) == ("", "")
    assert fingerprint(CPU, tmp_path / "none", tmp_path / "none").cpu != ""
