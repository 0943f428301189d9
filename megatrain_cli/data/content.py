"""What files hold, by hash: neither names nor times decide whether a file is the same."""

from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatrain_cli.data.files import show_path
from megatrain_cli.data.source import SourceFile
from megatrain_cli.errors import DataError
from megatrain_cli.regular import open_file
from megatrain_cli.units import MIB

_CHUNK_BYTES = 16 * MIB


@dataclass(frozen=True)
class FileContent:
    """A file as it was read.

    Attributes:
        num_lines: Line breaks, to tell how far a reader has come; means nothing where the file is
            no text.
    """

    path: Path
    num_bytes: int
    xxh3_128: str
    num_lines: int


def hash_content(path: Path) -> FileContent:
    """Read a whole file, piece by piece.

    Raises:
        DataError: It cannot be read.
    """
    digest, size, lines = xxhash.xxh3_128(), 0, 0
    try:
        with open_file(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                lines += chunk.count(b"\n")
    except FileNotFoundError:
        raise DataError(f"{show_path(path)}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{show_path(path)}: cannot be read: {error.strerror or error}") from None
    return FileContent(path, size, digest.hexdigest(), lines)


def hash_files(source: SourceFile) -> tuple[FileContent, ...]:
    """Of all files of a source, in order; none for a data set of a hub.

    Raises:
        DataError: A file cannot be read, or there is none.
    """
    return tuple(hash_content(path) for path in source.files)
