"""What safetensors files hold: headers, read and made. No tensor is touched, no torch is needed.

The format (https://huggingface.co/docs/safetensors): eight bytes, little-endian, with the length
of a JSON text; the text, which maps names to dtype, shape and byte range; then the tensors, one
after the other, to the end of the file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from megatrain_cli.checkpoint.names import TEMPORARY, TRASH
from megatrain_cli.checkpoint.places import (
    ALIGNMENT,
    ITEM_BYTES,
    RESERVED_NAME,
    TensorPlace,
    check_places,
    short,
)
from megatrain_cli.checkpoint.strict_json import check_amount
from megatrain_cli.errors import ClosedError, CorruptError
from megatrain_cli.regular import open_file, read_file

INDEX_NAME = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_METADATA = RESERVED_NAME
# The reference reader refuses longer headers; a damaged length must not make us read a whole disk.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file.

    Attributes:
        start: First byte, counted from the beginning of the file.
        end: One past the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file of a model folder."""

    name: str
    tensors: Mapping[str, TensorEntry]
    num_bytes: int

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(entry.shape) for entry in self.tensors.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that occur, sorted."""
        return tuple(sorted({entry.dtype for entry in self.tensors.values()}))


@dataclass(frozen=True)
class Header:
    """What a header says.

    Attributes:
        tensors: In the order of their bytes.
        metadata: Free text about the file; for messages, never for trust.
        data_start: Where the payload begins, counted from the beginning of the file.
    """

    tensors: tuple[TensorPlace, ...]
    metadata: Mapping[str, str]
    data_start: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names and places of the tensors in a safetensors file, in the order of their bytes.

    Raises:
        CorruptError: The header is not one, or does not describe exactly this file.
        ClosedError: It cannot be read.
    """
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            raw = file.read(_LENGTH_BYTES)
            raw += file.read(header_bytes(raw, size, str(path)) - _LENGTH_BYTES)
    except OSError as error:
        raise ClosedError(f"{path} cannot be read: {error.strerror or error}.") from error
    header = parse_header(raw, size, str(path))
    first = header.data_start
    return {
        place.name: TensorEntry(place.dtype, place.shape, first + place.start, first + place.end)
        for place in header.tensors
    }


def header_bytes(raw: bytes, file_size: int, what: str) -> int:
    """Where the payload begins, from the first eight bytes of a file.

    Raises:
        CorruptError: A file of that size cannot have such a header.
    """
    if min(len(raw), file_size) < _LENGTH_BYTES:
        raise CorruptError(f"{what}: truncated: {file_size} bytes, too few for a header")
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if length > min(file_size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise CorruptError(
            f"{what}: truncated or damaged: a header of {length} bytes in a file of {file_size}"
        )
    return _LENGTH_BYTES + length


def parse_header(raw: bytes, file_size: int, what: str) -> Header:
    """What the head of a file says, checked against the file's size.

    Args:
        raw: The file's beginning: the whole header, or more.
        file_size: Of the whole file, in bytes.
        what: Names the file in errors.

    Raises:
        CorruptError: It is no header, or describes another file than one of this size.
    """
    data_start = header_bytes(raw, file_size, what)
    if len(raw) < data_start:
        raise CorruptError(f"{what}: truncated: {len(raw)} bytes of a header of {data_start}")
    values, metadata = _read_json(raw[_LENGTH_BYTES:data_start], what)
    places = [_place(what, name, value) for name, value in values.items()]
    places.sort(key=lambda place: (place.start, place.end))
    end = data_start + max((place.end for place in places), default=0)
    if end != file_size:
        fault = "truncated" if end > file_size else "too long"
        raise CorruptError(
            f"{what}: {fault}: the header describes {end} bytes, the file has {file_size}"
        )
    try:
        check_places(places, file_size - data_start)
    except ValueError as error:
        raise CorruptError(f"{what}: damaged header: {error}") from None
    return Header(tuple(places), metadata, data_start)


def make_padded_header(tensors: Sequence[TensorPlace], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file whose payload begins at a multiple of `ALIGNMENT`.

    Args:
        tensors: In the order of their bytes, without gaps.
        metadata: Free text about the file; `format` is added.

    Raises:
        ValueError: The tensors do not follow each other.
    """
    check_places(tensors, tensors[-1].end if tensors else 0)
    header: dict[str, object] = {_METADATA: {"format": "pt"} | dict(metadata)}
    for name, dtype, shape, start, end in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return _head(header, ALIGNMENT)


def make_header(dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The head of a safetensors file of PyTorch tensors, as the reference library writes it.

    Args:
        dtype: Of all tensors, by safetensors' name.
        shapes: Of each tensor. What follows the head are their bytes, in this order.
    """
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return _head(header, _LENGTH_BYTES)


def find_model_folder(path: Path) -> Path | None:
    """The newest folder with `config.json` and weights: `path` itself, or below its `checkpoints`.

    What is being written or removed does not count.
    """
    candidates = [path, *(p for p in (path / "checkpoints").rglob("*") if p.is_dir())]
    found = [
        folder
        for folder in candidates
        if (folder / "config.json").is_file()
        and any(folder.glob("model*.safetensors"))
        and not any(p.startswith((TEMPORARY, TRASH)) for p in folder.relative_to(path).parts)
    ]
    return max(found, key=lambda p: ((p / "config.json").stat().st_mtime_ns, p.name), default=None)


def read_folder(folder: Path) -> tuple[WeightFile, ...]:
    """Every weight file of a model folder, checked against the folder's index if it has one.

    Raises:
        CorruptError: A file is damaged, or a file or tensor of the index is missing.
        ClosedError: A file cannot be read.
    """
    index = _read_index(folder / INDEX_NAME)
    for file in sorted(set(index.values())):
        if not (folder / file).is_file():
            raise CorruptError(f"{folder / file}: missing, though {INDEX_NAME} names it")
    paths = sorted(folder.glob("model*.safetensors"))
    if index:  # a file that the index does not name is no part of the model
        paths = sorted({folder / file for file in index.values()})
    files = tuple(WeightFile(p.name, read_header(p), p.stat().st_size) for p in paths)
    if index:
        held = {(name, file.name) for file in files for name in file.tensors}
        for name, where in index.items():
            if (name, where) not in held:
                raise CorruptError(
                    f"{folder / where}: {name} is missing, though {INDEX_NAME} names it"
                )
        for name, where in sorted(held - set(index.items())):
            raise CorruptError(f"{folder / where}: {name} is not in {INDEX_NAME}")
    return files


def _read_index(path: Path) -> dict[str, str]:
    try:
        return parse_index(read_file(path), str(path)) if path.exists() else {}
    except OSError as error:
        raise ClosedError(f"{path} cannot be read: {error.strerror or error}.") from error


def parse_index(raw: bytes, what: str) -> dict[str, str]:
    """Which file of the folder each tensor is in, from an index's bytes.

    Args:
        raw: All of them.
        what: Names the index in errors.

    Raises:
        CorruptError: It is no index, or names a file that is not a plain name of this folder.
    """
    check_amount(raw, what)
    try:
        index = json.loads(raw, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what}: not a weight index: {short(str(error))[1:-1]}") from None
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise CorruptError(f"{what}: not a weight index: no `weight_map`")
    for file in files.values():
        # Path("..").name is "..", which other programs would follow.
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise CorruptError(f"{what}: not a weight index: {short(file)} is no plain name")
    return files


def _head(header: Mapping[str, object], alignment: int) -> bytes:
    """Length and text, padded with spaces so that what follows is aligned."""
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _read_json(raw: bytes, what: str) -> tuple[dict[str, object], dict[str, str]]:
    """The mapping of tensors, and the metadata."""
    check_amount(raw, what)
    try:
        header = json.loads(raw, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what}: damaged header: {short(str(error))[1:-1]}") from None
    if not isinstance(header, dict):
        raise CorruptError(f"{what}: damaged header: not a mapping")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{what}: damaged header: {_METADATA} is not a mapping of texts")
    return header, metadata


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _place(what: str, name: str, value: object) -> TensorPlace:
    fault = f"{what}: damaged header: {short(name)}"
    if not isinstance(value, dict):
        raise CorruptError(f"{fault} is not a mapping")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise CorruptError(f"{fault} has no dtype")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CorruptError(f"{fault} has no valid shape and byte range")
    return TensorPlace(name, dtype, tuple(shape), *offsets)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
