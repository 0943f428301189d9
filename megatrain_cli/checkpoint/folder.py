"""Open a checkpoint: everything that can be known without reading the tensors is checked at once.

Afterwards all its files are held open, so that what was checked is what is read, even if the
folder is renamed or removed meanwhile. Nothing leads out of the folder: no link, no `..`.
"""

import errno
import stat
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import xxhash

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.headers import INDEX_NAME, parse_index
from megatrain_cli.checkpoint.manifest import AuxFile, Manifest, Part
from megatrain_cli.checkpoint.names import CHECKPOINTS, KEEP, MANIFEST, TRAINING
from megatrain_cli.checkpoint.places import short
from megatrain_cli.checkpoint.strict_json import MAX_BYTES
from megatrain_cli.errors import ClosedError, CorruptError, NoCheckpointError, StorageError

ADVICE = "If the checkpoint was copied, copy it again; else use another one."
"""What to do about a damaged one."""

CLOSED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the system answers where the process may not open a file, whatever is in it."""

# What it answers when another kind of file is opened as we open files.
_NOT_A_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)
_STRANGE_KIND = "a link, folder, pipe or device, where a regular file belongs."
_MAX_AUX_BYTES = 1 << 30


class OpenCheckpoint:
    """A checkpoint whose files are all held open. Close it, or use it in a `with`.

    Attributes:
        folder: Where it was found.
        manifest: What it says it is.
        notes: What is odd and harmless, as unknown files; one line each.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, fs: FileSystem, folder_fd: int, held: ExitStack
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.notes: tuple[str, ...] = ()
        self._fs = fs
        self._folder_fd = folder_fd
        self._held = held
        self._fds: dict[str, int] = {}
        self._direct: dict[str, int] = {}
        for entry in manifest.files:
            self._fds[entry.file] = self._open(entry)

    def fd(self, file: str, direct: bool = False) -> int:
        """The open file of that name, which stays this object's. Not for several threads.

        Args:
            file: As the manifest names it.
            direct: Past the page cache if that can be had; else the ordinary one is returned.
        """
        if direct and file not in self._direct:
            self._direct[file] = self._open_direct(file)
        return self._direct[file] if direct else self._fds[file]

    def read_aux(self, file: str) -> bytes:
        """All bytes of a file that is no shard, after their hash was compared.

        Raises:
            CorruptError: They are not what was saved.
            KeyError: The manifest names no such file.
        """
        entry = {aux.file: aux for aux in self.manifest.aux}[file]
        where = f"{self.folder / file}"
        if entry.bytes > _MAX_AUX_BYTES:
            raise CorruptError(f"{where}: {entry.bytes} bytes, more than is read at once")
        raw = self.read_bytes(file, 0, entry.bytes)
        found = xxhash.xxh3_128_hexdigest(raw)
        if found != entry.xxh3_128:
            raise CorruptError(
                f"{where}: damaged: its xxh3-128 is {found}, the manifest says {entry.xxh3_128}. "
                f"{ADVICE}"
            )
        return raw

    def check_aux(self) -> None:
        """Read all files that are no shards, a few MiB, and compare their hashes.

        Raises:
            CorruptError: One is not what was saved.
        """
        for entry in self.manifest.aux:
            self.read_aux(entry.file)

    def read_bytes(self, file: str, offset: int, num_bytes: int) -> bytes:
        """Part of a file.

        Raises:
            CorruptError: The disk does not return it.
        """
        where = f"{self.folder / file}"
        return _read(self._fs, self._fds[file], offset, num_bytes, where)

    def close(self) -> None:
        """Give all files back; a second time does nothing."""
        self._fds, self._direct = {}, {}
        self._held.close()

    def __enter__(self) -> "OpenCheckpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, entry: Part | AuxFile) -> int:
        where = f"{self.folder / entry.file}"
        try:
            fd = self._fs.open_file(self._folder_fd, entry.file, False)
        except FileNotFoundError:
            raise CorruptError(f"{where}: missing, though {MANIFEST} names it. {ADVICE}") from None
        except OSError as error:
            raise _cannot_open(where, error) from error
        self._held.callback(self._fs.close, fd)
        size = _regular_size(self._fs, fd, where)
        if size != entry.bytes:
            what = "truncated" if size < entry.bytes else "too long"
            raise CorruptError(
                f"{where}: {what}: {size} bytes, the manifest says {entry.bytes}. {ADVICE}"
            )
        return fd

    def _open_direct(self, file: str) -> int:
        held = self._fds[file]
        try:
            fd = self._fs.open_file(self._folder_fd, file, True)
        except OSError:
            # Not supported here, or retired meanwhile: the bytes are the same the ordinary way.
            return held
        self._held.callback(self._fs.close, fd)
        known, found = self._fs.status(held), self._fs.status(fd)
        same = (known.st_dev, known.st_ino) == (found.st_dev, found.st_ino)
        return fd if same else held  # replaced meanwhile: not what was checked


def open_checkpoint(folder: Path, fs: FileSystem) -> OpenCheckpoint:
    """Open a checkpoint and check all but its tensors' bytes.

    Args:
        folder: Where it is; may itself be a link, but nothing in it may be.
        fs: What its files are read with.

    Raises:
        NoCheckpointError: No folder, or none with a manifest: a save that did not end, at best.
        CorruptError: A file is missing, of another size or kind, or should not be there.
        IncompatibleError: Whole, but for another version or program.
        StorageError: A file cannot be opened for a reason outside of it.
    """
    with ExitStack() as held:
        folder_fd = _open_folder(folder, fs, held)
        manifest = _read_manifest(folder, fs, folder_fd)
        checkpoint = OpenCheckpoint(folder, manifest, fs, folder_fd, held)
        checkpoint.notes = _strangers(folder, fs, manifest)
        _check_index(checkpoint)
        checkpoint._held = held.pop_all()
    return checkpoint


def open_to_go_on(folder: Path, fs: FileSystem) -> OpenCheckpoint:
    """As `open_checkpoint`, and all but the shards is what was saved: their loader checks those.

    Raises:
        MegatrainError: As `open_checkpoint`.
    """
    checkpoint = open_checkpoint(folder, fs)
    try:
        checkpoint.check_aux()
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def read_manifest(folder: Path, fs: FileSystem) -> Manifest:
    """Only the manifest, without a look at the other files.

    Raises:
        NoCheckpointError: There is none.
        CorruptError: It is torn, or was changed after it was written.
        IncompatibleError: Whole, but for another version or program.
        StorageError: It cannot be opened for a reason outside of it.
    """
    with ExitStack() as held:
        return _read_manifest(folder, fs, _open_folder(folder, fs, held))


def _open_folder(folder: Path, fs: FileSystem, held: ExitStack) -> int:
    try:
        fd = fs.open_folder(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError(
            f"{folder} is not a megatrain checkpoint: no such folder. "
            "Give the folder of a run, or one in its `checkpoints`."
        ) from None
    except OSError as error:
        raise _cannot_open(f"{folder}", error) from error
    held.callback(fs.close, fd)
    return fd


def _read_manifest(folder: Path, fs: FileSystem, folder_fd: int) -> Manifest:
    where = f"{folder / MANIFEST}"
    try:
        fd = fs.open_file(folder_fd, MANIFEST, False)
    except FileNotFoundError:
        run = f" Did you mean {folder.parent}?" if folder.name == CHECKPOINTS else ""
        raise NoCheckpointError(
            f"{folder} is not a megatrain checkpoint, or was never finished: no {MANIFEST}.{run}"
        ) from None
    except OSError as error:
        raise _cannot_open(where, error) from error
    try:
        size = _regular_size(fs, fd, where)
        if size > MAX_BYTES:
            raise CorruptError(f"{where}: damaged: {size} bytes, more than a manifest has")
        return Manifest.from_bytes(_read(fs, fd, 0, size, where), where)
    finally:
        fs.close(fd)


def _regular_size(fs: FileSystem, fd: int, where: str) -> int:
    status = fs.status(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptError(f"{where}: {_STRANGE_KIND} {ADVICE}")
    return status.st_size


def _cannot_open(where: str, error: OSError) -> CorruptError | StorageError:
    if error.errno in _NOT_A_FILE:
        return CorruptError(f"{where}: {_STRANGE_KIND} {ADVICE}")
    kind = ClosedError if error.errno in CLOSED else StorageError
    more = " Raise `ulimit -n`." if error.errno == errno.EMFILE else ""
    return kind(f"{where} cannot be opened: {error.strerror or error}.{more}")


def _read(fs: FileSystem, fd: int, offset: int, num_bytes: int, where: str) -> bytes:
    """Part of a file; the disk may return it in pieces."""
    buffer = bytearray(num_bytes)
    done = 0
    with memoryview(buffer) as view:
        while done < num_bytes:
            try:
                got = fs.read(fd, view[done:], offset + done)
            except OSError as error:
                raise CorruptError(
                    f"{where}: reading {num_bytes - done} bytes at {offset + done} failed: "
                    f"{error.strerror or error}. {ADVICE}"
                ) from error
            if got == 0:
                raise CorruptError(f"{where}: ended at byte {offset + done} while it was read")
            done += got
    return bytes(buffer)


def _strangers(folder: Path, fs: FileSystem, manifest: Manifest) -> tuple[str, ...]:
    """Unknown shards are an error, for other programs would load them; the rest is noted."""
    known = {entry.file for entry in manifest.files} | {MANIFEST, KEEP, TRAINING}
    try:
        listed = fs.list_folder(folder)
        listed += [f"{TRAINING}/{name}" for name in fs.list_folder(folder / TRAINING)]
    except OSError as error:
        raise _cannot_open(f"{folder}", error) from error
    strange = [name for name in listed if name not in known]
    for name in strange:
        if name.casefold().endswith(".safetensors"):
            raise CorruptError(
                f"{folder}: {short(name)} is no part of this checkpoint, and programs that load "
                "the folder might read it. Move it elsewhere."
            )
    return tuple(f"{short(name)} is not in the manifest; ignored" for name in strange)


def _check_index(checkpoint: OpenCheckpoint) -> None:
    """The map that other programs follow must name the manifest's files and nothing else."""
    where = f"{checkpoint.folder / INDEX_NAME}"
    parts = [shard.weights for shard in checkpoint.manifest.shards]
    wanted = {place.name: part.file for part in parts for place in part.tensors}
    found = parse_index(checkpoint.read_aux(INDEX_NAME), where)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise CorruptError(
                f"{where}: says that {short(name)} is in {short(found.get(name))}, "
                f"the manifest says {short(wanted.get(name))}."
            )
