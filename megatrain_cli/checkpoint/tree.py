"""Remove a folder with all that is in it."""

from pathlib import Path

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.names import MANIFEST


def remove_tree(fs: FileSystem, path: Path) -> None:
    """Remove a folder and all below it, following no link; what is gone already is no error.

    The manifest goes first: without it no half-removed folder can be taken for a checkpoint.

    Raises:
        OSError: Something cannot be removed.
    """
    try:
        if not fs.is_folder(path):
            fs.unlink(path)
            return
        for name in sorted(fs.list_folder(path), key=lambda name: name != MANIFEST):
            remove_tree(fs, path / name)
        fs.remove_folder(path)
    except FileNotFoundError:
        pass
