"""What all values of a manifest share: frozen, strict, and keeping keys they do not know."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

Count = Annotated[int, Field(ge=0)]
Identity = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Xxh128 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
CheckpointId = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


def _is_hex_float(text: str) -> str:
    try:
        same = float.fromhex(text).hex() == text
    except OverflowError:
        same = False
    if not same:
        raise ValueError("not a finite number as Python's float.hex() writes it")
    return text


HexFloat = Annotated[
    str, StringConstraints(pattern=r"^-?0x[01]\.[0-9a-f]+p[+-][0-9]{1,4}$"),
    AfterValidator(_is_hex_float),
]  # fmt: skip
"""A double, exactly: floats in decimal do not read back the same in every language."""


class Record(BaseModel):
    """A mapping of the manifest. Unknown keys, of a newer minor version, are kept and ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


def check_unique(what: str, values: Iterable[str]) -> None:
    """Each value once, also where upper and lower case are the same, as on some file systems.

    Raises:
        ValueError: One occurs twice.
    """
    seen: set[str] = set()
    for value in values:
        if value.casefold() in seen:
            raise ValueError(f"{what} {value} occurs twice")
        seen.add(value.casefold())
