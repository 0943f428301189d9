"""Which files a source has, what kind each is, and their bytes, unpacked.

A kind is told by how a file begins where that is sure (Parquet, Arrow, gzip, zstd), otherwise by
its name: `.csv` and `.txt`, and JSON for everything else.
"""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, cast

from megatrain_cli.errors import DataError
from megatrain_cli.regular import open_file
from megatrain_cli.units import KIB, MIB

Kind = Literal["json", "csv", "text", "parquet", "arrow"]

MAX_ROW = 64 * MIB
"""Bytes of the largest row: what is longer is no row, but a file of another kind."""

_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_PACKED = (".gz", ".zst")
_TABS = (".tsv", ".tab")

# Not data: what `datasets` and its hub put beside the files of a data set.
_BESIDE = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}

# Packed bytes that are unpacked at a time: they may become a thousand times as many.
_ZSTD_CHUNK = 16 * KIB

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BINARY: dict[bytes, Kind] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",
}
# How files begin that are often named by mistake, and what they are.
_OTHERS = {
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xff\xfe\x00\x00": "UTF-32 text; save it as UTF-8",
    b"\x00\x00\xfe\xff": "UTF-32 text; save it as UTF-8",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"BZh91AY": "a bzip2 archive; unpack it, or pack it with gzip",
    b"\xfd7zXZ": "an xz archive; unpack it, or pack it with gzip",
    _GZIP: "packed with gzip twice; unpack it once",
    b"version https://git-lfs": "a Git LFS pointer, not the data; run `git lfs pull`",
}


def show_path(path: Path) -> str:
    """The path as a user would type it: short when it lies below the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def list_files(path: Path) -> list[Path]:
    """The file itself, or all data files below a folder, in the order of their names.

    Hidden files and folders are left out, and so are links to folders.

    Raises:
        DataError: There is nothing, or a folder has data files of several kinds: whether they are
            different rows, or the same ones twice, cannot be told.
    """
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if _is_data(name)]
    if not found:
        known = ", ".join(_SUFFIXES)
        raise DataError(f"{show_path(path)}: no data file in the folder ({known}, and .gz of them)")
    found.sort(key=lambda file: file.relative_to(path).parts)
    kinds = {_by_name(file): file for file in reversed(found)}
    if len(kinds) > 1:
        first, second, *_ = sorted(show_path(file) for file in kinds.values())
        raise DataError(
            f"{show_path(path)}: files of several kinds in one folder, such as {first} and "
            f"{second}. Name the files, or keep one kind a folder."
        )
    return found


def find_kind(path: Path) -> Kind:
    """What a file is.

    Raises:
        DataError: It cannot be read, is empty, or is of no kind that holds rows.
    """
    name = show_path(path)
    with open_bytes(path) as file:
        begin = file.read(32)
    if not begin:
        raise DataError(f"{name}: the file is empty (0 bytes)")
    for mark, kind in _BINARY.items():
        if begin.startswith(mark):
            return kind
    for mark, problem in _OTHERS.items():
        if begin.startswith(mark):
            raise DataError(f"{name}: the file is {problem}.")
    if _unpacked(path).suffix.lower() in _TABS:
        raise DataError(f"{name}: columns divided by tabs are not read; save the file as CSV.")
    kind = _by_name(path)
    if kind in ("parquet", "arrow"):
        raise DataError(f"{name}: the file is named {path.suffix} and is no such file.")
    return kind


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes from the start, unpacked while they are read.

    Raises:
        DataError: It cannot be read, or ends too early; also while it is read.
    """
    name = show_path(path)
    try:
        with open_file(path) as raw:
            begin = raw.read(4)
            raw.seek(0)
            if begin.startswith(_GZIP):
                with gzip.open(raw) as file:
                    yield cast("BinaryIO", file)
            elif begin == _ZSTD:
                with _open_zstd(raw, name) as file:
                    yield file
            else:
                yield raw
    except FileNotFoundError:
        raise DataError(f"{name}: there is no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name}: the compressed file is damaged or cut off: {error}") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None


def goes_by_name(path: Path) -> bool:
    """Whether its name says what a file is; one that nothing tells of is taken for JSON."""
    return _unpacked(path).suffix.lower() in _SUFFIXES


def is_packed(path: Path) -> bool:
    """Whether a file is compressed as a whole, so that it can only be read from its start."""
    with open_raw(path) as raw:
        begin = raw.read(4)
    return begin.startswith(_GZIP) or begin == _ZSTD


@contextmanager
def open_raw(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes as they are on the disk.

    Raises:
        DataError: It cannot be read.
    """
    try:
        with open_file(path) as raw:
            yield raw
    except OSError as error:
        raise DataError(f"{show_path(path)}: cannot be read: {error.strerror or error}") from None


def _open_zstd(raw: BinaryIO, name: str) -> BinaryIO:
    try:
        import zstandard  # noqa: PLC0415
    except ImportError:
        raise DataError(
            f"{name}: reading zstd needs the library zstandard. Install it with "
            "`pip install 'megatrain[data]'`, or unpack the file."
        ) from None
    return cast("BinaryIO", io.BufferedReader(_ZstdReader(raw, zstandard)))


class _ZstdReader(io.RawIOBase):
    """Unpacks frame by frame; to the library's own reader a frame that is cut off looks whole."""

    def __init__(self, raw: BinaryIO, zstandard: ModuleType) -> None:
        self._raw = raw
        self._library = zstandard
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._is_begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - `Buffer` came with Python 3.12
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._raw.read(_ZSTD_CHUNK)
            if not packed:
                if self._is_begun and not self._frame.eof:
                    raise EOFError("it ends in the middle")
                return 0
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._is_begun = True
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise EOFError(error) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _is_data(name: str) -> bool:
    if name.startswith(".") or name in _BESIDE:
        return False
    return _unpacked(Path(name)).suffix.lower() in _SUFFIXES


def _by_name(path: Path) -> Kind:
    return _SUFFIXES.get(_unpacked(path).suffix.lower(), "json")


def _unpacked(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in _PACKED else path


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
