"""What has a file's name and is none: reading one may wait for ever."""

import os
import socket
from pathlib import Path

OTHERS = ("pipe", "socket", "device")


def make_other(kind: str, path: Path) -> None:
    """Put one of `OTHERS` there."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")  # making one is for root alone
    else:
        with socket.socket(socket.AF_UNIX) as server:
            here = os.open(path.parent, os.O_RDONLY)  # the names of sockets are short
            server.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
