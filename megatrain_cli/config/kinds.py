"""The kinds of value a config key may hold, each with the words that say what is wanted.

Strict throughout: `true` is not 1 and `"4"` is not 4. What is converted is a number written with an
exponent (`2e5`), to the whole number it stands for, and a size with its unit (`2GiB`), to bytes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatrain_cli.units import read_bytes

MAX_INT = 2**63 - 1


@dataclass(frozen=True)
class Wanted:
    """What to write for a value of this kind, as it appears after `wanted ...` in a message."""

    text: str


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: object) -> object:
    size = read_bytes(value) if isinstance(value, str) else None
    return _whole(value) if size is None else size


def _items(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value else value


Count = Annotated[
    int,
    BeforeValidator(_whole),
    Field(ge=1, le=MAX_INT),
    Wanted("a whole number of at least 1"),
]
CountFrom0 = Annotated[
    int,
    BeforeValidator(_whole),
    Field(ge=0, le=MAX_INT),
    Wanted("a whole number of at least 0"),
]
Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    Field(ge=0, le=MAX_INT),
    Wanted("a whole number of at least 0, a size such as 512MiB"),
]
# The most that one machine has; beyond, starting them takes longer than their work.
Workers = Annotated[
    int,
    BeforeValidator(_whole),
    Field(ge=1, le=1024),
    Wanted("a whole number from 1 to 1024"),
]
# Far inside what FP32 holds: the kernels compute in it, where 1e39 is infinite and an epsilon of
# 1e-46 is 0. Nothing that is counted overflows either.
Number = Annotated[float, Field(ge=0, le=1e30), Wanted("a number from 0 to 1e30")]
PositiveNumber = Annotated[float, Field(ge=1e-30, le=1e30), Wanted("a number from 1e-30 to 1e30")]
Share = Annotated[float, Field(ge=0, le=1), Wanted("a number from 0 to 1")]
PositiveShare = Annotated[float, Field(gt=0, le=1), Wanted("a number above 0 and at most 1")]
HeldOutShare = Annotated[float, Field(gt=0, lt=1), Wanted("a number above 0 and below 1")]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    BeforeValidator(_items),
    Wanted("two numbers such as [0.9, 0.999], each at least 0 and below 1"),
]
Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|cuda|cuda:(0|[1-9][0-9]{0,3}))$"),
    Wanted("`auto`, `cpu`, `cuda` or `cuda:N`"),
]
TEMPLATES = ("alpaca", "chatml", "gemma", "llama3", "mistral", "none", "phi3", "zephyr")
"""Names of chat templates; `none` puts the tokenizer's own aside."""
Template = Annotated[
    str,
    Field(pattern=rf"^({'|'.join(TEMPLATES)}|.+\.(jinja|jinja2|j2))$"),
    Wanted(f"a path that ends in .jinja, or one of {', '.join(TEMPLATES)}"),
]
COLUMNS = (
    "instruction", "input", "output", "history", "messages", "messages.role", "messages.content",
    "prompt", "completion", "system", "tools", "text", "input_ids", "labels", "attention_mask",
    "position_ids",
)  # fmt: skip
"""The fields of rows that a file may have under other names."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation",
         "function_call")  # fmt: skip
"""The roles of turns that a file may have under other names."""


def _names(known: tuple[str, ...]) -> BeforeValidator:
    """Names of ours -> names in a file, all of them known and none of them empty."""

    def check(value: object) -> object:
        if not isinstance(value, dict) or not value or not set(value) <= set(known):
            raise ValueError("names")
        if not all(isinstance(name, str) and name for name in value.values()):
            raise ValueError("names")
        if len(set(value.values())) < len(value):
            raise ValueError("names")
        return value

    return BeforeValidator(check)


Columns = Annotated[
    dict[str, str],
    _names(COLUMNS),
    Wanted(f"a mapping of fields ({', '.join(COLUMNS)}) to the file's columns, each once"),
]
Tags = Annotated[
    dict[str, str],
    _names(ROLES),
    Wanted(f"a mapping of roles ({', '.join(ROLES)}) to the file's names for them, each once"),
]
Name = Annotated[str, Field(min_length=1), Wanted("a name")]
FilePath = Annotated[Path, BeforeValidator(_path), Wanted("a path")]
CacheDir = Annotated[
    Path | Literal["auto"] | None,
    BeforeValidator(lambda value: value if value == "auto" else _path(value)),
    Wanted("a path, `auto` or null"),
]
