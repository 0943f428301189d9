"""Regular files are all that is read: a pipe or a device might be waited for for ever.

They are told by looking, before anything is opened: opening a pipe is seen at its other end, and
opening some devices does something.
"""

import errno
import os
from pathlib import Path
from stat import S_IFMT, S_ISBLK, S_ISCHR, S_ISDIR, S_ISFIFO, S_ISREG, S_ISSOCK
from typing import BinaryIO


def other_kind(mode: int) -> str | None:
    """What has this `st_mode`, such as `a pipe`; None for a file or a folder."""
    if S_ISREG(mode) or S_ISDIR(mode):
        return None
    kinds = {"a pipe": S_ISFIFO, "a socket": S_ISSOCK, "a device": S_ISCHR, "a disk": S_ISBLK}
    return next((kind for kind, fits in kinds.items() if fits(mode)), f"of kind {S_IFMT(mode):o}")


def open_file(path: Path) -> BinaryIO:
    """A regular file, open for reading, or a link to one.

    Raises:
        OSError: It cannot be opened, or is a folder, a pipe, a socket or a device; says which.
    """
    kind = other_kind(path.stat().st_mode)
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))

    def at_once(name: str, flags: int) -> int:  # whatever has taken its place since
        return os.open(name, flags | os.O_NONBLOCK)

    return open(path, "rb", opener=at_once)


def read_file(path: Path) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: As `open_file`.
    """
    with open_file(path) as file:
        return file.read()
