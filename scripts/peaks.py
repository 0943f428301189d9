"""How much memory this process and its GPU had in use at most."""

import re
from contextlib import suppress
from pathlib import Path

import psutil
import torch


def forget_peaks() -> None:
    """Start counting anew: what was held before, and is held no more, no longer counts."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    forget_host_peak()


def forget_host_peak() -> None:
    """Start counting the peak resident set anew."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak resident set, since 4.0


def host_peak_bytes() -> int:
    """The peak resident set."""
    return _status("VmHWM")


def host_bytes() -> int:
    """The resident set now."""
    return _status("VmRSS")


def machine_bytes() -> int:
    """What all of the machine holds. The driver's own pinned memory is in no resident set."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def page_cache_bytes() -> int:
    """What the page cache holds: of this container where it says so, else of the machine."""
    for file, key in (
        ("/sys/fs/cgroup/memory.stat", "file"),
        ("/sys/fs/cgroup/memory/memory.stat", "total_cache"),
    ):
        with suppress(OSError):
            found = re.search(rf"^{key} (\d+)$", Path(file).read_text(), re.MULTILINE)
            if found is not None:
                return int(found[1])
    return int(psutil.virtual_memory().cached)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024
