"""What the shell, or the scheduler, that began this process allows it: sizes of files, CPU time."""

import errno
import resource
import time

from megatrain_cli.units import show_bytes


def largest_file() -> int | None:
    """Bytes of the largest file that this process may write (`ulimit -f`); None if any."""
    found = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if found == resource.RLIM_INFINITY else found


def advice_on_size(error: OSError) -> str | None:
    """What to do where a file would be too large; None where the error is another one."""
    if error.errno != errno.EFBIG:
        return None
    bytes_allowed = largest_file()
    if bytes_allowed is None:
        return "The file system allows no file of that size: use another disk."
    return (
        f"`ulimit -f` allows files of up to {show_bytes(bytes_allowed)}: raise it "
        "(`ulimit -f unlimited`)."
    )


def note_on_cpu_time() -> str | None:
    """What to say of a limit of CPU time at which a run is killed; None where it may save first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or soft != hard:
        return None
    return (
        f"this process may use {hard} s of CPU time, of all its threads together (`ulimit -t`), "
        f"and has used {time.process_time():.0f} s: the system kills it then, and what was saved "
        "last stays. Below a lower soft limit (`ulimit -S -t`) it stops and saves."
    )
