"""The lock of a run folder: one writer, whoever and wherever the others are.

The kernel's lock (`flock`) decides, and it ends with the process that holds it, however that ends:
so a lock file that a dead process left behind is no lock, and neither clocks nor process ids, which
are reused, are asked. What the file says is for people, and for one question: whether the file is
still the one that was locked. The folder is held by a descriptor too: so it is found again under
another name.
"""

import fcntl
import json
import os
import secrets
import socket
from pathlib import Path

from megatrain_cli.checkpoint.names import CHECKPOINTS
from megatrain_cli.errors import LockedError, StorageError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOST = "Nothing was written. End the other process, or this one, and resume."


class LostLockError(LockedError):
    """The folder has another name or is gone, or the lock's file is; nobody is known to have it."""


class RunLock:
    """Held from its making to `close`.

    Raises:
        LockedError: Another process holds it; says which.
        StorageError: The file cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nonce = secrets.token_hex(8)
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._path)
            self._file.close()
            raise LockedError(
                f"{path.parent} is in use by {holder}. Wait for it, or use another run folder."
            ) from None
        except OSError as error:  # a file system without locks
            self._file.close()
            raise StorageError(f"{path} cannot be locked: {error.strerror or error}.") from error
        self._checkpoints = self._lock_checkpoints()
        self._folder: int | None = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def name(self) -> str:
        """Of the file."""
        return self._path.name

    def sign(self) -> None:
        """Write down who holds it.

        Raises:
            StorageError: The disk refused.
        """
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": _boot_id(),
            "nonce": self._nonce,
        }
        try:
            self._file.truncate(0)
            self._file.write(json.dumps(owner).encode() + b"\n")
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror or error}."
            ) from error

    def check(self) -> None:
        """Make sure that the folder is still ours; to be called before anything is published.

        A person may have removed the file, or the folder, and begun another run in its place.

        Raises:
            LostLockError: It is not where it was, or the lock's file is not in it.
            LockedError: Another process has it.
        """
        if not self._is_at(self._path.parent):
            raise LostLockError(f"{self._path.parent} was moved or removed while the run went on.")
        owner = _read(self._path)
        if owner is None:
            raise LostLockError(f"{self._path} is gone: this run's lock was removed.")
        if owner.get("nonce") != self._nonce:
            raise LockedError(f"{self._path.parent} was taken by {_name(owner)}. {_LOST}")

    def find_folder(self) -> Path | None:
        """Where the folder is by now; None if it was removed, or has no name that leads to it."""
        if self._is_at(self._path.parent):
            return self._path.parent
        try:
            now = Path(f"/proc/self/fd/{self._folder}").readlink()
        except OSError:  # a system without it
            return None
        return now if self._is_at(now) else None

    def follow(self, folder: Path) -> None:
        """From now on the folder is known by this name."""
        self._path = folder / self._path.name

    def close(self) -> None:
        """Let go of it; a second call does nothing."""
        if self._checkpoints is not None:
            os.close(self._checkpoints)
            self._checkpoints = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        self._file.close()

    def _is_at(self, folder: Path) -> bool:
        if self._folder is None:
            return False
        try:
            return os.path.samestat(folder.stat(), os.fstat(self._folder))
        except OSError:
            return False

    def _lock_checkpoints(self) -> int | None:
        """Lock the folder of checkpoints too, where it is there: another run's may be a link to it.

        Returns:
            Its descriptor; None where there is none, or none that can be locked, as on some network
            disks.
        """
        place = self._path.parent / CHECKPOINTS
        try:
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # whoever reads or writes there says why
            return None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            self._file.close()
            raise LockedError(
                f"{place} is in use by a process of another run folder, by a link to it. Wait for "
                "it, or use another run folder."
            ) from None
        except OSError:
            os.close(folder)
            return None
        return folder


def _holder(path: Path) -> str:
    return _name(_read(path) or {})


def _name(owner: dict[str, object]) -> str:
    pid, host = owner.get("pid"), owner.get("host")
    if not isinstance(pid, int) or not isinstance(host, str):
        return "another process"
    return f"process {pid} on {ascii(host)[1:-1]}"


def _read(path: Path) -> dict[str, object] | None:
    """What the file says; empty where it says nothing that can be read, None if it is gone."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
