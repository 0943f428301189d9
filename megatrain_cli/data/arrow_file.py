"""Rows of Parquet and Arrow files, batch by batch; a row's place is its number, counted from 1."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatrain_cli.data.files import is_packed, show_path
from megatrain_cli.data.records import Records
from megatrain_cli.errors import DataError, RowError

if TYPE_CHECKING:
    import pyarrow as pa

# Rows turned into Python objects at a time.
_BATCH = 256


def read_arrow(path: Path, kind: Literal["parquet", "arrow"]) -> Records:
    """The rows of a file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged or packed as a whole.
    """
    name = show_path(path)
    if is_packed(path):
        raise DataError(
            f"{name}: a {kind} file that is compressed as a whole cannot be read from its end, "
            "where its index is. Unpack it; it is compressed inside."
        )
    number = 0
    with _arrow_errors(name):
        for batch in _parquet(path) if kind == "parquet" else _ipc(path):
            _refuse_doubled(batch.schema, name)
            for start in range(0, batch.num_rows, _BATCH):
                for row in _rows(batch.slice(start, _BATCH)):
                    number += 1
                    where = f"{name}:{number}"
                    yield where, RowError(where, row) if isinstance(row, str) else row


def _rows(batch: "pa.RecordBatch") -> list[dict[str, object] | str]:
    """Rows as Python objects, or what is wrong with them; a fault is that of its row alone."""
    try:
        return list(batch.to_pylist(maps_as_pydicts="strict"))
    except UnicodeDecodeError:
        raise
    except (KeyError, OverflowError, ValueError):
        if batch.num_rows == 1:
            return [_fault_of(batch)]
        return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1))]


def _fault_of(row: "pa.RecordBatch") -> str:
    """Which column of a row that Python cannot hold is the cause, and why."""
    reason = ""
    for name in row.schema.names:
        try:
            row.select([name]).to_pylist(maps_as_pydicts="strict")
        except KeyError:
            reason = f"{name}: an object has the same key twice. Keep one."
        except (OverflowError, ValueError):  # a year beyond 9999, a time zone that is not known
            reason = f"{name}: a date or time that Python cannot hold. Take the column out."
    return reason


def _parquet(path: Path) -> "Iterator[pa.RecordBatch]":
    import pyarrow.parquet as pq  # noqa: PLC0415

    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_BATCH)


def _ipc(path: Path) -> "Iterator[pa.RecordBatch]":
    """Both forms: the file with an index at its end, and the stream that `datasets` writes."""
    import pyarrow as pa  # noqa: PLC0415

    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            with pa.ipc.open_file(source) as file:
                for index in range(file.num_record_batches):
                    yield file.get_batch(index)
        else:
            source.seek(0)
            with pa.ipc.open_stream(source) as stream:
                yield from stream


def _refuse_doubled(schema: "pa.Schema", name: str) -> None:
    doubled = sorted({column for column in schema.names if schema.names.count(column) > 1})
    if doubled:
        raise DataError(f"{name}: the column {doubled[0]!r} is there twice. Keep one.")


@contextmanager
def _arrow_errors(name: str) -> Iterator[None]:
    try:
        import pyarrow as pa  # noqa: PLC0415
    except ImportError:
        raise DataError(
            f"{name}: reading Parquet and Arrow needs the library pyarrow. Install it with "
            "`pip install 'megatrain[data]'`."
        ) from None
    try:
        yield
    except UnicodeDecodeError:
        raise DataError(f"{name}: the file holds text that is not UTF-8.") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{name}: the file is damaged or cut off: {reason}") from None
