"""Rows of a plain text file: a line, a paragraph, or the whole file is a row of format `text`."""

from typing import BinaryIO, Literal

from megatrain_cli.data.files import MAX_ROW
from megatrain_cli.data.json_file import BYTE_ORDER_MARK
from megatrain_cli.data.records import Record, Records, decode
from megatrain_cli.errors import DataError, RowError
from megatrain_cli.units import MIB

SampleBy = Literal["line", "paragraph", "document"]


def read_text(file: BinaryIO, name: str, sample_by: SampleBy) -> Records:
    r"""The rows of a file, each with the line on which it begins.

    Lines end with "\n" or "\r\n"; inside a row they are "\n". Blank lines are no rows, and divide
    paragraphs. A document is the file without the line break at its end.

    Raises:
        DataError: A row is longer than rows can be.
    """
    begun: list[bytes] = []
    first, line, size = 1, 0, 0
    while raw := file.readline(MAX_ROW + 1):
        line += 1
        content = raw.removeprefix(BYTE_ORDER_MARK) if line == 1 else raw
        content = content.removesuffix(b"\n").removesuffix(b"\r")
        if sample_by != "document" and not content.strip():
            if begun:
                yield _record(begun, f"{name}:{first}")
            begun, size = [], 0
            continue
        if not begun:
            first = line
        begun.append(content)
        size += len(raw)
        if size > MAX_ROW:
            raise DataError(
                f"{name}:{first}: a {sample_by} is longer than {MAX_ROW // MIB} MiB. Set "
                "`sample_by` of the source to line or paragraph, or divide the file."
            )
        if sample_by == "line":
            yield _record(begun, f"{name}:{first}")
            begun, size = [], 0
    if begun:
        yield _record(begun, f"{name}:{first}")


def _record(lines: list[bytes], where: str) -> Record:
    try:
        return where, {"text": decode(b"\n".join(lines), where)}
    except RowError as error:
        return where, error
