"""Save a run's state while it goes on training, without a second copy of it.

A thread walks the layers in the order in which the next updates will touch them and writes each
tile from where it lies. An update that comes to a tile before it is written copies it into a small
pool first, or waits. See [Note: The window of a snapshot] in `store/clock.py`.
"""

import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain_cli import __version__
from megatrain_cli.checkpoint.commit import write_checkpoint, write_latest
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.keep import which_to_remove
from megatrain_cli.checkpoint.layer_writer import LayerWriter
from megatrain_cli.checkpoint.manifest import Created, Manifest, Shard
from megatrain_cli.checkpoint.pool import BouncePool
from megatrain_cli.checkpoint.remove import remove_checkpoint
from megatrain_cli.checkpoint.resolve import candidates
from megatrain_cli.checkpoint.snapshot import Capture, Snapshot, write_aux
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import MegatrainError, StorageError
from megatrain_cli.store.hold import HoldCancelled
from megatrain_cli.store.master import MasterStore

__all__ = ["Retention", "SaveReport", "Saver", "Snapshot"]

_ASKED_EVERY_SECONDS = 0.01


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that is whole and on the disk.

    Attributes:
        id: Of its manifest.
        num_bytes: Of all files that the manifest names.
        seconds: From `begin` until it was committed.
        stall_seconds: How long updates were kept waiting by it, copies included.
        mode: How files were written, see `FileWriter.mode`.
        removed: Checkpoints that were retired after it.
        notes: What went wrong and was mended, or does no harm; one line each.
    """

    folder: Path
    step: int
    id: str
    num_bytes: int
    seconds: float
    stall_seconds: float
    mode: str
    removed: tuple[Path, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, see `which_to_remove`.

    Attributes:
        run: The run's folder.
    """

    run: Path
    keep_last: int
    keep_every: int | None = None


class Saver:
    """Writes one checkpoint at a time, on a thread of its own. The caller holds the run's lock.

    Args:
        store: What is saved.
        checkpoints: The run's folder of checkpoints.
        order: Layers in the order in which the next updates will touch them.
        fs: Where to write.
        writer: How.
        pool_bytes: Room for copies of tiles, see `BouncePool`; the only memory that is taken, but
            for a chunk a thread.
        threads: Layers that are written at the same time.
        paranoid: Prove that no tile changed while it was written, by two more readings.
        retention: What to keep; None keeps all.
        atomic_rename: From `check_storage`.
        check_place: Called before a save is begun on the disk, once more if that is to be tried
            anew, and when all is written; what it raises keeps it from being published.

    Raises:
        PlanError: The system refused the pool's memory.
    """

    def __init__(
        self,
        store: MasterStore,
        checkpoints: Path,
        order: Sequence[int],
        *,
        fs: FileSystem,
        writer: FileWriter | None = None,
        pool_bytes: int = 0,
        threads: int = 1,
        paranoid: bool = False,
        retention: Retention | None = None,
        atomic_rename: bool = True,
        check_place: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_place = check_place
        self.pool = BouncePool(pool_bytes)
        self._store, self._checkpoints, self._order = store, checkpoints, tuple(order)
        self._fs, self._writer = fs, writer or FileWriter(fs)
        self._threads, self._paranoid = threads, paranoid
        self._retention, self._atomic_rename = retention, atomic_rename
        self._thread: threading.Thread | None = None
        self._capture: Capture | None = None  # of the save that is under way
        self._box: deque[SaveReport | BaseException] = deque()

    @property
    def in_flight(self) -> bool:
        """Whether a save is under way."""
        return self._capture is not None

    @property
    def saving_step(self) -> int | None:
        """Step of the save that is under way; None where there is none."""
        capture = self._capture  # the thread may let go of it at any time
        return None if capture is None else max(capture.hold.steps)

    @property
    def num_chunks(self) -> int:
        """Written by the save that is under way: changes as long as the disk does not hang."""
        capture = self._capture  # the thread may let go of it at any time
        return 0 if capture is None else capture.num_chunks

    def begin(self, snapshot: Snapshot) -> bool:
        """Start to save; returns at once. Updates of later steps may follow.

        Returns:
            False if a save is still under way: nothing was started.

        Raises:
            MixedStateError: The layers do not belong to one step.
        """
        if self.in_flight:
            return False
        began = time.perf_counter()
        capture = self._capture = Capture(self._store, self.pool, snapshot.facts, self._order)
        self._thread = self._start(lambda: self._run(capture, snapshot.aux, began))
        return True

    def move(self, run: Path, checkpoints: Path) -> None:
        """The run's folder has another name by now; not while a save is under way."""
        self._checkpoints = checkpoints
        if self._retention is not None:
            self._retention = replace(self._retention, run=run)

    def poll(self) -> list[SaveReport]:
        """What has been saved since the last call; raises what a save failed with, once each."""
        reports: list[SaveReport] = []
        while self._box:
            found = self._box[0]
            if isinstance(found, BaseException):
                if reports:
                    break  # next time
                self._box.popleft()
                raise found
            reports.append(found)
            self._box.popleft()
        return reports

    def wait(self, in_vain: Callable[[], bool] = lambda: False) -> list[SaveReport]:
        """`poll` once the save that is under way has ended.

        Args:
            in_vain: Whether it waits for an update that will never come; returns then, too.
        """
        if self._thread is not None:
            while self._thread.is_alive() and not in_vain():
                self._thread.join(_ASKED_EVERY_SECONDS)
        return self.poll()

    def abandon(self) -> None:
        """Stop the save that is under way and remove what it wrote; returns when that is done.

        One that was committed by then stays, and is reported by `poll`.
        """
        capture = self._capture  # the thread may let go of it at any time
        if capture is not None:
            self._store.clock.cancel(capture.hold)
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """As `abandon`."""
        self.abandon()

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="saver", daemon=True)
        thread.start()
        return thread

    def _workers(self) -> Executor:
        return ThreadPoolExecutor(self._threads, thread_name_prefix="save")

    def _run(self, capture: Capture, aux: Mapping[str, bytes], began: float) -> None:
        outcome: SaveReport | BaseException | None = None
        try:
            outcome = self._save(capture, aux, began)
        except HoldCancelled:
            pass
        except BaseException as error:  # noqa: BLE001  raised by `poll`
            outcome = error
        capture.end()
        self._capture = None  # first: who hears of the end may begin again
        if outcome is not None:
            self._box.append(outcome)

    def _save(self, capture: Capture, aux: Mapping[str, bytes], began: float) -> SaveReport:
        facts, save_id = capture.facts, uuid.uuid4().hex
        failures: list[OSError | None] = []  # one a try
        manifests: list[Manifest] = []

        def fill(folder: Path) -> bytes:
            if failures and not capture.renew():
                raise failures[-1] or StorageError(
                    "It was not written once more: layers have been updated since."
                )
            failures.append(None)
            try:
                shards = self._write_layers(capture, folder, facts.run_id, save_id)
                files = write_aux(self._writer, folder, aux, shards)
            except OSError as error:
                failures[-1] = error
                raise
            manifest = Manifest.build(
                facts,
                save_id=save_id,
                created=Created(
                    unix_ns=time.time_ns(), megatrain=__version__, host=platform.node() or None
                ),
                shards=shards,
                aux=files,
            )
            manifests.append(manifest)
            capture.check()
            self._check_place()
            return manifest.to_bytes()

        committed = write_checkpoint(
            self._fs,
            self._checkpoints,
            facts.step,
            fill,
            num_bytes=capture.num_bytes + sum(map(len, aux.values())),
            atomic_rename=self._atomic_rename,
            before_begin=self._check_place,
        )
        seconds, manifest = time.perf_counter() - began, manifests[-1]
        removed, notes = self._tidy(committed.folder, manifest)
        return SaveReport(
            folder=committed.folder,
            step=facts.step,
            id=manifest.id,
            num_bytes=manifest.bytes_total,
            seconds=seconds,
            stall_seconds=capture.hold.stall_seconds,
            mode=self._writer.mode,
            removed=tuple(removed),
            notes=(*committed.notes, *notes),
        )

    def _write_layers(
        self, capture: Capture, folder: Path, run_id: str, save_id: str
    ) -> list[Shard]:
        writer = LayerWriter(self._writer, folder, run_id, save_id, self._paranoid)
        with self._workers() as workers:
            return capture.write_layers(writer, self._order, workers, self._threads)

    def _tidy(self, folder: Path, manifest: Manifest) -> tuple[list[Path], list[str]]:
        """Point to the new checkpoint and retire old ones; it is safe whatever fails here."""
        removed: list[Path] = []
        notes: list[str] = []
        try:
            write_latest(self._fs, folder, manifest.id, manifest.attempt)
        except MegatrainError as error:
            notes.append(f"{folder} is saved, but: {error}")
        try:
            self._retire(folder, manifest.run_id, removed)
        except MegatrainError as error:
            notes.append(f"{folder} is saved, but: {error}")
        return removed, notes

    def _retire(self, folder: Path, run_id: str, removed: list[Path]) -> None:
        """Remove what the retention does not keep; each goes to `removed` as soon as it is gone."""
        keep = self._retention
        if keep is None:
            return
        for old in which_to_remove(
            candidates(keep.run, self._fs, run_id),
            run_id=run_id,
            keep_last=keep.keep_last,
            keep_every=keep.keep_every,
            protected=[folder],
        ):
            remove_checkpoint(self._fs, old.folder)
            removed.append(old.folder)
