"""`metrics.jsonl`: one JSON object a step, appended and flushed as the run goes.

Behind the step after which it was made, an evaluation has a line too, with other keys: only such a
line has `eval_loss`.

Every line is valid JSON. A number that JSON cannot hold is written as a text: "NaN", "Infinity" or
"-Infinity". A run that is killed while it writes leaves at most one cut line, the last; reading
leaves it out, and the next `Journal` on the file removes it before it appends.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from megatrain_cli.errors import CorruptError, StorageError
from megatrain_cli.limits import advice_on_size
from megatrain_cli.regular import read_file
from megatrain_cli.report.records import EvalRecord, StepRecord


class Journal:
    """Appends records to a file; each is on disk, as far as the OS is concerned, on return.

    Attributes:
        path: What the file is called.

    Args:
        path: Opened for appending; the file is made if absent, its folder must exist.
        patient: Where given, lines for which a full disk has no room are kept, and written once it
            has; hears of it, once.

    Raises:
        StorageError: It cannot be opened.
    """

    def __init__(self, path: Path, patient: Callable[[str], None] | None = None) -> None:
        self.path, self._patient = path, patient
        self._left = b""  # to be written, from within a line maybe
        self._said = False
        try:
            _remove_cut_line(path)
            # Without a buffer: what it held back after a failure would fail again on closing.
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}.") from error

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append one line.

        Raises:
            StorageError: The disk refused it.
        """
        self._left += json.dumps(record.to_json(), allow_nan=False).encode() + b"\n"
        try:
            self._write_left()
        except OSError as error:
            problem = f"{self.path}: cannot be written: {error.strerror}."
            if (advice := advice_on_size(error)) is not None:
                raise StorageError(f"{problem} {advice}") from error
            if self._patient is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(problem) from error
            if not self._said:
                self._said = True
                self._patient(f"{problem} Its lines are kept until there is room.")

    def is_at(self, path: Path) -> bool:
        """Whether what is written goes to the file of this name: it may have been moved."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def write_anew(self, path: Path) -> None:
        """Go on in a new file that has all lines so far; the old one may have no name any more.

        Args:
            path: There is nothing of this name.

        Raises:
            StorageError: The disk refused; the old file is still written to.
        """
        try:
            self._file.seek(0)
            lines = self._file.read()
            path.write_bytes(lines)
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}.") from error
        self._file.close()
        self.path, self._file = path, file

    def close(self) -> None:
        """Close the file; may be called twice. Lines that found no room to the end are lost."""
        if not self._file.closed:
            with suppress(OSError):  # it was said when the first was kept
                self._write_left()
            if self._left and self._patient is not None:
                count = self._left.count(b"\n")
                last = "last line is" if count == 1 else f"last {count} lines are"
                self._patient(f"{self.path}: no room to the end, its {last} lost.")
        self._file.close()

    def _write_left(self) -> None:
        while self._left:
            self._left = self._left[self._file.write(self._left) :]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


def read_journal(path: Path) -> tuple[StepRecord, ...]:
    """The steps of a journal, in order: every whole line but those of evaluations.

    Raises:
        CorruptError: A line that was written whole is not a record; names the line.
    """
    records = _records(path, read_file(path))
    return tuple(record for record in records if isinstance(record, StepRecord))


def read_evaluations(path: Path) -> tuple[EvalRecord, ...]:
    """The evaluations of a journal, in order; none where there is no file.

    Raises:
        CorruptError: A line that was written whole is not a record; names the line.
        StorageError: The file cannot be read.
    """
    try:
        raw = read_file(path) if path.exists() else b""
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}.") from error
    records = _records(path, raw)
    return tuple(record for record in records if isinstance(record, EvalRecord))


def _records(path: Path, raw: bytes) -> Iterator[StepRecord | EvalRecord]:
    whole, _, _cut = raw.rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
        try:
            values = json.loads(line)
            if isinstance(values, dict) and "eval_loss" in values:
                yield EvalRecord.from_json(values)
                continue
            record = StepRecord.from_json(values)
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{path}:{number}: not a step record: {error}") from error
        yield record


def _remove_cut_line(path: Path) -> None:
    if not path.exists():
        return
    raw = read_file(path)
    if raw and not raw.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(raw.rfind(b"\n") + 1)
