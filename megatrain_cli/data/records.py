"""What a reader gives for each row: where it stands, and its columns or what is wrong with it."""

from collections.abc import Iterator, Mapping

from megatrain_cli.data.fields import show_kind
from megatrain_cli.errors import RowError

Record = tuple[str, Mapping[str, object] | RowError]
"""The place (`file:line`), and the row as it was read. A row that cannot be read is an error in its
place, not raised, so that the reader can go on behind it."""
Records = Iterator[Record]


def as_record(where: str, value: object) -> Record:
    """A value that must be an object."""
    if isinstance(value, dict):
        return where, value
    return where, RowError(where, f"{show_kind(value)} where an object is expected")


NUL = (
    "is NUL, which no text has: the file is UTF-16, or was not written to its end. Save it anew, "
    "as UTF-8."
)


def decode(raw: bytes, where: str) -> str:
    """UTF-8 text.

    Raises:
        RowError: Names the first byte that is not.
    """
    if b"\0" in raw:
        raise RowError(where, f"byte {raw.index(0) + 1} {NUL}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            where, f"byte {error.start + 1} is not UTF-8. Save the file as UTF-8."
        ) from None
