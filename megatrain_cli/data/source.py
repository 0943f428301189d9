r"""Read the rows of data files: lines or arrays of JSON, each checked, each with its place.

A row is refused with its file, line and field, and never printed: it may be private, or huge.
Files are read as bytes and cut at b"\n" only. Text mode and `splitlines` also cut at U+2028,
which JSON allows inside a string, and so make two broken lines of one good row.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatrain_cli.data.formats import FORMATS, Row, find_format, parse_row, show_kind
from megatrain_cli.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# How files begin that are often named by mistake, and what they are.
_OTHER_FILES = {
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
}


@dataclass(frozen=True)
class SourceFile:
    """One file to read, and the format its rows are in; `auto` goes by the columns."""

    path: Path
    format: str = "auto"


def read_rows(source: SourceFile) -> Iterator[Row]:
    """Read and check a file, row by row, in order.

    Raises:
        DataError: The file cannot be read, is empty, or holds a row that cannot be used.
    """
    name = show_path(source.path)
    if source.format not in ("auto", *FORMATS):
        raise DataError(
            f"{name}: rows of format {source.format} cannot be read by this version, "
            f"only {', '.join(FORMATS)}."
        )
    row_format = None if source.format == "auto" else source.format
    for line, value in _objects(source.path, name):
        where = f"{name}:{line}"
        found = find_format(value)
        if row_format is None:
            if not found:
                raise DataError(
                    f"{where}: no column of a format that is known: wanted `instruction` and "
                    "`output`, or `messages`, or `text`."
                )
            if len(found) > 1:
                raise DataError(
                    f"{where}: the columns are those of {' and of '.join(found)}. "
                    f"Set `data.format` to one of {', '.join(FORMATS)}."
                )
            row_format = found[0]
        elif found and row_format not in found:
            raise DataError(
                f"{where}: the columns are those of {found[0]}, but the file is read as "
                f"{row_format}. Keep one format a file."
            )
        yield parse_row(value, row_format, where)
    if row_format is None:
        raise DataError(f"{name}: the file has no rows")


def show_path(path: Path) -> str:
    """The path as a user would type it: short when it lies below the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _objects(path: Path, name: str) -> Iterator[tuple[int, dict[str, object]]]:
    """Every JSON object of a file with the line it starts on, counted from 1."""
    try:
        with path.open("rb") as file:
            for line, value in _values(file, name):
                if not isinstance(value, dict):
                    raise DataError(
                        f"{name}:{line}: {show_kind(value)} where an object is expected"
                    )
                yield line, value
    except FileNotFoundError:
        raise DataError(f"{name}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from None


def _values(file: BinaryIO, name: str) -> Iterator[tuple[int, object]]:
    """The JSON values of a file, each with its line; a file that begins with `[` is one array."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    line, has_begun = 0, False
    for line, raw in enumerate(file, start=1):
        if line == 1:
            _refuse_other_files(raw, name)
        content = raw.removeprefix(BYTE_ORDER_MARK) if line == 1 else raw
        # A carriage return before the end of a line is white space, to JSON too.
        if not (content := content.strip()):
            continue
        where = f"{name}:{line}"
        if content.startswith(b"[") and not has_begun:
            yield from _elements(decoder, _decode(content + b"\n" + file.read(), where), name, line)
            return
        has_begun = True
        text = _decode(content, where)
        value, end = _parse(decoder, text, 0, where)
        if end != len(text):
            raise DataError(f"{where}: more text follows the end of the object (column {end + 1})")
        yield line, value
    if line == 0:
        raise DataError(f"{name}: the file is empty (0 bytes)")


def _elements(
    decoder: json.JSONDecoder, text: str, name: str, line: int
) -> Iterator[tuple[int, object]]:
    """The elements of the array that `text` begins with, each parsed alone so that it has a line.

    Args:
        decoder: Parses one element.
        text: The file from its first bracket on.
        name: The file, for messages.
        line: Where the bracket stands.
    """
    at, counted, number = _skip_space(text, 1), 0, 0
    while not text.startswith("]", at):
        number += 1
        line, counted = line + text.count("\n", counted, at), at
        where = f"{name}:{line}: element {number}"
        value, at = _parse(decoder, text, at, where)
        yield line, value
        at = _skip_space(text, at)
        if text.startswith(",", at):
            at = _skip_space(text, at + 1)
        elif not text.startswith("]", at):
            raise DataError(f"{where}: neither a comma nor a closing bracket follows it")
    at = _skip_space(text, at + 1)
    if at != len(text):
        line += text.count("\n", counted, at)
        raise DataError(f"{name}:{line}: more text follows the end of the array")


def _refuse_other_files(raw: bytes, name: str) -> None:
    for begin, kind in _OTHER_FILES.items():
        if raw.startswith(begin):
            raise DataError(f"{name}: the file is {kind}; wanted lines or an array of JSON.")


class _DoubledKeyError(ValueError):
    """An object has a key twice; which of the values was meant cannot be told."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys are all different, from its keys and values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _DoubledKeyError
    return made


def _parse(decoder: json.JSONDecoder, text: str, at: int, where: str) -> tuple[object, int]:
    """One JSON value that begins at `at`, and where it ends."""
    try:
        return decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        # The parser's own line number counts from where the text begins, not in the file.
        column = error.pos - text.rfind("\n", 0, error.pos)
        raise DataError(f"{where}: broken JSON: {error.msg} (column {column})") from None
    except RecursionError:
        raise DataError(f"{where}: the JSON is nested too deeply") from None
    except _DoubledKeyError:
        raise DataError(f"{where}: an object has the same key twice. Keep one.") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise DataError(f"{where}: a number in the JSON is too long") from None


def _skip_space(text: str, at: int) -> int:
    """The next place that is not JSON white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} is not UTF-8. Save the file as UTF-8."
        ) from None
