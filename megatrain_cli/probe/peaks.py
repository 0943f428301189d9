"""How much memory this process and its GPU had in use at most."""

import re
from pathlib import Path

import torch


def host_resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """The resident set now; None where the system does not tell."""
    return _field("VmRSS", status)


def host_peak_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """The peak resident set; None where the system does not tell."""
    return _field("VmHWM", status)


def gpu_peak_bytes() -> int:
    """What torch had reserved at most, and what the driver holds beside it; 0 without a GPU.

    Other processes on the same GPU are counted too.
    """
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    return int(torch.cuda.max_memory_reserved() + beside)


def _field(name: str, status: Path) -> int | None:
    try:
        text = status.read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
