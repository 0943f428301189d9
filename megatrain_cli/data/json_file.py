r"""Rows of JSON: an object a line, or one array of objects.

Lines are cut at b"\n" only. Text mode and `splitlines` also cut at U+2028, which JSON allows
inside a string, and so make two broken lines of one good row. An array is parsed element by element
from a window of the file: a file larger than RAM is no matter.
"""

import codecs
from typing import BinaryIO

from megatrain_cli.data.files import MAX_ROW
from megatrain_cli.data.records import Record, Records, as_record, decode
from megatrain_cli.data.strict_json import IncompleteError, parse_json, scan_json
from megatrain_cli.errors import DataError, RowError
from megatrain_cli.units import MIB

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Bytes of an array that are read at a time.
_WINDOW = MIB

_SPACE = " \t\r\n"


def read_json(file: BinaryIO, name: str) -> Records:
    """The rows of a file; one that begins with `[` is one array.

    Raises:
        DataError: An array is broken: where its next element begins cannot be told.
    """
    line, has_begun = 0, False
    while raw := file.readline(MAX_ROW + 1):
        line += 1
        where = f"{name}:{line}"
        content = (raw.removeprefix(BYTE_ORDER_MARK) if line == 1 else raw).lstrip()
        if content.startswith(b"[") and not has_begun:
            yield from _Array(file, content, name, line).elements()
            return
        if len(raw) > MAX_ROW:
            raise DataError(
                f"{where}: no line ends within {MAX_ROW // MIB} MiB; wanted an object a line"
            )
        # A carriage return before the end of a line is white space, to JSON too.
        if content := content.rstrip():
            has_begun = True
            yield _record(content, where)


def _record(content: bytes, where: str) -> Record:
    if content == b"{":
        reason = "an object that goes on in the next line; wanted an object a line, or one array"
        return where, RowError(where, reason)
    try:
        return as_record(where, parse_json(decode(content, where), where))
    except RowError as error:
        return where, error


class _Array:
    """The elements of an array, each parsed alone so that it has a line."""

    def __init__(self, file: BinaryIO, begin: bytes, name: str, line: int) -> None:
        """Begin with the first bracket, which is all but the first bytes of `begin`.

        Args:
            file: The rest of the file.
            begin: What was read of it.
            name: The file, for messages.
            line: Where the bracket stands.
        """
        self._file = file
        self._name = name
        self._line = line
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._add(begin)
        self._at = 1

    def elements(self) -> Records:
        number = 0
        while not self._next_is("]"):
            number += 1
            where = f"{self._name}:{self._line}"
            place = f"{where}: element {number}"
            yield as_record(where, self._value(place))
            if self._next_is(","):
                self._at += 1
            elif not self._next_is("]"):
                raise DataError(f"{place}: neither a comma nor a closing bracket follows it")
        self._at += 1
        self._skip_space()
        if self._at < len(self._text):
            raise DataError(f"{self._name}:{self._line}: more text follows the end of the array")

    def _next_is(self, mark: str) -> bool:
        self._skip_space()
        return self._text.startswith(mark, self._at)

    def _value(self, place: str) -> object:
        """The value that begins here; more of the file is read until it is whole.

        A number may be cut by the end of the window and look whole, but no number is a row.
        """
        while True:
            try:
                value, end = scan_json(self._text, self._at, place)
            except IncompleteError as error:
                left = len(self._text) - self._at
                if self._has_ended or left > MAX_ROW:
                    raise DataError(f"{place}: {error.reason}") from None
                self._forget()
                self._read(max(_WINDOW, left))  # twice as much, so that parsing again stays cheap
            except RowError as error:
                raise DataError(str(error)) from None
            else:
                self._line += self._text.count("\n", self._at, end)
                self._at = end
                return value

    def _skip_space(self) -> None:
        """Go to the next place that is not JSON white space."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            self._line += self._text.count("\n", start, self._at)
            if self._at < len(self._text) or self._has_ended:
                return
            self._forget()
            self._read(_WINDOW)

    def _forget(self) -> None:
        self._text, self._at = self._text[self._at :], 0

    def _read(self, num_bytes: int) -> None:
        raw = self._file.read(num_bytes)
        self._has_ended = not raw
        self._add(raw)

    def _add(self, raw: bytes) -> None:
        try:
            self._text += self._decoder.decode(raw, final=self._has_ended)
        except UnicodeDecodeError as error:
            line = self._line + self._text.count("\n", self._at)
            line += error.object.count(b"\n", 0, error.start)
            raise DataError(
                f"{self._name}:{line}: a byte that is not UTF-8. Save the file as UTF-8."
            ) from None
