"""Remove checkpoints and what killed saves left behind."""

from pathlib import Path

from megatrain_cli.checkpoint.fsio import NO_RENAME, FileSystem
from megatrain_cli.checkpoint.names import LATEST, MANIFEST, TEMPORARY, TRASH
from megatrain_cli.checkpoint.storage import make_nonce, storage_error
from megatrain_cli.checkpoint.tree import remove_tree

_LEFTOVERS = (
    f"{TEMPORARY}step-",
    f"{TEMPORARY}{LATEST}-",
    f"{TEMPORARY}probe-",
    f"{TRASH}step-",
)


def remove_checkpoint(fs: FileSystem, folder: Path) -> None:
    """Remove a checkpoint; at no moment is a part of it left under its name.

    Raises:
        StorageError: The disk refused; what is left is whole, or is removed at the next start.
    """
    try:
        take_away(fs, folder, make_nonce())
    except OSError as error:
        raise storage_error(fs, folder, error) from error


def remove_leftovers(fs: FileSystem, checkpoints: Path) -> list[str]:
    """Remove what killed saves and removals left behind; the caller holds the run's lock.

    Returns:
        Names of what was removed.

    Raises:
        StorageError: Something cannot be removed.
    """
    removed: list[str] = []
    try:
        if fs.exists(checkpoints):
            for name in fs.list_folder(checkpoints):
                if name.startswith(_LEFTOVERS):
                    remove_tree(fs, checkpoints / name)
                    removed.append(name)
    except OSError as error:
        raise storage_error(fs, checkpoints, error) from error
    return removed


def take_away(fs: FileSystem, folder: Path, nonce: str) -> None:
    """What `remove_checkpoint` does, raising what the system raised.

    Raises:
        OSError: The disk refused.
    """
    trash = folder.with_name(f"{TRASH}{folder.name}-{nonce}")
    try:
        fs.rename_new(folder, trash)
    except FileNotFoundError:
        pass  # removed by a person, or renamed by a request that NFS sent twice
    except OSError as error:
        if error.errno not in NO_RENAME:
            raise
        if fs.exists(folder / MANIFEST):
            fs.unlink(folder / MANIFEST)
            fs.sync_folder(folder)
        remove_tree(fs, folder)
        return
    # Else the old name could come back after a crash, with files missing.
    fs.sync_folder(folder.parent)
    remove_tree(fs, trash)
