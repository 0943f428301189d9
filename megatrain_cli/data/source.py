"""The rows of one source, in order: a file, a folder of files, or a data set of a hub.

A row is refused with its file, line and field, and never printed: it may be private, or huge.
"""

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from megatrain_cli.data.arrow_file import read_arrow
from megatrain_cli.data.bad_rows import BadRows
from megatrain_cli.data.csv_file import read_csv
from megatrain_cli.data.files import find_kind, goes_by_name, list_files, open_bytes, show_path
from megatrain_cli.data.formats import FORMATS, Reading, Row, find_format, parse_row
from megatrain_cli.data.hub import HubSet, read_hub
from megatrain_cli.data.idle import idle_tags, refuse_names, refuse_sampling
from megatrain_cli.data.json_file import read_json
from megatrain_cli.data.records import Record, Records
from megatrain_cli.data.strict_json import parse_json
from megatrain_cli.data.text_file import SampleBy, read_text
from megatrain_cli.errors import DataError, RowError
from megatrain_cli.units import show_number

__all__ = ["SourceFile", "read_rows", "show_path"]

_TURNS = {"sharegpt", "messages"}

# What is shown of columns: a CSV file without names has its first row in their place.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_MOST_NAMES = 8


@dataclass(frozen=True)
class SourceFile:
    """One source, and how its rows are to be understood.

    Attributes:
        path: A file, or a folder: all data files below it.
        format: Of the rows; `auto` goes by the columns.
        reading: Columns and roles that have other names.
        max_rows: Rows to read, from the first on; None reads all.
        sample_by: What a row of a plain text file is; None is a line, and fits other files too.
        hub: The data set of a hub that is read in place of `path`.
        index: Place among the sources of the config; every row has it.
        weight: How many times each row is drawn in an epoch, on average.
    """

    path: Path
    format: str = "auto"
    reading: Reading = field(default_factory=Reading)
    max_rows: int | None = None
    sample_by: SampleBy | None = None
    hub: HubSet | None = None
    index: int = 0
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The source as a user would write it."""
        return self.hub.path if self.hub else show_path(self.path)

    @property
    def files(self) -> list[Path]:
        """What is read, in order; none for a data set of a hub.

        Raises:
            DataError: There is nothing to read.
        """
        return [] if self.hub else list_files(self.path)


def parse_rows(
    source: SourceFile, say: Callable[[str], None] = lambda text: None
) -> Generator[Row | RowError, None, None]:
    """Read and check a source, row by row, in order; a row that cannot be used is its error.

    Args:
        source: What to read.
        say: Told at the end what a person should know.

    Raises:
        DataError: The source cannot be read, has no rows, has none with a column that was named, or
            a name was given to what its format does not have.
    """
    if source.format not in ("auto", *FORMATS):
        raise DataError(
            f"{source.name}: rows of format {source.format} cannot be read by this version, "
            f"only {', '.join(FORMATS)}."
        )
    row_format = None if source.format == "auto" else source.format
    if row_format is not None:
        refuse_names(source.name, row_format, source.reading)
    is_empty = True
    # A field under its own name may be in no row; another name was meant to be found.
    named = source.reading.columns.items()
    unseen = {c: ours for ours, c in named if c and c != ours and "." not in ours}
    roles: set[str] = set()
    # Closed here, and not when memory is tidied up: it holds an open file.
    with closing(_records(source)) as records:
        for where, value in islice(records, source.max_rows):
            is_empty = False
            row: Row | RowError
            try:
                if isinstance(value, RowError):
                    row = value
                else:
                    for column in [column for column in unseen if column in value]:
                        del unseen[column]
                    found = _agree(value, row_format, where, source.reading)
                    if row_format is None:
                        refuse_names(source.name, found, source.reading)
                    row_format = found
                    row = parse_row(value, row_format, where, source.reading, source.index)
                    roles |= row.roles
            except RowError as error:
                row = error
            yield row
    if is_empty:
        raise DataError(f"{source.name}: the file has no rows")
    for column, ours in unseen.items():
        raise DataError(
            f"{source.name}: `columns` names `{column}` for {ours}, and no row that was read has "
            "such a column. Name another one, or leave the field out."
        )
    for note in idle_tags(source.name, row_format, source.reading, roles):
        say(note)


def read_rows(source: SourceFile, bad_rows: BadRows | None = None) -> Iterator[Row]:
    """The rows of a source that can be used, in order.

    Args:
        source: What to read.
        bad_rows: Decides about rows that cannot be used, and counts all; by default they are
            errors.

    Raises:
        DataError: The source cannot be read, has no rows, or holds one that cannot be used.
    """
    bad_rows = bad_rows if bad_rows is not None else BadRows()
    with closing(parse_rows(source)) as rows:
        for row in rows:
            bad_rows.num_read += 1
            if isinstance(row, RowError):
                bad_rows.add(row)
            else:
                yield row
    bad_rows.end()


def _records(source: SourceFile) -> Generator[Record, None, None]:
    if source.hub is not None:
        yield from read_hub(source.hub)
        return
    for path in source.files:
        records = _records_of(path, source.sample_by)
        if source.format == "auto" and find_kind(path) == "text":
            records = _no_objects(records, source.reading)
        yield from records


def _no_objects(records: Records, reading: Reading) -> Records:
    """Refuse lines of text that are rows of another format: to learn their JSON was not meant.

    Raises:
        DataError: The first line is such a row.
    """
    for number, (where, value) in enumerate(records):
        if not number and not isinstance(value, RowError):
            found = _format_within(str(value["text"]), reading)
            if found is not None:
                raise DataError(
                    f"{where}: the line is a JSON object with the columns of {found}, in a file of "
                    "plain text. Name the file .jsonl, or set `data.format: text` to learn it as "
                    "it is."
                )
        yield where, value


def _format_within(text: str, reading: Reading) -> str | None:
    """The format of a row that a text is the JSON of; None for all other texts."""
    try:
        value = parse_json(text.strip(), "")
    except RowError:
        return None
    found = find_format(value, "", reading) if isinstance(value, dict) else ()
    return found[0] if found else None


def _records_of(path: Path, sample_by: SampleBy | None) -> Records:
    name, kind = show_path(path), find_kind(path)
    refuse_sampling(path, kind, sample_by)
    if kind in ("parquet", "arrow"):
        yield from read_arrow(path, kind)
        return
    with open_bytes(path) as file:
        if kind == "csv":
            yield from read_csv(file, name)
        elif kind == "text":
            yield from read_text(file, name, sample_by or "line")
        elif goes_by_name(path):
            yield from read_json(file, name)
        else:
            yield from _meant_as_json(read_json(file, name), path)


def _meant_as_json(records: Records, path: Path) -> Records:
    """Say of a file that begins with no JSON that its name has it taken for that."""
    for number, (where, value) in enumerate(records):
        if not number and isinstance(value, RowError):
            kind = f"named {path.suffix}" if path.suffix else "without an ending"
            yield (
                where,
                RowError(
                    where,
                    f"{value.reason}. A file {kind} is read as JSON; name it .txt, and each line "
                    "of it is a row of text.",
                ),
            )
        else:
            yield where, value


def _refuse_mapping(value: Mapping[str, object], where: str, reading: Reading) -> None:
    """Say it where `columns` of the source names what the row does not have."""
    named = [column for ours, column in reading.columns.items() if column and "." not in ours]
    absent = [f"`{column}`" for column in named if column not in value]
    if absent:
        raise RowError(
            where,
            f"`columns` of the source names {', '.join(absent)}, and the row has "
            f"{_show_columns(value)}.",
        )


def _show_columns(value: Mapping[str, object]) -> str:
    """The columns of a row that are not null, as far as they are names and no row of a file.

    Where all are null, these.
    """
    is_null = all(part is None for part in value.values())
    there = (name for name, part in value.items() if is_null or part is not None)
    names = [name for name in there if _NAME.fullmatch(name)]
    if not names:
        return "none that is a name"
    more = len(names) - _MOST_NAMES
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
    shown = f"{shown} and {show_number(more, 'other')}" if more > 0 else shown
    return f"null alone, in {shown}" if is_null else shown


def _advice_on_columns(value: Mapping[str, object]) -> str:
    """What to do about a row of no known format."""
    for name, part in value.items():
        # As files have it that were made for a web page, or by `datasets` for one split each.
        if _NAME.fullmatch(name) and isinstance(part, list) and part and isinstance(part[0], dict):
            return (
                f"If the rows are the {show_number(len(part), 'object')} in `{name}`, make that "
                "list the whole file; else name other columns in `columns` of the source."
            )
    return "Name other columns in `columns` of the source."


def _agree(
    value: Mapping[str, object], row_format: str | None, where: str, reading: Reading
) -> str:
    """The format of a row, which must be that of the rows before it."""
    found = find_format(value, where, reading)
    if row_format is None:
        if not found:
            _refuse_mapping(value, where, reading)
            raise RowError(
                where,
                "no column of a format that is known: wanted `instruction` and `output`, "
                "`messages` or `conversations`, `prompt` and `completion`, `text`, or `input_ids`; "
                f"the row has {_show_columns(value)}. {_advice_on_columns(value)}",
            )
        if len(found) > 1:
            raise RowError(
                where,
                f"the columns are those of {' and of '.join(found)}. "
                f"Set `data.format` to one of {', '.join(FORMATS)}.",
            )
        return found[0]
    # Of turns of the other kind, their reader says more.
    if row_format in _TURNS and _TURNS.intersection(found):
        return row_format
    if found and row_format not in found:
        raise RowError(
            where,
            f"the columns are those of {found[0]}, but the file is read as {row_format}. "
            "Keep one format a file.",
        )
    return row_format
