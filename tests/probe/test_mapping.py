"""What the system lets a process map counts as memory does: a run maps all that it plans."""

import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain_cli.probe.cgroup import host_memory
from megatrain_cli.probe.mapping import mapping_limits
from megatrain_cli.units import GIB, KIB

FREE = 64 * GIB
PAGE = resource.getpagesize()


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process of 2 GiB of addresses, 1 GiB of them its data, on a host with 64 GiB available."""
    (tmp_path / "self").mkdir()
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    pages = [2 * GIB // PAGE, 100, 50, 10, 0, GIB // PAGE, 0]
    (tmp_path / "self" / "statm").write_text(" ".join(map(str, pages)) + "\n")
    overcommit(tmp_path, 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    limit_to(monkeypatch)
    return tmp_path


def limit_to(patch: pytest.MonkeyPatch, **limits: int) -> None:
    by_number = {getattr(resource, name): limit for name, limit in limits.items()}
    none = resource.RLIM_INFINITY
    patch.setattr(resource, "getrlimit", lambda number: (by_number.get(number, none), none))


def overcommit(proc: Path, mode: int) -> None:
    (proc / "sys" / "vm" / "overcommit_memory").write_text(f"{mode}\n")
    text = f"MemTotal: 1 kB\nCommitLimit: {32 * GIB // KIB} kB\nCommitted_AS: {GIB // KIB} kB\n"
    (proc / "meminfo").write_text(text)


def memory(proc: Path) -> tuple[int, str]:
    return host_memory(proc / "no cgroups", proc)


def test_without_limits_the_host_decides(proc: Path) -> None:
    assert list(mapping_limits(proc)) == []
    assert memory(proc) == (FREE, "MemAvailable")


@pytest.mark.parametrize(
    ("limits", "left", "source"),
    [
        ({"RLIMIT_AS": 8 * GIB}, 6, "ulimit -v, limit 8.00 GiB"),
        ({"RLIMIT_DATA": 8 * GIB}, 7, "ulimit -d, limit 8.00 GiB"),
        ({"RLIMIT_DATA": 8 * GIB, "RLIMIT_AS": 8 * GIB}, 6, "ulimit -v, limit 8.00 GiB"),
        ({"RLIMIT_AS": GIB}, 0, "ulimit -v, limit 1.00 GiB"),
        ({"RLIMIT_AS": 900 * GIB}, 64, "MemAvailable"),
    ],
)
def test_the_smallest_is_named(
    proc: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], left: int, source: str
) -> None:
    limit_to(monkeypatch, **limits)
    assert memory(proc) == (left * GIB, source)


def test_a_system_that_promises_no_more_than_it_has_limits_what_is_left(proc: Path) -> None:
    overcommit(proc, 2)
    assert memory(proc) == (31 * GIB, "vm.overcommit_memory 2, CommitLimit 32.0 GiB")
    overcommit(proc, 1)
    assert memory(proc) == (FREE, "MemAvailable")


def test_a_process_that_cannot_be_looked_at_is_taken_for_empty(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(monkeypatch, RLIMIT_AS=8 * GIB)
    (proc / "self" / "statm").unlink()
    assert memory(proc) == (8 * GIB, "ulimit -v, limit 8.00 GiB")
