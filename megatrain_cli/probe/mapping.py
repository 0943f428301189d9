"""How much more this process may map: limits that no memory in use has to do with.

A run maps all that it plans, so what the system would refuse is missing however much RAM is free.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

from megatrain_cli.units import KIB, show_bytes

# By resource: what a shell calls it, and the number of `statm` that counts against it, in pages.
_LIMITS = ((resource.RLIMIT_AS, "ulimit -v", 0), (resource.RLIMIT_DATA, "ulimit -d", 5))
# `vm.overcommit_memory` where the system promises no more memory than it has.
_NEVER = "2"


def mapping_limits(proc: Path = Path("/proc")) -> Iterator[tuple[int, str]]:
    """Bytes that may still be mapped by each limit, and which it is; nothing where there is none.

    Args:
        proc: Where `/proc` is.
    """
    pages = _words(proc / "self" / "statm")
    for number, name, place in _LIMITS:
        limit = resource.getrlimit(number)[0]
        if limit == resource.RLIM_INFINITY:
            continue
        used = int(pages[place]) * resource.getpagesize() if len(pages) > place else 0
        yield max(limit - used, 0), f"{name}, limit {show_bytes(limit)}"
    if _words(proc / "sys" / "vm" / "overcommit_memory") == [_NEVER]:
        # A line is "CommitLimit:    8133264 kB".
        lines = (proc / "meminfo").read_text().splitlines()
        kib = {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1}
        limit, promised = (kib[name] * KIB for name in ("CommitLimit:", "Committed_AS:"))
        source = f"vm.overcommit_memory {_NEVER}, CommitLimit {show_bytes(limit)}"
        yield max(limit - promised, 0), source


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
