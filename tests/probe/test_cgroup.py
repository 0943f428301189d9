"""What this process may take: the smallest limit of all cgroups above it, not the host's total."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain_cli.probe.cgroup import cpu_quota, host_memory, memory_limit, usable_cores

AVAILABLE = 64 << 30
GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 64 GiB available and 16 cores."""
    memory = SimpleNamespace(available=AVAILABLE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


class System:
    """Fake `/sys/fs/cgroup` and `/proc`."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.root.mkdir()
        (self.proc / "self").mkdir(parents=True)

    def process_in(self, *lines: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        (self.proc / "self" / "cgroup").write_text(text)

    def put(self, group: str, **files: object) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    def memory(self) -> tuple[int, str]:
        return host_memory(self.root, self.proc)

    def cores(self) -> int:
        return usable_cores(self.root, self.proc)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_without_cgroups_the_host_decides(system: System) -> None:
    assert system.memory() == (AVAILABLE, "MemAvailable")
    assert system.cores() == 16


def test_v2_limit_less_what_is_used(system: System) -> None:
    system.process_in("0::/job")
    system.put("job", memory__max=4 * GIB, memory__current=1 * GIB)
    assert system.memory() == (3 * GIB, "cgroup v2 /job, limit 4.00 GiB")


@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_v2_the_tightest_of_all_ancestors_counts(system: System, tightest: str) -> None:
    system.process_in("0::/a/b/c")
    for group in ("a", "a/b", "a/b/c"):
        limit = 2 if group == tightest else 8
        system.put(group, memory__max=limit * GIB, memory__current=GIB)
    assert system.memory() == (GIB, f"cgroup v2 /{tightest}, limit 2.00 GiB")


def test_v2_an_ancestor_that_others_have_filled_counts_with_what_is_left(system: System) -> None:
    system.process_in("0::/a/b")
    system.put("a", memory__max=8 * GIB, memory__current=7 * GIB)
    system.put("a/b", memory__max=4 * GIB, memory__current=GIB)
    assert system.memory() == (GIB, "cgroup v2 /a, limit 8.00 GiB")


def test_v2_a_container_sees_its_limit_at_the_root(system: System) -> None:
    system.process_in("0::/")
    system.put("", memory__max=2 * GIB, memory__current=0, cpu__max="150000 100000")
    assert system.memory() == (2 * GIB, "cgroup v2 /, limit 2.00 GiB")
    assert system.cores() == 2


def test_v2_a_group_that_is_slowed_down_from_some_use_on_is_limited_to_it(system: System) -> None:
    system.process_in("0::/job")
    system.put("job", memory__max=8 * GIB, memory__high=3 * GIB, memory__current=1 * GIB)
    assert system.memory() == (2 * GIB, "cgroup v2 /job, limit 3.00 GiB")
    system.put("job", memory__high="max")
    assert system.memory() == (7 * GIB, "cgroup v2 /job, limit 8.00 GiB")


def test_v2_max_is_no_limit(system: System) -> None:
    system.process_in("0::/job")
    system.put("job", memory__max="max", memory__current=GIB, cpu__max="max 100000")
    assert system.memory() == (AVAILABLE, "MemAvailable")
    assert system.cores() == 16


def test_a_limit_above_what_the_host_has_left_does_not_count(system: System) -> None:
    system.process_in("0::/job")
    system.put("job", memory__max=100 * GIB, memory__current=0)
    assert system.memory() == (AVAILABLE, "MemAvailable")


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(system: System) -> None:
    system.process_in("0::/job")
    system.put("job", memory__max=GIB, memory__current=2 * GIB)
    assert system.memory() == (0, "cgroup v2 /job, limit 1.00 GiB")


def test_file_cache_is_given_back_and_does_not_count_as_used(system: System) -> None:
    system.process_in("0::/job")
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5"
    system.put("job", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert system.memory() == (3 * GIB, "cgroup v2 /job, limit 4.00 GiB")


def test_v1_limit_of_the_memory_controller(system: System) -> None:
    system.process_in("9:memory:/docker/id", "4:cpu,cpuacct:/docker/id", "1:name=systemd:/x")
    system.put(
        "memory/docker/id",
        memory__limit_in_bytes=3 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"inactive_file 0\ntotal_inactive_file {GIB // 2}",
    )
    system.put("memory", memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes=GIB)
    available, source = system.memory()
    assert source == "cgroup v1 /docker/id, limit 3.00 GiB"
    assert available == 2 * GIB + GIB // 2


def test_v1_in_a_container_the_own_group_is_mounted_at_the_root(system: System) -> None:
    """The path is the host's, and only its root is there to be seen."""
    system.process_in("9:memory:/docker/id")
    system.put("memory", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    assert system.memory() == (2 * GIB, "cgroup v1 /, limit 3.00 GiB")


def test_v1_no_limit_is_a_number_near_2_63(system: System) -> None:
    system.process_in("9:memory:/job")
    system.put("memory/job", memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes=GIB)
    assert system.memory() == (AVAILABLE, "MemAvailable")


def test_v1_cpu_quota(system: System) -> None:
    system.process_in("4:cpu,cpuacct:/job", "9:memory:/job")
    system.put("cpu/job", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    system.put("cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert system.cores() == 3


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        (["400000 100000", "max 100000"], 4),
        (["400000 100000", "200000 100000"], 2),
        (["50000 100000", "max 100000"], 1),
        (["6400000 100000", "max 100000"], 16),
    ],
)
def test_v2_cores_are_the_smallest_quota_rounded_up_within_affinity(
    system: System, quotas: list[str], cores: int
) -> None:
    system.process_in("0::/a/b")
    system.put("a", cpu__max=quotas[0])
    system.put("a/b", cpu__max=quotas[1])
    assert system.cores() == cores


def test_the_limit_itself_is_the_smallest_whatever_is_used(system: System) -> None:
    system.process_in("0::/a/b")
    assert memory_limit(system.root, system.proc) is None
    assert cpu_quota(system.root, system.proc) is None
    system.put("a", memory__max=8 * GIB, memory__current=7 * GIB, cpu__max="400000 100000")
    system.put("a/b", memory__max=4 * GIB, memory__current=GIB)
    assert memory_limit(system.root, system.proc) == (4 * GIB, "cgroup v2")
    assert cpu_quota(system.root, system.proc) == 4
