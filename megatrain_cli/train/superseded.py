"""What a run leaves behind when it goes on from an earlier step: set aside, never deleted.

Lines of the journal and checkpoints beyond that step belong to a branch that is given up. They go
to `RUN/superseded/`, so that the journal has each step once and no later save meets an old folder.
"""

import errno
import json
from collections.abc import Sequence
from pathlib import Path

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.names import folder_name, step_of
from megatrain_cli.checkpoint.storage import ensure_folder, storage_error
from megatrain_cli.errors import CorruptError
from megatrain_cli.regular import read_file
from megatrain_cli.train.durable import replace_file
from megatrain_cli.units import show_number

SUPERSEDED = "superseded"


def cut_journal(fs: FileSystem, journal: Path, step: int, attempt: int) -> int:
    """Move the lines of steps after `step` to `superseded/metrics-<attempt>.jsonl`.

    They are copied first and cut then: after a crash in between they are in both files, and the
    next start moves them again. A last line that was cut off while it was written is dropped.

    Returns:
        How many lines were moved.

    Raises:
        CorruptError: A whole line is no record.
        StorageError: The disk refused.
    """
    kept, moved = split_journal(fs, journal, step)
    if moved:
        folder = journal.parent / SUPERSEDED
        _make_folder(fs, folder)
        replace_file(fs, _free_name(fs, folder, attempt), b"".join(moved))
        replace_file(fs, journal, b"".join(kept))
    return len(moved)


def set_journal_aside(fs: FileSystem, journal: Path, attempt: int) -> bool:
    """Move what has the name of the journal, of whatever kind; False if there is nothing.

    Raises:
        StorageError: The disk refused.
    """
    if not fs.exists(journal):
        return False
    folder = journal.parent / SUPERSEDED
    _make_folder(fs, folder)
    try:
        fs.rename_new(journal, _free_name(fs, folder, attempt))
    except OSError as error:
        raise storage_error(fs, journal, error) from error
    return True


def split_journal(fs: FileSystem, journal: Path, step: int) -> tuple[list[bytes], list[bytes]]:
    """The whole lines of steps up to `step`, and those after it.

    Raises:
        CorruptError: A whole line is no record.
        StorageError: It cannot be read.
    """
    try:
        raw = read_file(journal) if journal.exists() else b""
    except OSError as error:
        raise storage_error(fs, journal, error) from error
    kept: list[bytes] = []
    moved: list[bytes] = []
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(keepends=True), 1):
        (moved if _step_of(line, journal, number) > step else kept).append(line)
    return kept, moved


def later_folders(fs: FileSystem, checkpoints: Path, step: int) -> list[Path]:
    """Folders of steps after `step`, whole or not, the last first.

    Raises:
        StorageError: The folder cannot be read.
    """
    try:
        names = fs.list_folder(checkpoints) if fs.exists(checkpoints) else []
    except OSError as error:
        raise storage_error(fs, checkpoints, error) from error
    found = [(number, name) for name in names if (number := step_of(name)) is not None]
    return [checkpoints / name for number, name in sorted(found, reverse=True) if number > step]


def make_way(fs: FileSystem, folder: Path) -> Path:
    """Free the name of a checkpoint whose step is to be saved anew, and lose nothing by it.

    It stays a checkpoint of the run, under another spelling of its step, until the new one is on
    the disk: after a crash at any moment one of the two is found. `set_aside` is for then.

    Returns:
        Where it is now, which is where it was if no other spelling was needed.

    Raises:
        StorageError: The disk refused; it is where it was.
    """
    step = step_of(folder.name)
    if step is None or folder.name != folder_name(step):
        return folder
    other = folder.with_name(folder.name.replace("-", "-0", 1))
    try:
        fs.rename_new(folder, other)
        fs.sync_folder(folder.parent)
    except OSError as error:
        raise storage_error(fs, folder, error) from error
    return other


def set_aside(fs: FileSystem, run: Path, folders: Sequence[Path], attempt: int) -> list[Path]:
    """Move checkpoints to `superseded/<name>-<attempt>`, each durably before the next.

    Where `checkpoints` is a link to another disk they stay on that one, in a `superseded` of its
    own: a move between disks would be a copy.

    Returns:
        Where they are now.

    Raises:
        StorageError: The disk refused; folders not yet moved are where they were.
    """
    moved = []
    for folder in folders:
        name = f"{folder.name}-{attempt}"
        try:
            target = _moved(fs, folder, run / SUPERSEDED / name)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise storage_error(fs, folder, error) from error
            try:
                target = _moved(fs, folder, folder.parent / SUPERSEDED / name)
            except OSError as again:
                raise storage_error(fs, folder, again) from again
        moved.append(target)
    return moved


def _moved(fs: FileSystem, folder: Path, target: Path) -> Path:
    ensure_folder(fs, target.parent)
    fs.rename_new(folder, target)
    fs.sync_folder(target.parent)
    fs.sync_folder(folder.parent)
    return target


def _free_name(fs: FileSystem, folder: Path, attempt: int) -> Path:
    aside = folder / f"metrics-{attempt}.jsonl"
    while fs.exists(aside):  # of another run that was begun in this folder
        aside = aside.with_stem(f"{aside.stem}-more")
    return aside


def _make_folder(fs: FileSystem, path: Path) -> None:
    try:
        ensure_folder(fs, path)
    except OSError as error:
        raise storage_error(fs, path, error) from error


def _step_of(line: bytes, journal: Path, number: int) -> int:
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(
            f"{journal}:{number}: not a step record: {error}. Move the file away to go on."
        ) from error
    if not isinstance(step, int):
        raise CorruptError(f"{journal}:{number}: not a step record. Move the file away to go on.")
    return step


def moved_lines(count: int) -> str:
    """What to say of lines of the journal that were set aside."""
    were = "was" if count == 1 else "were"
    return f"{show_number(count, 'line')} of metrics.jsonl {were} moved to superseded/"
