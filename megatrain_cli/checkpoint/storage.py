"""What a disk can do and holds, and the error that says what it refused."""

import errno
import secrets
from dataclasses import dataclass
from pathlib import Path

from megatrain_cli.checkpoint.fsio import BLOCK, NO_RENAME, FileSystem
from megatrain_cli.checkpoint.names import TEMPORARY
from megatrain_cli.checkpoint.tree import remove_tree
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import DiskFullError, StorageError
from megatrain_cli.limits import advice_on_size
from megatrain_cli.units import show_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class StorageFacts:
    """What a probe found.

    Attributes:
        free_bytes: For this user.
        direct: Writes can pass the page cache by.
        atomic_rename: A folder can be renamed. Where not, a checkpoint is written under its final
            name, and only its manifest says that it is whole.
    """

    free_bytes: int
    direct: bool
    atomic_rename: bool


def make_nonce() -> str:
    """A new part for the name of a temporary folder."""
    return secrets.token_hex(4)


def storage_error(
    fs: FileSystem, path: Path, error: OSError, need: int | None = None
) -> StorageError:
    """The error to raise for what a disk refused.

    Args:
        fs: Asked for the room that is left; an answer is not needed.
        path: What could not be written as a whole; the file at fault is taken from `error`.
        error: What the system said.
        need: Bytes of the whole; None when something was to be removed.
    """
    try:
        have = f"{show_bytes(fs.free_bytes(_nearest(fs, path)))} is free"
    except OSError:
        have = "how much is free is unknown"
    kind, advice = StorageError, "Look at the disk's health and at the folder's permissions."
    if error.errno in _FULL:
        kind, advice = DiskFullError, "Make room, or write to another disk."
    advice = advice_on_size(error) or advice
    act, wanted = ("removed", "") if need is None else ("written", f"it needs {show_bytes(need)}, ")
    where = f" ({error.filename})" if error.filename not in (None, str(path), path) else ""
    return kind(
        f"{path} could not be {act}: {error.strerror or error}{where}; {wanted}{have}. {advice} "
        "What was saved before is untouched."
    )


def ensure_folder(fs: FileSystem, path: Path) -> bool:
    """Make a folder and those above it, each known to the disk; False if it was there.

    Raises:
        OSError: It cannot be made.
    """
    if fs.exists(path) or path == path.parent:
        return False
    ensure_folder(fs, path.parent)
    fs.make_folder(path)
    fs.sync_folder(path.parent)
    return True


def check_room(fs: FileSystem, path: Path, need: int, spare: int = 0) -> int:
    """Bytes that are free where `path` is or will be.

    Raises:
        OSError: The file system does not answer.
        DiskFullError: Fewer than `need`, with `spare` more that can be freed.
    """
    free = fs.free_bytes(_nearest(fs, path))
    if free + spare < need:
        more = f", and {show_bytes(spare)} in older checkpoints" if spare else ""
        raise DiskFullError(
            f"{path} needs {show_bytes(need)} and {show_bytes(free)} is free{more}. Make room, or "
            "write to another disk."
        )
    return free


def check_storage(
    fs: FileSystem, checkpoints: Path, num_bytes_needed: int, spare: int = 0
) -> StorageFacts:
    """Find out before the first step whether a checkpoint can be written: write, sync, rename.

    Args:
        fs: Where.
        checkpoints: Made if it is not there. The run's lock is held.
        num_bytes_needed: Of one checkpoint.
        spare: Of these, bytes that the run may make room for itself, or do without.

    Raises:
        StorageError: The folder cannot be written or synced, or has too little room.
    """
    probe = checkpoints / f"{TEMPORARY}probe-{make_nonce()}"
    moved = probe.with_name(f"{probe.name}-moved")
    try:
        ensure_folder(fs, checkpoints)
        # Whoever made it may not have waited for its name to reach the disk.
        fs.sync_folder(checkpoints.parent)
        try:
            fs.make_folder(probe)
            writer = FileWriter(fs, chunk_bytes=BLOCK)
            writer.write(probe / "file", "file", [bytes(BLOCK)])
            fs.sync_folder(probe)
            atomic_rename = _can_rename(fs, probe, moved)
            fs.sync_folder(checkpoints)
        finally:
            for path in (probe, moved):
                remove_tree(fs, path)
        free = check_room(fs, checkpoints, num_bytes_needed, spare)
    except OSError as error:
        raise storage_error(fs, checkpoints, error, num_bytes_needed) from error
    return StorageFacts(free, writer.mode != "buffered", atomic_rename)


def _can_rename(fs: FileSystem, source: Path, target: Path) -> bool:
    try:
        fs.rename_new(source, target)
    except OSError as error:
        if error.errno not in NO_RENAME:
            raise
        return False
    return fs.exists(target) and not fs.exists(source)


def _nearest(fs: FileSystem, path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    while not fs.exists(path) and path != path.parent:
        path = path.parent
    return path
