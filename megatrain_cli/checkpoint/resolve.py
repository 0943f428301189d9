"""Find the checkpoints of a run, and the one to go on from.

Every folder `step-*` is looked at; `latest.json` is only a hint. Order is (attempt, step), as
integers: a later attempt comes first even at a lower step, for a run that was rewound goes on from
there. Clocks and times of files are never asked.
"""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from megatrain_cli.checkpoint.folder import (
    CLOSED,
    OpenCheckpoint,
    open_checkpoint,
    open_to_go_on,
    read_manifest,
)
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.names import (
    CHECKPOINTS,
    KEEP,
    LATEST,
    MANIFEST,
    TEMPORARY,
    TRASH,
    step_of,
)
from megatrain_cli.checkpoint.places import short
from megatrain_cli.errors import (
    ClosedError,
    CorruptError,
    MegatrainError,
    NoCheckpointError,
    StorageError,
)

_MAX_HINT_BYTES = 64 << 10


@dataclass(frozen=True)
class Candidate:
    """A folder that may be a checkpoint of the run.

    Attributes:
        step: As the folder's name says.
        manifest: None if it cannot be read.
        problem: Why one cannot resume from it, in one line; None if one can.
        notes: What is odd about it and harmless.
        kept: Whether a person placed a `KEEP` file in it.
        hinted: Whether `latest.json` names it.
        closed: Whether the problem is that this process may not read it: it may be whole.
    """

    folder: Path
    step: int
    manifest: Manifest | None
    problem: str | None
    notes: tuple[str, ...] = ()
    kept: bool = False
    hinted: bool = False
    closed: bool = False

    @property
    def order(self) -> tuple[bool, int, int]:
        """Larger is newer. An unknown attempt counts as the newest: better warned in vain."""
        attempt = -1 if self.manifest is None else self.manifest.attempt
        return self.manifest is None, attempt, self.step


class Resolved(NamedTuple):
    """The checkpoint to go on from, open, and what a person should be told about the choice."""

    checkpoint: OpenCheckpoint
    notes: tuple[str, ...]


def check_there(path: Path) -> None:
    """Refuse a path where nothing is, or which this process may not look at.

    Raises:
        NoCheckpointError: Nothing is there.
        ClosedError: Something may be.
    """
    try:
        found = path.stat()
        closed = S_ISDIR(found.st_mode) and not os.access(path, os.R_OK | os.X_OK)
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError(
            f"{path}: there is no such folder (resolved to {path.absolute()})"
        ) from None
    except OSError as error:
        kind = ClosedError if error.errno in CLOSED else NoCheckpointError
        raise kind(f"{path} cannot be looked at: {error.strerror}.") from error
    if closed:
        raise ClosedError(f"{path} cannot be looked at: {os.strerror(errno.EACCES)}.")


def is_run(path: Path, fs: FileSystem) -> bool:
    """Whether a folder is a run's: it has a folder of checkpoints."""
    return fs.exists(path / CHECKPOINTS)


def is_checkpoint(path: Path, fs: FileSystem) -> bool:
    """Whether a folder claims to be a checkpoint; `open_checkpoint` tells whether it is one."""
    return fs.exists(path / MANIFEST)


def candidates(run: Path, fs: FileSystem, run_id: str | None = None) -> list[Candidate]:
    """All checkpoints of a run, broken ones too, newest first.

    Each is opened and checked as far as that goes without reading tensors, and closed again.

    Args:
        run: The run's folder.
        fs: What it is read with.
        run_id: The run's identity; checkpoints of another run are a problem. None: any will do.

    Raises:
        StorageError: The folder of checkpoints cannot be read.
    """
    hint = _read_hint(run, fs)[0]
    found = [
        _look_at(run / CHECKPOINTS / name, step, fs, run_id, hint)
        for name in _names(run, fs)
        if (step := step_of(name)) is not None
    ]
    # Two folders of one step and attempt differ in zeros only; the hint knows which was meant.
    return sorted(found, key=lambda one: (one.order, one.hinted, one.folder.name), reverse=True)


def pick(found: Sequence[Candidate]) -> Candidate | None:
    """Which of them a run resumes from: the first without a problem."""
    return next((one for one in found if one.problem is None), None)


def resolve(
    run: Path,
    fs: FileSystem,
    run_id: str | None = None,
    refused: Mapping[Path, str] | None = None,
) -> Resolved:
    """Open the newest checkpoint of a run that is whole.

    Args:
        run: The run's folder.
        fs: What it is read with.
        run_id: The run's identity; checkpoints of another run are refused. None: any will do.
        refused: Folders found to be damaged while their tensors were read, and why.

    Returns:
        The checkpoint, which the caller closes, and notes: every newer one and why it was refused,
        and what is wrong with the hint.

    Raises:
        NoCheckpointError: There is none; says why each that was found is refused.
        ClosedError: A newer one cannot be looked at, and may be whole.
        StorageError: The folder of checkpoints cannot be read.
    """
    bad = {folder.name: reason for folder, reason in (refused or {}).items()}
    misnamed = _misnamed(run, fs)
    notes = [*_read_hint(run, fs)[1], *misnamed]
    rejected: list[str] = []
    found = candidates(run, fs, run_id)
    for one in found:
        refuse_closed(one)
        problem = bad.get(one.folder.name, one.problem)
        if problem is None:
            try:
                checkpoint = open_to_go_on(one.folder, fs)
            except MegatrainError as error:
                problem = str(error)
            else:
                rejected = [f"{line} Going on from {one.folder}." for line in rejected]
                return Resolved(checkpoint, (*notes, *rejected, *_about_hint(found, one)))
        rejected.append(f"{one.folder.name} is refused: {problem}")
    where = run / CHECKPOINTS
    if not rejected:
        raise NoCheckpointError(
            " ".join([f"{where} has no checkpoint: nothing to resume from.", *misnamed])
        )
    reasons = "\n".join(f"  {line}" for line in rejected)
    raise NoCheckpointError(f"{where} has no whole checkpoint: nothing to resume from.\n{reasons}")


def refuse_closed(one: Candidate) -> None:
    """Do not go on from an older one where it is this process that is at fault.

    Raises:
        ClosedError: It may be whole.
    """
    if one.closed:
        raise ClosedError(
            f"{one.problem} {one.folder.name} may be whole, so no older one is taken in its place. "
            "Let this process read it, or move it out of `checkpoints`."
        )


def _misnamed(run: Path, fs: FileSystem) -> list[str]:
    """Of what claims to be a checkpoint and has no name of one, as after a move or a copy."""
    return [
        f"{CHECKPOINTS}/{short(name)[1:-1]} is ignored: its name is not `step-` and a number."
        for name in _names(run, fs)
        if step_of(name) is None
        and not name.startswith((TEMPORARY, TRASH))
        and is_checkpoint(run / CHECKPOINTS / name, fs)
    ]


def _about_hint(found: Sequence[Candidate], chosen: Candidate) -> tuple[str, ...]:
    hinted = next((one for one in found if one.hinted), chosen)
    if hinted is chosen:
        return ()
    newest = f"the newest whole checkpoint is {chosen.folder.name}"
    return (f"{LATEST} names {hinted.folder.name}; {newest}, so that hint is ignored.",)


def _look_at(
    folder: Path, step: int, fs: FileSystem, run_id: str | None, hint: str | None
) -> Candidate:
    manifest: Manifest | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()
    kept = closed = False
    try:
        if not fs.is_folder(folder):
            raise CorruptError(f"{folder} is a link or a file, where a folder belongs.")
        kept = fs.exists(folder / KEEP)
        manifest = read_manifest(folder, fs)
        problem = _foreign(manifest, folder, step, run_id)
        with open_checkpoint(folder, fs) as checkpoint:
            notes = checkpoint.notes
    except MegatrainError as error:
        problem, closed = str(error), isinstance(error, ClosedError)
    except OSError as error:
        problem = f"{folder} cannot be looked at: {error.strerror or error}."
        closed = error.errno in CLOSED
    return Candidate(folder, step, manifest, problem, notes, kept, folder.name == hint, closed)


def _foreign(manifest: Manifest, folder: Path, step: int, run_id: str | None) -> str | None:
    if manifest.step != step:
        return f"{folder} is named after step {step}, and holds step {manifest.step}. Rename it."
    if run_id is not None and manifest.run_id != run_id:
        return (
            f"{folder} is of the run {manifest.run_id}, and this run is {run_id}. "
            "Move it out of this folder."
        )
    return None


def _names(run: Path, fs: FileSystem) -> list[str]:
    try:
        return fs.list_folder(run / CHECKPOINTS)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(
            f"{run / CHECKPOINTS} cannot be read: {error.strerror or error}."
        ) from error


def _read_hint(run: Path, fs: FileSystem) -> tuple[str | None, tuple[str, ...]]:
    """The folder's name that `latest.json` has, and what is wrong with it."""
    where = run / CHECKPOINTS / LATEST
    try:
        with ExitStack() as held:
            folder_fd = fs.open_folder(run / CHECKPOINTS)
            held.callback(fs.close, folder_fd)
            fd = fs.open_file(folder_fd, LATEST, False)
            held.callback(fs.close, fd)
            buffer = memoryview(bytearray(_MAX_HINT_BYTES))
            hint = json.loads(bytes(buffer[: fs.read(fd, buffer, 0)]))
    except (FileNotFoundError, NotADirectoryError):
        return None, ()
    except (OSError, ValueError, RecursionError) as error:
        return None, (f"{where} cannot be read and is ignored: {short(str(error))[1:-1]}.",)
    name = hint.get("checkpoint") if isinstance(hint, dict) else None
    if not isinstance(name, str) or step_of(name) is None:
        return None, (f"{where} names no checkpoint and is ignored: {short(name)}.",)
    if not fs.exists(run / CHECKPOINTS / name):
        return None, (f"{where} names {name}, which is not there; ignored.",)
    return name, ()
