"""One attempt of a run, new or resumed: its live parts, its steps, and what follows a failure."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.load import LazyLoader
from megatrain_cli.config.load import LoadedConfig, dump_config
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.errors import (
    CorruptError,
    DeviceError,
    DiskFullError,
    LockedError,
    MegatrainError,
    Stopped,
    StoppedUnsaved,
)
from megatrain_cli.plan.checkpoints import IO_CHUNKS
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.journal import Journal
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import Engine, assemble, first_uses, update_order
from megatrain_cli.train.compare import tell_compared, waited_for_data
from megatrain_cli.train.evaluating import evaluations_of
from megatrain_cli.train.facts import run_facts
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.kept_journal import keep_journal
from megatrain_cli.train.loaded import notes_on_loaded
from megatrain_cli.train.loop import Run
from megatrain_cli.train.not_loaded import DamagedCheckpoint, LockRefused
from megatrain_cli.train.preparation import device_errors, prepare_attempt
from megatrain_cli.train.rescue import Rescue, leave_hung
from megatrain_cli.train.resume import Resumption
from megatrain_cli.train.saving import Saving, make_saver
from megatrain_cli.train.step import UpdateStop, finish_update
from megatrain_cli.train.stop import StopRequest
from megatrain_cli.train.superseded import make_way, set_aside
from megatrain_cli.train.watchdog import Watchdog
from megatrain_cli.units import show_number


class Attempt:
    """From a config and a folder to the last checkpoint.

    Args:
        loaded: The config in force.
        recorded: The config to be written down.
        folder: Of the run; its lock is held.
        console: Hears what a person should know.
        stack: Ends all that lives.
        resumption: Where the run goes on; None for a new one.
        force: Go on from weights that are not finite.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        recorded: TrainConfig,
        folder: RunFolder,
        console: RunConsole,
        stack: ExitStack,
        *,
        resumption: Resumption | None = None,
        force: bool = False,
    ) -> None:
        self._loaded, self._recorded = loaded, recorded
        self._folder, self._console, self._stack = folder, console, stack
        self._resumption, self._force = resumption, force
        self._made = prepare_attempt(loaded, recorded, folder, resumption, console)
        self._evaluations = evaluations_of(loaded.config.eval, self._made.rows, folder.metrics)
        self._loader: LazyLoader | None = None
        self._lock_refused: DeviceError | None = None
        with device_errors(self._made.plan.decisions.micro_batch_size):
            self._engine = self._assemble()
        # Set once the folder is this attempt's and all is loaded: only then is there anything to
        # lose. A signal handler reads it, so no lock guards it.
        self._rescue: Rescue | None = None
        self._outdated: Path | None = None  # checkpoint that the last one will replace
        self._given_up = False  # the last evaluation, as a signal came
        self._seconds: list[float] = []  # of each step
        self._waited: list[float] = []  # of these, for rows

    def run(self) -> None:
        """Make all steps, and save.

        Raises:
            DamagedCheckpoint: What was being loaded is not what was saved.
            LockRefused: What was being loaded cannot be page-locked.
            Stopped: A signal asked for it.
            MegatrainError: Something failed; what could be saved is.
        """
        stop = self._stack.enter_context(StopRequest(lambda: self._rescue is None))
        early = self._loaded.config.checkpoint.include_gradients
        rows = self._made.rows
        # The last step's update is always finished: its checkpoint is what the run is for.
        last = rows.total_steps
        leave = UpdateStop(lambda step: early and stop.number is not None and step < last)
        run = Run(self._loaded, self._engine, rows, start=rows.start, stop=leave)
        # Until the last save is on the disk, and one that is given up has been removed from it.
        self._stack.enter_context(Watchdog(self._progress, self._leave_hung))
        try:
            with device_errors(self._engine.plan.decisions.micro_batch_size):
                done = self._make_steps(run, stop)
                self._engine.lanes.drain()
            self._end(done, stop, run)
        except (Stopped, LockedError):
            raise  # saved, or not ours to save
        except Exception as error:
            self._fail(error)
            raise

    def _make_steps(self, run: Run, stop: StopRequest) -> int:
        """Step after step, until the last or a signal; the number of the last one made."""
        config, total = self._loaded.config, self._made.rows.total_steps
        done = self._made.rows.start.step
        rescue: Rescue | None = None
        starts = self._evaluations.is_due(done)
        if self._resumption is None or done >= total or self._has_update_left or starts:
            rescue = self._begin(run)
        if starts:
            self._evaluate(run, done, stop)
        steps = run.steps()
        while stop.signal_name is None:
            record = next(steps, None)
            if record is None:
                break
            rescue = rescue or self._begin(run)
            self._journal.write(record)
            done = record.step
            self._seconds.append(record.seconds)
            self._waited.append(record.breakdown["data_wait_seconds"])
            if done % config.logging.log_steps == 0 or done == total:
                self._console.step(record, total)
            if self._evaluations.is_due(done):
                self._evaluate(run, done, stop)
            rescue.saving.after_step(done, record.loss, asked=stop.take_wish())
        return done

    def _evaluate(self, run: Run, step: int, stop: StopRequest | None) -> None:
        """Evaluate after a step, unless a signal asks to stop."""
        rows = self._made.rows.evaluation
        assert rows is not None
        record = run.evaluate(rows, step, lambda: stop is not None and stop.number is not None)
        self._given_up = record is None
        if record is not None:
            self._journal.write(record)
            self._console.evaluated(record)

    def _begin(self, run: Run) -> Rescue:
        """Make the folder this attempt's, once all is loaded and nothing can refuse it any more."""
        made, folder = self._made, self._folder
        parent: str | None = None
        losses: tuple[str, ...] = ()
        if self._resumption is not None:
            assert self._loader is not None
            report = self._loader.wait()
            # Else its room would stay taken after it is retired, as long as this process lives.
            self._resumption.checkpoint.close()
            for line in notes_on_loaded(report, force=self._force):
                self._console.note(line)
            for line in self._resumption.go_on():
                self._console.note(line)
            manifest = self._resumption.checkpoint.manifest
            parent, losses = manifest.id, manifest.losses_tail
        facts = run_facts(
            self._loaded.config,
            made.skeleton,
            self._engine.plan,
            made.rows,
            data=made.data,
            model=made.model,
            run_id=folder.run_id,
            attempt=folder.attempt,
            changes=made.lineage,
        )
        folder.write_config(dump_config(self._recorded))
        checkpoint = self._loaded.config.checkpoint
        patient = None if checkpoint.on_disk_full == "stop" else self._console.note
        self._journal = self._stack.enter_context(Journal(folder.metrics, patient))
        saver = make_saver(self._engine, made, checkpoint, folder)
        self._stack.callback(saver.close)
        saving = Saving(saver, facts, made.aux, checkpoint, folder, self._console, parent)
        saving.is_left = lambda: run.left is not None
        saving.keep_journal = lambda: keep_journal(self._journal, folder, self._console.note)
        saving.losses.extend(float.fromhex(loss) for loss in losses)
        if self._resumption is not None and not self._resumption.is_fork:
            # With an update to finish too: the checkpoint has all that is needed for it.
            saving.saved_step = made.rows.start.step
            saving.saved_as = self._resumption.checkpoint.folder.name
        self._rescue = rescue = Rescue(self._engine.store.clock, saving, lambda: run.landed)
        if self._has_update_left:
            self._finish_update(run)
            if made.rows.start.step >= made.rows.total_steps:
                self._replace_pending(saving)
        return rescue

    @property
    def _has_update_left(self) -> bool:
        return (
            self._resumption is not None
            and self._resumption.checkpoint.manifest.pending is not None
        )

    def _finish_update(self, run: Run) -> None:
        """Make the rest of the update that the checkpoint was made in the middle of."""
        assert self._resumption is not None
        pending = self._resumption.checkpoint.manifest.pending
        assert pending is not None
        scalars = run.scalars(
            pending.step,
            float.fromhex(pending.learning_rate),
            float.fromhex(pending.grad_scale),
        )
        layers = finish_update(self._engine.store, self._engine.updater, scalars)
        self._console.note(
            f"finished the update of step {pending.step} in {show_number(len(layers), 'layer')}"
        )

    def _replace_pending(self, saving: Saving) -> None:
        """No step follows: the last checkpoint is to be a whole one, and needs the old one's name.

        The old one goes once the new one is on the disk.
        """
        assert self._resumption is not None
        old, saving.has_pending = self._resumption.checkpoint, True
        if not self._resumption.is_fork and old.manifest.step == self._made.rows.start.step:
            self._outdated = make_way(FileSystem(), old.folder)

    def _set_outdated_aside(self) -> None:
        if self._outdated is not None and self._outdated.exists():  # retention may have taken it
            set_aside(FileSystem(), self._folder.path, [self._outdated], self._folder.attempt)
            self._console.note(f"{self._outdated.name} was moved to superseded/")

    def _end(self, done: int, stop: StopRequest, run: Run) -> None:
        """Save what the steps have made, and say why there are no more."""
        assert self._rescue is not None
        left = run.left
        saving, total = self._rescue.saving, self._made.rows.total_steps
        grace = self._loaded.config.checkpoint.grace_seconds - stop.seconds
        if stop.number == signal.SIGTERM and saving.would_take_longer(done, grace):
            raise StoppedUnsaved(
                f"Stopped by SIGTERM after step {done} of {total}. A save takes about "
                f"{saving.last_seconds:.0f} s and {max(grace, 0):.0f} s were left of "
                "`checkpoint.grace_seconds`, so none was begun. The last one is of step "
                f"{saving.saved_step}.",
                signal.SIGTERM,
            )
        step = done if left is None else max(self._engine.store.clock.steps)
        if not saving.finish(step, left) and left is not None:
            # No layer has had it, and the checkpoint of the step before has the name of this one.
            finish_update(self._engine.store, self._engine.updater, left.scalars)
            left = None
            saving.finish(done)
        self._set_outdated_aside()
        if self._given_up and done == total:  # nobody resumes a run that has ended
            self._console.note("all is saved; the last evaluation is made before the run ends")
            self._evaluate(run, done, None)
        tell_compared(self._engine, self._seconds, self._console.note)
        if self._seconds:
            completed = self._made.rows.start.step
            self._console.note(waited_for_data(self._waited, self._seconds, completed))
        if left is not None or done < total:
            how = "in the middle of its update" if left is not None else f"of {total}"
            raise Stopped(
                f"Stopped by {stop.signal_name} after step {done} {how}; all is saved. Go on with "
                f"`megatrain resume {self._folder.path}`."
            )

    def _fail(self, error: Exception) -> None:
        """Save what can be saved after a failure, and say so in it.

        Raises:
            DamagedCheckpoint: The failure is that of loading.
            LockRefused: So is this one.
        """
        if self._rescue is None:
            if self._resumption is not None and not self._engine.store.clock.loaded:
                if isinstance(error, CorruptError):
                    raise DamagedCheckpoint(self._resumption.checkpoint.folder, error) from error
                if isinstance(error, DeviceError) and self._lock_refused is error:
                    raise LockRefused(str(error)) from error
            return
        self._engine.lanes.halt()
        full = isinstance(error, DiskFullError)  # would refuse this save too
        said = self._rescue.saving.newest() if full else self._rescue.save()
        if isinstance(error, MegatrainError):
            error.args = (f"{error} {said}",)
        else:
            self._console.note(said)
        if isinstance(error, DeviceError) and self._engine.plan.machine.has_cuda:
            # Every call to a device that has failed fails again. The process ends next.
            self._stack.pop_all()

    def _progress(self) -> tuple[int, int, int]:
        loaded = 0 if self._loader is None else self._loader.num_bytes
        # Updates wait for what is being saved: on a slow disk for long.
        saved = 0 if self._rescue is None else self._rescue.saving.saver.num_chunks
        return self._engine.lanes.num_ended, loaded, saved

    def _leave_hung(self) -> None:
        leave_hung(self._engine.store.clock, self._rescue, self._console)

    def _assemble(self) -> Engine:
        """The engine; the store of a resumed run is being loaded from now on."""
        made = self._made
        if self._resumption is None:
            engine = assemble(self._loaded, made.skeleton, made.plan, made.functions, self._console)
            self._stack.callback(engine.close)
            return engine
        store = MasterStore(made.skeleton.layouts, made.plan.decisions.tile_format)
        with ExitStack() as building:
            building.callback(store.close)
            self._loader = LazyLoader(
                self._resumption.checkpoint,
                store,
                fs=FileSystem(),
                update_order=update_order(made.plan),
                use_order=first_uses(made.plan),
                threads=IO_CHUNKS,
                before_layer=self._page_lock(store) if made.plan.decisions.pin_store else None,
                finite=not self._force,
            )
            building.callback(self._loader.close)
            self._loader.start()
            engine = assemble(
                self._loaded, made.skeleton, made.plan, made.functions, self._console, store
            )
            building.pop_all()
        self._stack.callback(engine.close)
        self._stack.callback(self._loader.close)
        return engine

    def _page_lock(self, store: MasterStore) -> Callable[[int], None]:
        device = torch.device(self._made.plan.machine.device)

        def lock(layer: int) -> None:
            torch.cuda.set_device(device)  # of this thread
            try:
                store.register_layer(layer)
            except DeviceError as error:
                self._lock_refused = error
                raise

        return lock
