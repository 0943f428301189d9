"""What safetensors files hold: headers, read and made. No tensor is touched, no torch is needed.

The format (https://huggingface.co/docs/safetensors): eight bytes, little-endian, with the length
of a JSON text; the text, which maps names to dtype, shape and byte range; then the tensors, one
after the other, to the end of the file.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from megatrain_cli.checkpoint.places import ITEM_BYTES
from megatrain_cli.errors import CorruptError

INDEX_NAME = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
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


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names and places of the tensors in a safetensors file, in the order of their bytes.

    Raises:
        CorruptError: The header is not one, or does not describe exactly this file.
    """
    header, data_start, size = _read_json(path)
    entries: dict[str, TensorEntry] = {}
    for name, value in header.items():
        if name != _METADATA:
            entries[name] = _entry(path, name, value, data_start)
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = data_start
    for name, entry in ordered.items():
        if entry.start != end:
            raise CorruptError(
                f"{path}: damaged header: {name} begins at byte {entry.start}, wanted {end}"
            )
        end = entry.end
    if end != size:
        what = "truncated" if end > size else "too long"
        raise CorruptError(f"{path}: {what}: the header describes {end} bytes, the file has {size}")
    return ordered


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
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # so that the tensors begin aligned
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def find_model_folder(path: Path) -> Path | None:
    """The newest folder with `config.json` and weights: `path` itself, or below its `checkpoints`.

    Folders that were never finished (`*.partial`) do not count.
    """
    candidates = [path, *(p for p in (path / "checkpoints").rglob("*") if p.is_dir())]
    found = [
        folder
        for folder in candidates
        if (folder / "config.json").is_file()
        and any(folder.glob("model*.safetensors"))
        and not any(part.endswith(".partial") for part in folder.parts)
    ]
    return max(found, key=lambda p: ((p / "config.json").stat().st_mtime_ns, p.name), default=None)


def read_folder(folder: Path) -> tuple[WeightFile, ...]:
    """Every weight file of a model folder, checked against the folder's index if it has one.

    Raises:
        CorruptError: A file is damaged, or a file or tensor of the index is missing.
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
    if not path.exists():
        return {}
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not a weight index: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise CorruptError(f"{path}: not a weight index: no `weight_map`")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptError(f"{path}: not a weight index: {file!r} is no file of this folder")
    return files


def _read_json(path: Path) -> tuple[dict[str, object], int, int]:
    """The header's mapping, where the tensors begin, and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES:
            raise CorruptError(f"{path}: truncated: {size} bytes, too few for a header")
        if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise CorruptError(
                f"{path}: truncated or damaged: a header of {length} bytes in a file of {size}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: damaged header: {error}") from error
    if not isinstance(header, dict):
        raise CorruptError(f"{path}: damaged header: not a mapping")
    return header, _LENGTH_BYTES + length, size


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    fault = f"{path}: damaged header: {name}"
    if not isinstance(value, dict):
        raise CorruptError(f"{fault} is not a mapping")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CorruptError(f"{fault} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CorruptError(f"{fault} has no valid shape and byte range")
    start, end = offsets
    wanted = math.prod(shape) * ITEM_BYTES[dtype]
    if end - start != wanted:
        raise CorruptError(f"{fault} needs {wanted} bytes and has {end - start}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
