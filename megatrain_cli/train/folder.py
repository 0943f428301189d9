"""The run folder: one run, one writer."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.names import CHECKPOINTS, step_of
from megatrain_cli.checkpoint.resolve import is_checkpoint
from megatrain_cli.errors import (
    ConfigError,
    CorruptError,
    IncompatibleError,
    LockedError,
    NoCheckpointError,
    StorageError,
)
from megatrain_cli.train.durable import remove_unfinished, replace_file
from megatrain_cli.train.identity import (
    IDENTITY_NAME,
    Origin,
    RunIdentity,
    count_attempt,
    names_checkpoint,
    new_identity,
    read_identity,
    write_identity,
)
from megatrain_cli.train.lock import LostLockError, RunLock
from megatrain_cli.train.superseded import (
    SUPERSEDED,
    cut_journal,
    moved_lines,
    set_aside,
    split_journal,
)

CONFIG_NAME = "config.yaml"


class RunFolder:
    """`RUN/` with `run.json`, `config.yaml`, `metrics.jsonl`, `run.lock` and `checkpoints/`.

    Made for a new run; `reopen` is for one that goes on. A run that ended before anything of it was
    saved is begun again, as the same run, and what its journal says is set aside.

    Attributes:
        path: The folder, as it was given.
        lock: Held until the folder is closed.
        attempt: Which start of the run this is, from 1; 0 until a reopened run goes on.
        notes: What a person should know of what lay there.

    Args:
        path: Made with its parents if it is not there.
        parent: The checkpoint that a forked run starts from.

    Raises:
        ConfigError: The folder holds another run, or lies among its checkpoints.
        LockedError: Another process is running there.
        StorageError: It cannot be made or written.
    """

    path: Path
    lock: RunLock
    attempt: int
    notes: tuple[str, ...]
    _fs: FileSystem
    _identity: RunIdentity | None
    _config: str | None

    def __init__(self, path: Path, parent: Origin | None = None) -> None:
        named_by = "train.output_dir" if parent is None else "--fork"
        _refuse_inside_of_a_run(path, named_by)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
        self._take(path)
        try:
            self._refuse_another_run(named_by)
            self._sign()
            self._identity = self._begun(parent) or new_identity(parent)
            write_identity(self._fs, path, self._identity)
            self.attempt = count_attempt(self._fs, path, self.run_id, 0, {"step": 0})
            num_lines = cut_journal(self._fs, self.metrics, 0, self.attempt)
            if num_lines:
                note = (
                    f"{path} holds a run that ended before anything of it was saved. It begins "
                    f"again; its {moved_lines(num_lines)}"
                )
                self.notes = (note,)
        except BaseException:
            self.lock.close()
            raise

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Take the folder of a run that goes on; nothing in it changes but the lock.

        Raises:
            NoCheckpointError: There is no such folder.
            LockedError: Another process is running there.
            CorruptError: Its `run.json` cannot be read.
        """
        if not path.is_dir():
            raise NoCheckpointError(f"{path}: there is no such run folder.")
        folder = cls.__new__(cls)
        folder._take(path)
        try:
            folder._identity = read_identity(path)
            folder._sign()
        except BaseException:
            folder.lock.close()
            raise
        return folder

    def go_on(
        self, *, run_id: str, step: int, checkpoint_id: str, seen: int, superseded: Sequence[Path]
    ) -> int:
        """Begin an attempt: count it, set aside what it supersedes, cut the journal.

        Args:
            run_id: Of the checkpoint that is resumed from.
            step: Steps completed in it.
            checkpoint_id: Its identity.
            seen: The highest attempt that any checkpoint of the folder names.
            superseded: Folders of checkpoints of later steps.

        Returns:
            How many lines of the journal were set aside.

        Raises:
            IncompatibleError: The checkpoint belongs to another run than the folder.
            CorruptError: The journal cannot be read; nothing was changed.
            StorageError: The disk refused. What was done is done whole, and the next start does
                the rest.
        """
        if self._identity is None:
            self._identity = RunIdentity(run_id)
            write_identity(self._fs, self.path, self._identity)
        if self.run_id != run_id:
            raise IncompatibleError(
                f"{self.path} holds run {self.run_id} and the checkpoint is of run {run_id}. Start "
                "a run of its own from it with `--fork NEW_RUN`."
            )
        split_journal(self._fs, self.metrics, step)  # refuses before anything has changed
        start = {"step": step, "checkpoint": checkpoint_id}
        self.attempt = count_attempt(self._fs, self.path, run_id, seen, start)
        set_aside(self._fs, self.path, superseded, self.attempt)
        return cut_journal(self._fs, self.metrics, step, self.attempt)

    def check(self) -> None:
        """Make sure that it is this run's; before anything is published in it.

        Raises:
            LostLockError: It is not where it was, or its lock is gone: `keep` sees to that.
            LockedError: Another process has it.
        """
        self.lock.check()

    def is_in_place(self) -> bool:
        """Whether it is where it was, with its lock, as far as can be told."""
        try:
            self.check()
        except LockedError:
            return False
        return True

    def keep(self) -> str:
        """As `check`, and take it anew where that is in doubt; before each save.

        The state in memory is worth more than what a person does to a folder meanwhile. One that
        was moved is followed, with all that is in it; one that was removed is made again.

        Returns:
            What had happened, to be told; empty if nothing had.

        Raises:
            LockedError: Another process, or another run, has it.
            StorageError: The disk refused.
        """
        try:
            self.lock.check()
        except LostLockError as lost:
            return self._take_again(lost)
        return ""

    def _take_again(self, lost: LostLockError) -> str:
        old, now = self.path, self.lock.find_folder()
        if now is not None and now != old:
            self.path = now
            self.lock.follow(now)
            if (now / self.lock.name).exists():
                self.lock.check()
                return f"{old} was moved to {now}; the run goes on there"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.close()  # it may hold the folder of checkpoints, which the new one locks too
            self.lock = RunLock(self.path / self.lock.name)
        except OSError as error:
            raise StorageError(f"{lost} {self.path}: {error.strerror or error}.") from error
        except LockedError as error:
            raise LockedError(f"{lost} {error}") from error
        self._sign()
        if now is not None:
            return f"{lost} It was made again"
        self._fill_again(lost)
        return f"{lost} It was made again, without what was saved before"

    def _fill_again(self, lost: LostLockError) -> None:
        """Write down whose the folder is, unless another run is there, which ends this one."""
        assert self._identity is not None
        found = read_identity(self.path)
        if found is None and not has_saved(self.path, self._fs):
            write_identity(self._fs, self.path, self._identity)
        elif found is None or found.run_id != self.run_id:
            raise LockedError(f"{lost} Another run is there by now. Nothing was written.")
        if self._config is not None:
            self.write_config(self._config)

    @property
    def run_id(self) -> str:
        """The run's identity, which its checkpoints carry."""
        assert self._identity is not None  # known from the start, or from `go_on`
        return self._identity.run_id

    @property
    def parent(self) -> Origin | None:
        """Where a forked run comes from."""
        return self._identity.parent if self._identity is not None else None

    def write_config(self, text: str) -> None:
        """Write the config as it was resolved.

        Raises:
            StorageError: The disk refused it.
        """
        self._config = text
        replace_file(self._fs, self.path / CONFIG_NAME, text.encode())

    @property
    def metrics(self) -> Path:
        """The journal: one object a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / CHECKPOINTS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lock.close()

    def _take(self, path: Path) -> None:
        self.path = path
        self.attempt = 0
        self.notes = ()
        self._config = None
        self._fs = FileSystem()
        self.lock = RunLock(path / "run.lock")

    def _sign(self) -> None:
        self.lock.sign()
        remove_unfinished(self._fs, self.path)

    def _begun(self, parent: Origin | None) -> RunIdentity | None:
        """The run that lies there, if it is begun again; one of another parent is not."""
        try:
            found = read_identity(self.path)
        except (CorruptError, IncompatibleError):
            return None
        return found if found is not None and found.parent == parent else None

    def _refuse_another_run(self, named_by: str) -> None:
        """What was saved makes a run: not its journal, whose steps are lost."""
        other = " (`train.output_dir=...`)" if named_by == "train.output_dir" else ""
        if not has_saved(self.path, self._fs):
            split_journal(self._fs, self.metrics, 0)  # refuses what is no journal
            self._refuse_a_config(named_by, other)
            return
        raise ConfigError(
            f"{named_by}: {self.path} holds a run already. Continue it with `megatrain "
            f"resume {self.path}`, name another folder{other}, or remove it; nothing in it was "
            "changed."
        )

    def _refuse_a_config(self, named_by: str, other: str) -> None:
        """No run began here, so it is a person's, most likely the one that names this folder."""
        path = self.path / CONFIG_NAME
        if self._fs.exists(path) and not self._fs.exists(self.path / IDENTITY_NAME):
            raise ConfigError(
                f"{named_by}: the run would write its config over {path}. Name another folder"
                f"{other}; nothing in it was changed."
            )


def _refuse_inside_of_a_run(path: Path, named_by: str) -> None:
    """No run begins where another keeps its checkpoints: retention would remove it with them."""
    fs = FileSystem()
    place = path.absolute()
    for above in (place, *place.parents):
        kept = above.name in (CHECKPOINTS, SUPERSEDED) and fs.exists(above.parent / IDENTITY_NAME)
        if kept or is_checkpoint(above, fs):
            what = "keeps checkpoints of another run" if kept else "is a checkpoint"
            raise ConfigError(f"{named_by}: {path}: {above} {what}. Name a folder outside of it.")


def has_saved(run: Path, fs: FileSystem) -> bool:
    """Whether anything was ever saved by a run, as far as its folder tells.

    A link to a folder of checkpoints that is not there, as of a disk that is not mounted, and an
    attempt that went on from a checkpoint count too.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        if fs.exists(run / CHECKPOINTS) and not (run / CHECKPOINTS).exists():
            return True
        return names_checkpoint(run) or any(
            step_of(name) is not None
            or step_of(name.rpartition("-")[0]) is not None  # as what is superseded is called
            or is_checkpoint(run / folder / name, fs)
            for folder in (CHECKPOINTS, SUPERSEDED, f"{CHECKPOINTS}/{SUPERSEDED}")
            if (run / folder).is_dir()
            for name in fs.list_folder(run / folder)
        )
    except OSError as error:
        raise StorageError(f"{run} cannot be read: {error.strerror or error}.") from error
