"""Where tensors lie in the payload of a safetensors file, and what must hold for all of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes an element, by safetensors' dtype name."""

ALIGNMENT = 4096
"""Payloads begin at a multiple of it, so that they can be read around the page cache."""

RESERVED_NAME = "__metadata__"
"""What a header calls its free text, so that no tensor can have the name."""

_MAX_DIMENSIONS = 16
_MAX_SIZE = 1 << 62


class TensorPlace(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: By safetensors' name, a key of `ITEM_BYTES`.
        start: First byte, counted from the beginning of the payload.
        end: One past the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def check_places(tensors: Sequence[TensorPlace], payload_bytes: int) -> None:
    """Tensors in the order of their bytes must fill the payload exactly, each name once.

    Raises:
        ValueError: They do not; says which tensor and what is wrong with it.
    """
    names: set[str] = set()
    end = 0
    for place in tensors:
        fault = f"{short(place.name)} "
        if place.name in names or place.name == RESERVED_NAME:
            raise ValueError(f"{fault}occurs twice or is reserved")
        names.add(place.name)
        if place.dtype not in ITEM_BYTES:
            raise ValueError(f"{fault}has the unknown dtype {short(place.dtype)}")
        # Bounded before they are multiplied: a product of long numbers can take hours.
        sizes_are_sane = all(0 <= size <= _MAX_SIZE for size in place.shape)
        if len(place.shape) > _MAX_DIMENSIONS or not sizes_are_sane:
            raise ValueError(f"{fault}has no possible shape")
        wanted = place.numel * ITEM_BYTES[place.dtype]
        if place.end - place.start != wanted:
            raise ValueError(f"{fault}needs {wanted} bytes and has {place.end - place.start}")
        if place.start != end:
            raise ValueError(f"{fault}begins at byte {place.start}, wanted {end}")
        end = place.end
    if end != payload_bytes:
        raise ValueError(f"its tensors have {end} bytes, its payload {payload_bytes}")


def short(text: object, limit: int = 120) -> str:
    """`text` for a message: quoted, control characters escaped, cut.

    Names come from files that may be damaged or hostile and end on a terminal.
    """
    shown = ascii(text)
    return shown if len(shown) <= limit else f"{shown[: limit - 4]}...{shown[-1]}"
