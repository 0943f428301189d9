"""Small files of a run folder: after any crash they are whole, as they were or as they are now."""

import re
from contextlib import suppress
from pathlib import Path

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.names import TEMPORARY
from megatrain_cli.checkpoint.storage import make_nonce, storage_error
from megatrain_cli.checkpoint.tree import remove_tree
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.units import MIB

# As `replace_file` names it. A person's files in the folder may begin in the same way.
_UNFINISHED = re.compile(rf"{re.escape(TEMPORARY)}.+-[0-9a-f]{{8}}")


def replace_file(fs: FileSystem, path: Path, data: bytes) -> None:
    """Give a file these bytes in one step; on return they are on the disk.

    Raises:
        StorageError: The disk refused; the file is as it was.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{make_nonce()}")
    try:
        try:
            writer = FileWriter(fs, direct="off", chunk_bytes=MIB)
            writer.write(temporary, path.name, [data] if data else [])
            fs.rename_over(temporary, path)
            fs.sync_folder(path.parent)
        finally:
            with suppress(OSError):
                remove_tree(fs, temporary)
    except OSError as error:
        raise storage_error(fs, path, error, len(data)) from error


def remove_unfinished(fs: FileSystem, folder: Path) -> None:
    """Remove what a killed `replace_file` left in a folder whose lock is held.

    Raises:
        StorageError: Something cannot be removed.
    """
    try:
        for name in fs.list_folder(folder):
            if _UNFINISHED.fullmatch(name):
                fs.unlink(folder / name)
    except OSError as error:
        raise storage_error(fs, folder, error) from error
