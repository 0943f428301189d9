"""What `megatrain resume` decides before anything is loaded or changed.

From which checkpoint, with which config, in which folder, and whether there is anything left to do.
Nothing of the run is changed before `Resumption.go_on`: what is refused leaves all as it was.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue

from megatrain_cli.checkpoint.folder import OpenCheckpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.config.changes import (
    CLASSES,
    Change,
    allowed_keys,
    check_changes,
    compare,
    is_extended,
)
from megatrain_cli.config.load import LoadedConfig, parse_config
from megatrain_cli.config.paths import GivenPath
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import ConfigError, CorruptError, IncompatibleError
from megatrain_cli.train.edited import idle_on_resume, notes_on_edited
from megatrain_cli.train.folder import CONFIG_NAME, RunFolder
from megatrain_cli.train.identity import Origin
from megatrain_cli.train.position import Position, position_of
from megatrain_cli.train.saved_template import find_saved_template
from megatrain_cli.train.superseded import moved_lines
from megatrain_cli.train.target import Choice, choose, find_target

SAVED_CONFIG = "training/config.yaml"
"""The config that a checkpoint was made with, as a file of it."""


@dataclass(frozen=True)
class ResumeRequest:
    """What the command line asks for.

    Attributes:
        path: A run folder, or one checkpoint.
        overrides: Config keys to change, as `key=value`; relative paths start at `here`.
        allow_change: Keys whose meaning may change, several in a word with commas between.
        steps: Where the run is to end.
        rewind: Give up what came after this checkpoint.
        fork: Folder of a new run that starts from it.
        force: Go on with weights that are not finite.
        here: The working folder.
    """

    path: Path
    overrides: tuple[str, ...] = ()
    allow_change: tuple[str, ...] = ()
    steps: int | None = None
    rewind: bool = False
    fork: Path | None = None
    force: bool = False
    here: Path = Path()


@dataclass(frozen=True)
class ResumedConfig:
    """The config of a run that goes on.

    Attributes:
        loaded: In force. Its model is the checkpoint's own folder, as the one that the run began
            from may be gone.
        recorded: To be written down: the same, with the model's path as it was first given.
        allowed: Keys that the user named.
        changes: What belongs in the lineage.
        notes: What the user should be told.
        extended: Whether the length of the run is among what changed.
    """

    loaded: LoadedConfig
    recorded: TrainConfig
    allowed: frozenset[str]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    extended: bool


@dataclass(frozen=True)
class Resumption:
    """A decided resume; the folder's lock is held and the checkpoint's files are open.

    Attributes:
        checkpoint: To load from.
        folder: Where the run goes on.
        config: With what.
        notes: What the user should be told of the choice and the config.
        choice: How the checkpoint was chosen.
        is_fork: Whether `folder` is a new run's.
    """

    checkpoint: OpenCheckpoint
    folder: RunFolder
    config: ResumedConfig
    notes: tuple[str, ...]
    choice: Choice
    is_fork: bool

    @property
    def position(self) -> Position:
        """Where the run goes on, a pending update counted as made."""
        return position_of(self.checkpoint.manifest)

    @property
    def finished(self) -> str | None:
        """Why there is nothing to do, if `verify_finished` agrees; `go_on` must not be called."""
        return finished_text(self.checkpoint.manifest, self.config)

    @property
    def lineage(self) -> tuple[dict[str, JsonValue], ...]:
        """For the next manifests: config changes of all attempts, oldest first."""
        step = self.position.step
        mine = (change.lineage(step) for change in self.config.changes)
        return (*self.checkpoint.manifest.changes, *mine)

    def go_on(self) -> tuple[str, ...]:
        """Begin the attempt, once nothing can refuse it any more: see `RunFolder.go_on`.

        Returns:
            What was done, to be told.

        Raises:
            StorageError: The disk refused.
        """
        manifest = self.checkpoint.manifest
        if self.is_fork:
            return (f"a new run, forked at step {manifest.step} of run {manifest.run_id}",)
        num_lines = self.folder.go_on(
            run_id=manifest.run_id,
            step=self.position.step,
            checkpoint_id=manifest.id,
            seen=self.choice.seen,
            superseded=self.choice.superseded,
        )
        told = [f"{path.name} was moved to superseded/" for path in self.choice.superseded]
        if num_lines:
            told.append(moved_lines(num_lines))
        return tuple(told)


def open_resume(
    request: ResumeRequest,
    fs: FileSystem,
    stack: ExitStack,
    refused: Mapping[Path, str] | None = None,
) -> Resumption:
    """Decide, take the folder, and decide again: another process may have gone on meanwhile.

    Args:
        request: What was asked.
        fs: What checkpoints are read with.
        stack: Closes checkpoint and folder.
        refused: Folders whose tensors were found to be damaged by an earlier resumption, which was
            closed, and why.

    Raises:
        NoCheckpointError: There is nothing to resume from.
        CorruptError: The checkpoint that was named is damaged.
        IncompatibleError: A change is refused, or the checkpoint is of another run.
        LockedError: Another process runs there.
        ConfigError: An override, or what is asked for together, is wrong.
        StorageError: The folder cannot be written.
    """
    target = find_target(request.path, fs)
    is_fork = request.fork is not None
    folder = None
    if target.run is not None and not is_fork:
        folder = stack.enter_context(RunFolder.reopen(target.run))
    choice, config = decide(request, fs, refused)
    checkpoint = stack.enter_context(choice.checkpoint)
    if folder is None:
        assert request.fork is not None  # `choose` refuses what lies in no run otherwise
        manifest = checkpoint.manifest
        origin = Origin(manifest.run_id, manifest.id, manifest.step)
        folder = stack.enter_context(RunFolder(_absolute(request.fork, request), origin))
    notes = (*folder.notes, *choice.notes, *config.notes)
    return Resumption(checkpoint, folder, config, notes, choice, is_fork)


def resumed_config(
    checkpoint: OpenCheckpoint, output_dir: Path, request: ResumeRequest
) -> ResumedConfig:
    """The saved config with what the command line changes, as far as that is allowed.

    Raises:
        ConfigError: An override is wrong, or cannot be used here.
        IncompatibleError: A change is refused.
        CorruptError: The saved config cannot be read.
    """
    manifest, path = checkpoint.manifest, checkpoint.folder / SAVED_CONFIG
    try:
        text = checkpoint.read_aux(SAVED_CONFIG).decode()
    except (KeyError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path}: missing or no text; the run cannot go on from it.") from error
    overridden = [override.partition("=")[0] for override in request.overrides]
    if "train.output_dir" in overridden:
        raise ConfigError(
            "override of train.output_dir: a run goes on in its own folder. Move the folder, or "
            "begin another run with `--fork NEW_RUN`."
        )
    overrides = list(request.overrides)
    if request.steps is not None:
        overrides += [f"train.max_steps={request.steps}", "train.num_epochs=null"]
    here = request.here.absolute()
    saved = parse_config(text, path, (), here).config
    try:
        wanted = parse_config(text, path, overrides, here)
    except ConfigError as error:
        fixed = [key for key in overridden if CLASSES.get(key) == "identity"]
        raise ConfigError([*error.problems, *map(_unchangeable, fixed)]) from None
    allowed = allowed_keys(request.allow_change)
    if request.steps is not None:
        allowed |= {"train.max_steps", "train.num_epochs"}
    template = find_saved_template(
        checkpoint, saved.data.template, wanted.config.data.template, allowed
    )
    changes = compare(saved, wanted.config)
    if template.same:  # where a text lies is no meaning
        changes = [change for change in changes if change.key != "data.template"]
    changes += [] if template.change is None else [template.change]
    recorded = check_changes(changes, allowed)
    _check_length(wanted.config, manifest)
    _check_pending(wanted.config, manifest)
    places = {"model.path": checkpoint.folder.absolute(), "train.output_dir": output_dir}
    if template.path is not None:
        places["data.template"] = template.path
    edited: tuple[str, ...] = ()
    if request.fork is None:
        edited = notes_on_edited(
            output_dir / CONFIG_NAME, saved, frozenset(map(_key_of, overrides))
        )
    own = tuple(note for note in wanted.notes if note.partition(":")[0] in overridden)
    in_force = replace(_with_paths(wanted, places), notes=own)
    step = position_of(manifest).step
    idle = idle_on_resume(changes, wanted.config, request.allow_change, step)
    return ResumedConfig(
        loaded=in_force,
        recorded=_set(wanted.config, {"train.output_dir": output_dir}),
        allowed=allowed,
        changes=recorded,
        notes=(*edited, *own, *idle, *_about(changes, wanted.config, step), *template.notes),
        extended=is_extended(changes),
    )


def finished_text(manifest: Manifest, config: ResumedConfig) -> str | None:
    """What to say of a run that has ended; None where something is left to do."""
    if manifest.pending is not None:
        return None
    total = config.loaded.config.train.max_steps
    ended = manifest.finished and not config.extended if total is None else manifest.step >= total
    if not ended:
        return None
    if any(change.key == "train.max_steps" for change in config.changes):  # it had more to do
        return (
            f"at step {manifest.step} already, and no more was asked for (`train.max_steps: "
            f"{total}`), so nothing was done. Ask for more, or leave that out to go on"
        )
    return f"finished at step {manifest.step}; `--steps M` goes on to step M"


def decide(
    request: ResumeRequest, fs: FileSystem, refused: Mapping[Path, str] | None = None
) -> tuple[Choice, ResumedConfig]:
    """Choose and configure; the choice's checkpoint is open. Only reads, and takes no lock.

    Raises:
        MegatrainError: As `open_resume`.
    """
    target = find_target(request.path, fs)
    choice = choose(
        target, fs, rewind=request.rewind, fork=request.fork is not None, refused=refused
    )
    output_dir = request.fork or target.run
    assert output_dir is not None  # `choose` refuses a checkpoint in no run without a fork
    try:
        config = resumed_config(choice.checkpoint, _absolute(output_dir, request), request)
    except BaseException:
        choice.checkpoint.close()
        raise
    return choice, config


def _key_of(override: str) -> str:
    """Section and key, without what lies below: `pipeline.activations` for its `keep_layers`."""
    return ".".join(override.partition("=")[0].split(".")[:2])


def _unchangeable(key: str) -> str:
    return f"{key}: part of what the checkpoint is; it cannot change on resume. Leave the key out."


def _absolute(path: Path, request: ResumeRequest) -> Path:
    return (request.here / path).absolute()


def _check_length(config: TrainConfig, manifest: Manifest) -> None:
    total = config.train.max_steps
    if total is not None and total < position_of(manifest).step:
        raise ConfigError(
            f"train.max_steps: the run is at step {position_of(manifest).step} already, beyond "
            f"{total}. Ask for more, or name an earlier checkpoint."
        )


def _check_pending(config: TrainConfig, manifest: Manifest) -> None:
    if manifest.pending is not None and config.optimizer.update == "eager":
        raise IncompatibleError(
            "optimizer.update: eager: the checkpoint holds gradients of an update that was under "
            "way, and eager runs have no place for them. Leave the key out until the next "
            "checkpoint."
        )


def _about(changes: Sequence[Change], config: TrainConfig, step: int) -> list[str]:
    """Every change, and what it means where that is not plain."""
    notes = [change.text() for change in changes]
    follow = config.train.max_steps != step
    if follow and is_extended(changes) and config.schedule.type != "constant":
        notes.append(
            f"the {config.schedule.type} schedule now ends with the run: the learning rate of the "
            "steps to come is not what it would have been"
        )
    return notes


def _with_paths(loaded: LoadedConfig, places: Mapping[str, Path]) -> LoadedConfig:
    """The same with other folders, as if they had been written so."""
    kept = [given for given in loaded.given if given.key not in places]
    new = [GivenPath(key, "resume", str(path), path) for key, path in places.items()]
    return replace(loaded, config=_set(loaded.config, places), given=(*kept, *new))


def _set(config: TrainConfig, values: Mapping[str, Path]) -> TrainConfig:
    for key, value in values.items():
        name, _, leaf = key.partition(".")
        kept = str(value) if key == "data.template" else value
        section = getattr(config, name).model_copy(update={leaf: kept})
        config = config.model_copy(update={name: section})
    return config
