"""Prepared rows on the disk: a folder for each key, whole or not there, proved when it is read.

    CACHE/<key>/tokens, is_target, offsets, files, lines   the arrays of `Examples`, as they are
    CACHE/<key>/rows.json                                  a hash of the rest; counts and hashes
    CACHE/<key>.lock                                       held while <key> is made

A folder is made under another name, its files are flushed to the disk, and then it is renamed. So
two processes that make the same rows do not meet: the first one's folder stays. The lock only
spares the second one the work, and where a file system has no locks it is not needed.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from megatrain_cli.data.content import FileContent
from megatrain_cli.data.summary import DataSummary
from megatrain_cli.data.table import (
    DTYPES,
    Examples,
    TableWriter,
    hash_places,
    hash_rows,
    map_table,
)
from megatrain_cli.errors import CorruptError, DiskFullError, StorageError
from megatrain_cli.limits import advice_on_size
from megatrain_cli.units import show_bytes

FORMAT = 2
_ACCOUNT = "rows.json"
_TEMPORARY = ".making-"
_ADVICE = "Make room, or set `data.cache_dir` to a folder on another disk, or to null."
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Cache:
    """The prepared rows below one folder.

    Args:
        folder: Made if it is not there.

    Raises:
        StorageError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lock(self, key: str, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock of a key; waits while another process makes its rows, and says so.

        Raises:
            StorageError: The folder cannot be written.
        """
        with disk_errors(self.folder), (self.folder / f"{key}.lock").open("ab") as file:
            held = _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if held is False:
                say(f"another process prepares the same rows in {self.folder}; waiting for it")
                held = _locked(file, fcntl.LOCK_EX)
            if held:
                for path in self.folder.glob(f"{_TEMPORARY}{key}-*"):  # of one that was killed
                    shutil.rmtree(path)
            yield

    def open(self, key: str, names: list[str]) -> tuple[Examples, DataSummary, str] | None:
        """The rows of a key, every byte of them checked, with what `hash_rows` gives for them.

        Args:
            key: From `preparation_key`.
            names: Of the sources, as they are called now.

        Returns:
            None where there are none.

        Raises:
            CorruptError: They are damaged.
        """
        folder = self.folder / key
        try:
            content = (folder / _ACCOUNT).read_bytes()
        except FileNotFoundError:
            if folder.exists():
                raise CorruptError(f"{folder}: {_ACCOUNT} is missing.") from None
            return None
        except OSError as error:
            raise CorruptError(f"{folder}: cannot be read: {error.strerror or error}.") from error
        digest, _, body = content.partition(b"\n")
        if digest.decode(errors="replace") != xxhash.xxh3_128_hexdigest(body):
            raise CorruptError(f"{folder}: {_ACCOUNT} is damaged.")
        account = json.loads(body)  # written by us, as the hash has proved
        try:
            with ExitStack() as stack:
                files = {name: stack.enter_context((folder / name).open("rb")) for name in DTYPES}
                examples = map_table(dict(files))
        except (OSError, ValueError) as error:
            raise CorruptError(f"{folder}: an array cannot be mapped: {error}.") from error
        found = hash_rows(examples)
        if found != account["rows_xxh3_128"] or hash_places(examples) != account["places"]:
            raise CorruptError(f"{folder}: an array is damaged.")
        renamed = dict(zip(account["names"], names, strict=True))
        return examples, DataSummary.from_json(account["summary"], renamed), found

    def remove(self, key: str) -> None:
        """Take a damaged folder away; of two processes that want to, each may be the first.

        Raises:
            StorageError: The disk refused.
        """
        away = self._temporary(key)
        with disk_errors(self.folder):
            try:
                (self.folder / key).rename(away)
            except FileNotFoundError:
                return
            shutil.rmtree(away)

    @contextmanager
    def make(self, key: str) -> Iterator["CacheEntry"]:
        """A new folder, filled inside the `with` and published by `CacheEntry.publish`.

        Raises:
            StorageError: The disk refused; nothing is left of it.
            DiskFullError: It has no room left.
        """
        path = self._temporary(key)
        with disk_errors(self.folder):
            path.mkdir()
            try:
                yield CacheEntry(path, self.folder / key)
            finally:
                shutil.rmtree(path, ignore_errors=True)  # gone if it was published

    def _temporary(self, key: str) -> Path:
        return self.folder / f"{_TEMPORARY}{key}-{os.getpid()}-{secrets.token_hex(4)}"


class CacheEntry:
    """A folder that is being filled."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target

    def open_file(self, name: str) -> BinaryIO:
        """A new file of the folder, for writing and reading."""
        return (self._path / name).open("w+b")

    def publish(
        self,
        writer: TableWriter,
        examples: Examples,
        summary: DataSummary,
        names: list[str],
        contents: list[tuple[FileContent, ...]],
    ) -> str:
        """Write the account, wait for the disk, and give the folder its name.

        Returns:
            What `hash_rows` gives for the rows.

        Raises:
            OSError: The disk refused.
        """
        found = hash_rows(examples)
        account = {
            "format": FORMAT,
            "rows_xxh3_128": found,
            "places": hash_places(examples),
            "names": names,
            "files": [
                [{"path": str(file.path), "xxh3_128": file.xxh3_128} for file in files]
                for files in contents
            ],
            "summary": summary.to_json(),
        }
        body = json.dumps(account, indent=1).encode()
        with (self._path / _ACCOUNT).open("xb") as file:
            file.write(xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body)
            file.flush()
            for descriptor in (*writer.flush(), file.fileno()):
                os.fsync(descriptor)
        _sync_folder(self._path)
        try:
            self._path.rename(self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another process was first, with the same rows. Ours are mapped, and named no more.
        _sync_folder(self._target.parent)
        return found


@contextmanager
def disk_errors(folder: Path, advice: str = _ADVICE) -> Iterator[None]:
    """Turn what a disk refuses into one clear line, with what to do at its end.

    Raises:
        DiskFullError: It has no room left.
        StorageError: Anything else.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            try:
                free = show_bytes(shutil.disk_usage(folder).free)
            except OSError:
                free = "an unknown amount"
            raise DiskFullError(
                f"{folder}: no room for the prepared rows ({reason}; {free} is free). {advice}"
            ) from error
        raise StorageError(
            f"{folder}: prepared rows cannot be written: {reason}. "
            f"{advice_on_size(error) or advice}"
        ) from error


def _locked(file: BinaryIO, how: int) -> bool | None:
    """Whether the lock is held now; None on a file system without locks."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
