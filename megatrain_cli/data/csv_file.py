"""Rows of a CSV file: RFC 4180, UTF-8, a first line with the names of the columns.

Every cell is text: `007` stays `007`, and an empty cell is an empty text. Lists (messages, history,
tools, input_ids) are written as JSON text.
"""

import csv
import io
from collections.abc import Iterator
from typing import BinaryIO

from megatrain_cli.data.files import MAX_ROW
from megatrain_cli.data.records import NUL, Records
from megatrain_cli.errors import DataError, RowError
from megatrain_cli.units import show_number


def read_csv(file: BinaryIO, name: str) -> Records:
    """The rows of a file, each with the line on which it begins.

    Raises:
        DataError: The file is no CSV, or its columns have not each a name of their own.
    """
    # Python's limit on a cell is one of the process, and far below what a chat may take.
    csv.field_size_limit(MAX_ROW)
    header: list[str] | None = None
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        for line, row in _rows(text, name):
            where = f"{name}:{line}"
            nul = next((place for place, cell in enumerate(row, start=1) if "\0" in cell), None)
            if nul is not None:
                error = RowError(where, f"a byte of cell {nul} {NUL}")
                if header is None:
                    raise error
                yield where, error
            elif header is None:
                header = row
                doubled = sorted({column for column in row if row.count(column) > 1})
                if doubled:
                    raise DataError(f"{where}: the column {doubled[0]!r} is there twice. Keep one.")
                _refuse_other_commas(row, where)
            elif len(row) != len(header):
                reason = f"{show_number(len(row), 'cell')} in a row of a file with "
                reason += f"{show_number(len(header), 'column')}"
                yield where, RowError(where, reason)
            else:
                yield where, dict(zip(header, row, strict=True))


def _refuse_other_commas(header: list[str], where: str) -> None:
    """Say it where cells are divided by something else: all of them would be one column."""
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and mark in header[0]:
            raise DataError(
                f"{where}: the names of the columns are divided by {name}, and CSV has commas. "
                "Save the file with commas."
            )


def _rows(text: io.TextIOWrapper, name: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the lines on which they begin; blank lines are left out."""
    reader = csv.reader(text, strict=True)
    line = 1
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{name}:{line}: broken CSV: {error}") from None
        except UnicodeDecodeError:
            raise DataError(
                f"{name}:{line}: at or below this line is a byte that is not UTF-8. "
                "Save the file as UTF-8."
            ) from None
        if row:
            yield line, row
        line = reader.line_num + 1
