"""The journal of a run, whatever a person does to its file meanwhile."""

from collections.abc import Callable

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.report.journal import Journal
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.superseded import set_journal_aside


def keep_journal(journal: Journal, folder: RunFolder, note: Callable[[str], None]) -> None:
    """Write it anew where its file was removed, or another one has its name.

    Asked with each save, as lines of later steps are cut on resume anyway.

    Args:
        journal: Has all lines, if only in a file that has no name any more.
        folder: Kept, wherever it was moved.
        note: Hears what had happened.

    Raises:
        StorageError: The disk refused; lines still go where they went.
    """
    path = folder.metrics
    if journal.is_at(path):
        journal.path = path
        return
    moved = set_journal_aside(FileSystem(), path, folder.attempt)
    journal.write_anew(path)
    how = "replaced by another, which was moved to superseded/" if moved else "removed"
    note(f"{path} was {how}; it was written anew, with all its lines")
