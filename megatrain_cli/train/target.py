"""Which checkpoint a path asks for: the newest of a run, or one that is named.

A run falls back to an older checkpoint and says so; a checkpoint that is named does not. Nothing is
changed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain_cli.checkpoint.folder import OpenCheckpoint, open_to_go_on
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.headers import find_model_folder
from megatrain_cli.checkpoint.names import CHECKPOINTS, MANIFEST, TRAINING, step_of
from megatrain_cli.checkpoint.resolve import (
    Candidate,
    candidates,
    check_there,
    is_checkpoint,
    is_run,
    pick,
    refuse_closed,
    resolve,
)
from megatrain_cli.errors import ConfigError, IncompatibleError, NoCheckpointError
from megatrain_cli.train.folder import has_saved
from megatrain_cli.train.identity import IDENTITY_NAME, read_identity
from megatrain_cli.train.position import position_of
from megatrain_cli.train.superseded import later_folders

# As suggestions, where a folder of runs was named.
_SHOWN_RUNS = 3


@dataclass(frozen=True)
class Target:
    """What a path names: a run, or one checkpoint and the run that it lies in, if it does."""

    run: Path | None
    checkpoint: Path | None


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from.

    Attributes:
        checkpoint: Open; whoever asked closes it.
        superseded: Folders of later steps, which a run that goes on from here sets aside.
        seen: The highest attempt that any checkpoint of the run names.
        notes: What a person should know of the choice.
    """

    checkpoint: OpenCheckpoint
    superseded: tuple[Path, ...]
    seen: int
    notes: tuple[str, ...]


def find_target(path: Path, fs: FileSystem) -> Target:
    """Tell a run from a checkpoint.

    Raises:
        NoCheckpointError: It is neither; says what it is, as far as looking at it tells.
        ClosedError: This process may not look at it.
    """
    check_there(path)
    if not path.is_dir():
        raise NoCheckpointError(
            f"{path}: no checkpoint to resume from: it is a file, not a run folder and not a "
            "megatrain checkpoint. It was not opened."
        )
    if fs.exists(path / IDENTITY_NAME) and not has_saved(path, fs):
        identity = read_identity(path)
        again = "`megatrain train`"
        if identity is not None and identity.parent is not None:
            origin = identity.parent
            again = f"`--fork {path}` from step {origin.step} of run {origin.run_id}"
        raise NoCheckpointError(
            f"{path}: nothing to resume from: the run ended before anything of it was saved. "
            f"{again} begins it again in this folder."
        )
    if is_run(path, fs):
        if not any(map(_has_state, (path / CHECKPOINTS).glob("step-*"))):
            _refuse_weights(path)
        return Target(path, None)
    # Without a manifest too: why it is none is then said by who opens it.
    if step_of(path.name) is not None or is_checkpoint(path, fs):
        home = path.absolute().parent
        return Target(home.parent if home.name == CHECKPOINTS else None, path)
    _refuse_weights(path)
    runs = sorted(found.parent for found in path.glob(f"*/{CHECKPOINTS}"))
    if path.name == CHECKPOINTS and any(map(step_of, fs.list_folder(path))):
        runs = [path.parent]
    near = f" Did you mean {' or '.join(map(str, runs[:_SHOWN_RUNS]))}?" if runs else ""
    raise NoCheckpointError(
        f"{path}: no checkpoint to resume from: it is not a run, which has a folder `checkpoints`, "
        f"and not one of its checkpoints.{near}"
    )


def _has_state(folder: Path) -> bool:
    """Whether it is a checkpoint, or what was left of one: its fault is to be told then."""
    try:
        return (folder / MANIFEST).exists() or (folder / TRAINING).exists()
    except OSError:  # it is closed to this process: whoever opens it says so
        return True


def _refuse_weights(path: Path) -> None:
    """Say how to train on from what has weights alone: a model, or a run of an early version."""
    weights = find_model_folder(path)
    if weights is not None:
        raise NoCheckpointError(
            f"{path}: no checkpoint to resume from: it has weights and no optimizer state. To train"
            f" on from the weights, run `megatrain train` with model.path={weights}"
        )


def choose(
    target: Target,
    fs: FileSystem,
    *,
    rewind: bool,
    fork: bool,
    refused: Mapping[Path, str] | None = None,
) -> Choice:
    """Open the checkpoint to go on from.

    Args:
        target: What was named.
        fs: What it is read with.
        rewind: Later checkpoints may be given up.
        fork: Another run begins from it, so that none is given up.
        refused: Folders whose tensors were found to be damaged, and why: passed over where a run
            was named.

    Raises:
        ConfigError: What is asked for does not go together, or `--rewind` or `--fork` is missing.
        NoCheckpointError: There is none.
        CorruptError: The one that was named is damaged.
        IncompatibleError: It is of another run than the folder that it lies in.
        ClosedError: A newer one cannot be looked at.
    """
    if rewind and fork:
        raise ConfigError("--rewind and --fork: a fork gives up nothing. Name one of them.")
    if rewind and target.checkpoint is None:
        raise ConfigError("--rewind: name the checkpoint to go back to, not the run.")
    if target.run is None and not fork:
        raise ConfigError(
            f"{target.checkpoint} lies in no run folder that could go on. Begin a run from it with "
            "`--fork NEW_RUN`."
        )
    identity = None if target.run is None else read_identity(target.run)
    run_id = None if identity is None else identity.run_id
    if target.checkpoint is None:
        assert target.run is not None  # a target is one of the two
        checkpoint, notes = resolve(target.run, fs, run_id, refused)
    else:
        checkpoint = open_to_go_on(target.checkpoint, fs)
        notes = checkpoint.notes
    try:
        if target.run is None or fork:
            return Choice(checkpoint, (), 0, notes)
        found = candidates(target.run, fs, run_id)
        if target.checkpoint is not None:
            notes = (*notes, *_check_named(checkpoint, found, run_id, rewind=rewind))
        step = position_of(checkpoint.manifest).step
        later = later_folders(fs, target.run / CHECKPOINTS, step)
        attempts = [one.manifest.attempt for one in found if one.manifest is not None]
        seen = max([checkpoint.manifest.attempt, *attempts])
    except BaseException:
        checkpoint.close()
        raise
    return Choice(checkpoint, tuple(later), seen, notes)


def _check_named(
    checkpoint: OpenCheckpoint, found: Sequence[Candidate], run_id: str | None, *, rewind: bool
) -> list[str]:
    """Refuse one that is not the newest, without `--rewind`; what to say of `--rewind` else."""
    folder, its_run = checkpoint.folder, checkpoint.manifest.run_id
    if run_id is not None and its_run != run_id:
        raise IncompatibleError(
            f"{folder} is of run {its_run}, and lies in the folder of run {run_id}. Begin a run "
            "from it with `--fork NEW_RUN`."
        )
    for one in found if not rewind else ():
        refuse_closed(one)
    newest = pick(found)
    if newest is None or newest.manifest is None:
        return []
    is_newest = newest.manifest.id == checkpoint.manifest.id
    if rewind:
        said = f"--rewind: has no effect: {folder.name} is the newest checkpoint of its run"
        # Where a newer one may be whole, it is refused without.
        return [said] if is_newest and not any(one.closed for one in found) else []
    if not is_newest:
        raise ConfigError(
            f"{folder} is not the newest checkpoint of its run: {newest.folder.name} is. Resume"
            " the run's folder to go on from that one, add `--rewind` to give up what came after"
            " this one (it is moved, not deleted), or `--fork NEW_RUN` to keep both."
        )
    return []
