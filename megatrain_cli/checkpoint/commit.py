"""Make a folder a checkpoint: whole and on the disk, or not there at all.

The folder is written under a temporary name, every file synced, then every folder; the manifest is
the last file. One rename gives it its name, and a sync of the parent makes the name last: the
commit point. Only then is it a checkpoint that one may speak of.

Notes:
* An error of `sync`, `write` or `close` is never tried again on that file: after a failed fsync
  the kernel may have dropped the bytes, and a second one answers that all is well
  (https://wiki.postgresql.org/wiki/Fsync_Errors). The folder is removed, and written anew from
  memory once.
* A whole temporary folder that is found at start is removed, not promoted: one rule, no guess.
* The caller holds the run's lock throughout.
"""

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain_cli.checkpoint.fsio import BLOCK, FileSystem
from megatrain_cli.checkpoint.names import LATEST, MANIFEST, TEMPORARY, TRAINING, folder_name
from megatrain_cli.checkpoint.remove import take_away
from megatrain_cli.checkpoint.storage import check_room, ensure_folder, make_nonce, storage_error
from megatrain_cli.checkpoint.tree import remove_tree
from megatrain_cli.checkpoint.write import FileWriter
from megatrain_cli.errors import StorageError

# Another try meets the same answer.
_FINAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST)


class Commit:
    """One checkpoint on its way. Not for several threads.

    Attributes:
        final: The checkpoint's folder, once published.
        folder: Where to write until then.
        remade: `begin` had to make the folder of checkpoints: it was gone.
    """

    def __init__(
        self,
        fs: FileSystem,
        checkpoints: Path,
        step: int,
        nonce: str,
        *,
        num_bytes: int = 0,
        atomic_rename: bool = True,
    ) -> None:
        """Nothing is touched before `begin`.

        Args:
            fs: Where to write.
            checkpoints: The run's folder of checkpoints.
            step: Optimizer steps completed.
            nonce: From `make_nonce`, a new one each time.
            num_bytes: Of the whole checkpoint, to refuse a full disk at the start.
            atomic_rename: From `check_storage`. If false, files go to their final place and only
                the manifest, written last, makes them a checkpoint.
        """
        self._fs = fs
        self._checkpoints = checkpoints
        self._num_bytes = num_bytes
        self._renames = atomic_rename
        self.final = checkpoints / folder_name(step)
        self._nonce = nonce
        self.folder = self.final
        if atomic_rename:
            self.folder = checkpoints / f"{TEMPORARY}{self.final.name}-{nonce}"
        self._writer = FileWriter(fs, direct="off", chunk_bytes=1 << 20)
        self._begun = self._renamed = False
        self.remade = False

    def begin(self) -> Path:
        """Make the folder to write into, with `training/` in it.

        Raises:
            DiskFullError: Too little room.
            StorageError: The disk refused, or the step has a folder already; nothing is left.
        """
        try:
            self.remade = ensure_folder(self._fs, self._checkpoints)
            check_room(self._fs, self.final, self._num_bytes)
            self._clear_place()
            self._fs.make_folder(self.folder)
            self._begun = True
            self._fs.make_folder(self.folder / TRAINING)
        except OSError as error:
            raise self.fail(error) from error
        return self.folder

    def publish(self, manifest: bytes) -> Path:
        """Write the manifest and make the folder a checkpoint. All other files are synced.

        Returns:
            Where it is: durable, and the only name it is to be known by.

        Raises:
            StorageError: The disk refused; nothing is left.
        """
        try:
            self._fs.sync_folder(self.folder / TRAINING)
            if not self._renames:
                # The manifest must not reach the disk before what it lists.
                self._fs.sync_folder(self.folder)
            self._writer.write(self.folder / MANIFEST, MANIFEST, [manifest])
            self._fs.sync_folder(self.folder)
            if self._renames:
                self._rename(manifest)
            self._fs.sync_folder(self._checkpoints)
        except OSError as error:
            raise self.fail(error) from error
        self._begun = False
        return self.final

    def abandon(self) -> None:
        """Remove what was written, as far as the disk lets us; does nothing after `publish`.

        What stays behind has a name that is never read, and goes at the next start.
        """
        if not self._begun:
            return
        self._begun = False
        with suppress(OSError):
            if self.folder != self.final and not self._renamed:
                remove_tree(self._fs, self.folder)
            else:
                take_away(self._fs, self.final, self._nonce)

    def fail(self, error: OSError) -> StorageError:
        """Abandon, and the error to raise for what the disk refused."""
        self.abandon()
        return storage_error(self._fs, self.final, error, self._num_bytes)

    def _clear_place(self) -> None:
        """Refuse a step that has a folder; without renames, remove a killed save's there."""
        if not self._fs.exists(self.final):
            return
        if self._renames or self._fs.exists(self.final / MANIFEST):
            raise FileExistsError(errno.EEXIST, "this step has a folder already", str(self.final))
        remove_tree(self._fs, self.final)

    def _rename(self, manifest: bytes) -> None:
        try:
            self._fs.rename_new(self.folder, self.final)
        except OSError:
            # NFS sends a request again when the answer is lost, and the second finds no source.
            # What counts is whether the folder is there, and ours: its manifest has our save's id.
            if not self._moved_anyway(manifest):
                raise
        self._renamed = True

    def _moved_anyway(self, manifest: bytes) -> bool:
        if self._fs.exists(self.folder) or not self._fs.exists(self.final):
            return False
        return _holds(self._fs, self.final, manifest)


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is whole and on the disk.

    Attributes:
        notes: What went wrong on the way and was mended, for the log.
    """

    folder: Path
    notes: tuple[str, ...]


def write_checkpoint(
    fs: FileSystem,
    checkpoints: Path,
    step: int,
    fill: Callable[[Path], bytes],
    *,
    num_bytes: int = 0,
    atomic_rename: bool = True,
    before_begin: Callable[[], None] = lambda: None,
) -> Committed:
    """Write and commit a checkpoint; after a fault that may pass, once more from the beginning.

    Args:
        fs: Where to write.
        checkpoints: The run's folder of checkpoints.
        step: Optimizer steps completed.
        fill: Given the folder to write into; writes all files but the manifest, synced, and returns
            the manifest. Called once more if the disk failed. What it raises besides OSError ends
            the save. No thread of its may still write when it returns or raises.
        num_bytes: As in `Commit`.
        atomic_rename: As in `Commit`.
        before_begin: Called before each try; what it raises ends the save.

    Raises:
        StorageError: The disk refused; nothing was published.
    """
    notes: list[str] = []
    failure: StorageError | None = None  # of the first try
    while True:
        again = failure is not None
        commit = Commit(
            fs, checkpoints, step, make_nonce(), num_bytes=num_bytes, atomic_rename=atomic_rename
        )
        try:
            before_begin()
            folder = commit.begin()
            if commit.remade:
                notes.append(f"{checkpoints} was gone and was made again")
            final = commit.publish(fill(folder))
        except OSError as error:
            failure, cause = commit.fail(error), error
        except StorageError as error:
            commit.abandon()
            if not isinstance(error.__cause__, OSError):
                if failure is None:
                    raise
                raise StorageError(f"{failure} {error}") from error
            failure, cause = error, error.__cause__
        except BaseException:
            commit.abandon()
            raise
        else:
            return Committed(final, tuple(notes))
        if again or cause.errno in _FINAL:
            raise failure from cause
        notes.append(f"{failure} It was written once more.")


def write_latest(fs: FileSystem, checkpoint: Path, checkpoint_id: str, attempt: int) -> None:
    """Say in `latest.json` which checkpoint is the newest: a hint, which no reader trusts.

    Args:
        fs: Where.
        checkpoint: Committed; the hint is written beside it.
        checkpoint_id: Of its manifest.
        attempt: Of the run.

    Raises:
        StorageError: The disk refused; the hint is the old one.
    """
    checkpoints = checkpoint.parent
    hint = {"checkpoint": checkpoint.name, "id": checkpoint_id, "attempt": attempt}
    text = json.dumps(hint, sort_keys=True).encode() + b"\n"
    temporary = checkpoints / f"{TEMPORARY}{LATEST}-{make_nonce()}"
    try:
        try:
            FileWriter(fs, direct="off", chunk_bytes=BLOCK).write(temporary, LATEST, [text])
            fs.rename_over(temporary, checkpoints / LATEST)
        except OSError:
            with suppress(OSError):
                remove_tree(fs, temporary)
            raise
        fs.sync_folder(checkpoints)
    except OSError as error:
        raise storage_error(fs, checkpoints / LATEST, error, len(text)) from error


def _holds(fs: FileSystem, folder: Path, manifest: bytes) -> bool:
    """Whether a folder's manifest is this one."""
    at = fs.open_folder(folder)
    try:
        fd = fs.open_file(at, MANIFEST, direct=False)
        try:
            # One byte more than wanted, so that a longer file differs.
            found = memoryview(bytearray(len(manifest) + 1))
            return found[: fs.read(fd, found, 0)] == manifest
        finally:
            fs.close(fd)
    finally:
        fs.close(at)
