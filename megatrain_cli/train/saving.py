"""When a run saves, and what follows where that fails."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatrain_cli.checkpoint.facts import Pending
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.keep import which_to_prune
from megatrain_cli.checkpoint.names import CHECKPOINTS
from megatrain_cli.checkpoint.remove import remove_checkpoint, remove_leftovers
from megatrain_cli.checkpoint.resolve import candidates
from megatrain_cli.checkpoint.save import Retention, Saver, SaveReport, Snapshot
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.config.schema import CheckpointSection
from megatrain_cli.errors import DiskFullError, StorageError
from megatrain_cli.plan.checkpoints import IO_CHUNKS
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train.assemble import Engine, update_order
from megatrain_cli.train.facts import LOSSES_KEPT, RunFacts
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.lock import LostLockError
from megatrain_cli.train.preparation import Prepared
from megatrain_cli.train.step import StepUpdate
from megatrain_cli.units import show_bytes, show_number

# Saves in a row that may fail with `on_error: warn`.
_MAY_FAIL = 2


@dataclass
class Saving:
    """Begins saves, hears how they ended, and knows what is saved.

    Attributes:
        saver: Writes; closed by its owner.
        facts: Of the attempt.
        aux: Files that go into each checkpoint.
        config: `checkpoint` of the run.
        folder: Of the run; kept before each save, wherever it was moved.
        console: Hears of each checkpoint.
        parent: Id of the newest checkpoint that the state descends from.
        saved_step: Its step; None where there is none.
        saved_as: Its folder's name, that of the step before if it was made within an update.
        has_pending: It was made in the middle of that step's update, which has been finished since:
            a whole one is to follow.
        keep_journal: Makes sure that the journal is where the folder is.
        is_left: Whether the run has left an update undone, which a save may wait for in vain.
        losses: Of the last steps.
        last_seconds: How long the last save took; None before the first.
    """

    saver: Saver
    facts: RunFacts
    aux: Mapping[str, bytes]
    config: CheckpointSection
    folder: RunFolder
    console: RunConsole
    parent: str | None = None
    saved_step: int | None = None
    saved_as: str = ""
    has_pending: bool = False
    keep_journal: Callable[[], None] = lambda: None
    is_left: Callable[[], bool] = lambda: False
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    last_seconds: float | None = None
    _wanted: bool = False
    _failed_in_a_row: int = 0
    _merged: bool = False
    _step: int = 0
    _said_slow: bool = False

    def after_step(self, step: int, loss: float, *, asked: bool = False) -> None:
        """Save if it is time, and pass on what has ended; to be called once a step, in order.

        Args:
            step: Completed, or about to be: its updates may be under way.
            loss: Of the step.
            asked: A checkpoint is wanted whatever the interval.

        Raises:
            StorageError: A save failed, and the config says to stop.
            NumericsError: A weight is not finite.
        """
        self.losses.append(loss)
        self._step = step
        self._hear(self.saver.poll)
        every = self.config.save_steps
        if asked or (every is not None and step % every == 0):
            self._wanted = True
        if not self._wanted:
            return
        if self.saver.in_flight:
            self._merged = self._merged or every is not None
            return
        self._hear(self.saver.wait)  # one that has just ended may not have been heard of
        self._begin(step)
        if not self.config.async_save:
            self._hear(lambda: self.saver.wait(self.is_left))

    def finish(self, step: int, left: StepUpdate | None = None) -> bool:
        """Make sure that the state is saved, and wait for it.

        Args:
            step: Updates of the layer that has had the most.
            left: An update that some layers have not had.

        Returns:
            False if the step was saved already: with an update that no layer has had it is another
            state of the same name, and that is not saved.

        Raises:
            StorageError: The disk refused.
            NumericsError: A weight is not finite.
        """
        if left is not None:
            self.saver.abandon()  # it may wait for an update that will never come
        self._merged &= not self.saver.in_flight  # no step is left to tell how long it takes
        self._hear(self.saver.wait)
        self._keep_folder()
        there = FileSystem().exists(self.folder.checkpoints / self.saved_as)  # or was it removed?
        if self.saved_step == step and not self.has_pending and there:
            return False
        self._begin(step, left)
        try:
            reports = self.saver.wait()
        except LostLockError:
            self._begin(step, left)
            reports = self.saver.wait()
        except DiskFullError:
            if self.config.on_disk_full != "prune" or not self._prune():
                raise
            self._begin(step, left)
            reports = self.saver.wait()
        for report in reports:
            self._note(report)
        return True

    def newest(self) -> str:
        """What there is to go on from, where nothing more can be saved."""
        if self.saved_step is None:
            return "Nothing of this run is saved."
        return f"The newest checkpoint is of step {self.saved_step}; `resume` goes on from it."

    def would_take_longer(self, step: int, seconds: float) -> bool:
        """Whether saving a step takes longer than that, by the last save of this process.

        Not if the step is saved already, or is being saved, or none was saved yet: then try.
        """
        if self.saved_step == step or self.saver.in_flight or self.last_seconds is None:
            return False
        return self.last_seconds > seconds

    def _begin(self, step: int, left: StepUpdate | None = None) -> None:
        self._keep_folder()
        pending = None
        if left is not None:
            pending = Pending(
                step=left.step,
                learning_rate=float(left.scalars.lr).hex(),
                grad_scale=float(left.scalars.grad_scale).hex(),
            )
        facts = self.facts.at(step, losses=tuple(self.losses), parent=self.parent, pending=pending)
        self.saver.begin(Snapshot(facts, self.aux))
        self._wanted = False
        try:
            self.keep_journal()  # behind: if it is refused the state is saved all the same
        except StorageError:
            if self.folder.is_in_place():
                raise
            # The folder was moved or removed since it was looked for: the next save follows it.

    def _keep_folder(self) -> None:
        """Find the folder again where a person moved or removed it."""
        said = self.folder.keep()
        if not said:
            return
        self.console.note(said)
        self.saver.move(self.folder.path, self.folder.checkpoints)
        remove_leftovers(FileSystem(), self.folder.checkpoints)  # of a save that it broke

    def _hear(self, listen: Callable[[], list[SaveReport]]) -> None:
        """Note what was saved; do what the config says where a save failed."""
        try:
            reports = listen()
        except LostLockError:  # in the middle of a save; `_keep_folder` says what happened
            self._wanted = True
        except DiskFullError as error:
            if self.config.on_disk_full == "stop":
                raise
            if self.config.on_disk_full == "prune":
                if not self._prune():
                    raise
                self._wanted = True
            self.console.note(f"{error} This save was left out; training goes on.")
        except StorageError as error:
            self._failed_in_a_row += 1
            if self.config.on_error == "stop" or self._failed_in_a_row >= _MAY_FAIL:
                raise
            self.console.note(f"{error} Training goes on (`checkpoint.on_error: warn`).")
        else:
            for report in reports:
                self._note(report)

    def _note(self, report: SaveReport) -> None:
        self._failed_in_a_row, self.has_pending = 0, False
        self.parent, self.saved_step, self.saved_as = report.id, report.step, report.folder.name
        self.last_seconds = report.seconds
        self.console.saved(report.folder, report.num_bytes, report.seconds, report.stall_seconds)
        for note in report.notes:
            self.console.note(note)
        if self._merged and not self._said_slow:
            self._said_slow = True
            steps = self._step - report.step
            rate = show_bytes(round(report.num_bytes / max(report.seconds, 1e-9)))
            self.console.note(
                f"the save of step {report.step} took {report.seconds:.1f} s at {rate}/s, as long "
                f"as {show_number(steps, 'step')}, and those due meanwhile became one. The disk "
                f"keeps up with `checkpoint.save_steps: {steps}` or more."
            )

    def _prune(self) -> bool:
        """Remove what a full disk may cost this run; whether there was any."""
        run_id, fs = self.facts.start.run_id, FileSystem()
        old = which_to_prune(candidates(self.folder.path, fs, run_id))
        for one in old:
            remove_checkpoint(fs, one.folder)
            self.console.note(f"removed {CHECKPOINTS}/{one.folder.name} to make room")
        return bool(old)


def make_saver(
    engine: Engine, made: Prepared, checkpoint: CheckpointSection, folder: RunFolder
) -> Saver:
    """The saver of an attempt; the caller closes it.

    Raises:
        PlanError: The system refused the pool's memory.
    """
    fs = FileSystem()
    return Saver(
        engine.store,
        folder.checkpoints,
        update_order(made.plan),
        fs=fs,
        writer=FileWriter(fs),
        pool_bytes=engine.plan.decisions.pool_bytes,
        threads=IO_CHUNKS,
        paranoid=checkpoint.paranoid,
        retention=Retention(folder.path, checkpoint.keep_last, checkpoint.keep_every_steps),
        atomic_rename=made.storage.atomic_rename,
        check_place=folder.check,
    )
