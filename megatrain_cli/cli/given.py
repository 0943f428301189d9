"""The checkpoint that a user means: one given by its folder, or the newest good one of a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from megatrain_cli.errors import NoCheckpointError

if TYPE_CHECKING:
    from megatrain_cli.checkpoint.folder import OpenCheckpoint
    from megatrain_cli.checkpoint.fsio import FileSystem


def check_there(path: Path) -> None:
    """Refuse a path that does not exist.

    Raises:
        NoCheckpointError: Nothing is there, or nothing that this user can see.
    """
    try:
        there = path.exists()
    except OSError as error:  # a name too long, or a folder that is closed to us
        raise NoCheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    if not there:
        raise NoCheckpointError(f"{path}: there is no such folder (resolved to {path.absolute()})")


def open_given(path: Path, fs: "FileSystem") -> "OpenCheckpoint":
    """Open a checkpoint, or of a run the one that `resume` would take; says why not a newer one.

    Raises:
        CorruptError: The given checkpoint is damaged; for a run, an older one is taken instead.
        IncompatibleError: It is of another version.
        NoCheckpointError: There is none.
    """
    from megatrain_cli.checkpoint.folder import open_checkpoint
    from megatrain_cli.checkpoint.resolve import is_checkpoint, is_run, resolve
    from megatrain_cli.report.console import talk
    from megatrain_cli.report.plan_view import say

    check_there(path)
    if is_checkpoint(path, fs) or not is_run(path, fs):
        return open_checkpoint(path, fs)
    found = resolve(path, fs)
    for note in found.notes:
        say(f"note: {note}", talk())
    return found.checkpoint
