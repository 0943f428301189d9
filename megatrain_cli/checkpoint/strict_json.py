"""JSON with one spelling for each value, and a reader that gives up early on what is not that.

Canonical: keys sorted, no spaces, ASCII only, no floats. So equal values have equal bytes, a hash
of the bytes is a hash of the value, and any other program computes the same one.
"""

import json
from typing import NoReturn

from megatrain_cli.errors import CorruptError
from megatrain_cli.units import show_bytes

MAX_BYTES = 64 << 20
"""Longest text that is parsed. A manifest of a thousand layers has about four MiB."""

MAX_DEPTH = 16
"""Deepest nesting of lists and mappings."""

MAX_VALUES = 12_000_000
"""Most values. Python needs up to 100 bytes for one, so that memory stays near one GiB."""


def canonical(value: object) -> bytes:
    """The one spelling of a value of mappings, lists, strings, integers, truth values and null.

    Raises:
        TypeError: A value is a float (which has no spelling all languages agree on) or no JSON.
        ValueError: It is nested deeper than `MAX_DEPTH`.
    """
    _check(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse(raw: bytes, what: str) -> object:
    """The value that canonical JSON spells.

    Args:
        raw: The whole text.
        what: Names the text in errors: its path.

    Raises:
        CorruptError: It is too long, too deep or not canonical JSON.
    """
    if len(raw) > MAX_BYTES:
        raise CorruptError(f"{what}: damaged: {show_bytes(len(raw))}, more than any such file has")
    check_amount(raw, what)
    try:
        value = json.loads(raw, parse_float=_refuse, parse_constant=_refuse)
        same = canonical(value) == raw
    except (ValueError, TypeError, RecursionError) as error:
        # `ascii`: what a damaged file holds must not reach a terminal as control characters.
        raise CorruptError(f"{what}: torn or damaged: {ascii(str(error))[1:-1][:200]}") from None
    if not same:
        raise CorruptError(
            f"{what}: changed after it was written: a space, a repeated key or another order"
        )
    return value


def check_amount(raw: bytes, what: str) -> None:
    """Refuse JSON of more values than memory should be spent on, before it is parsed.

    Raises:
        CorruptError: It has more than `MAX_VALUES`.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise CorruptError(f"{what}: damaged: more than {MAX_VALUES:,} values")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"a number that is not an integer: {text[:40]}")


def _check(value: object) -> None:
    """No floats, no keys but strings, not too deep; by levels, so that depth costs no stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for one in level:
            if isinstance(one, dict):
                if not all(isinstance(key, str) for key in one):
                    raise TypeError("a key is not a string")
                below += one.values()
            elif isinstance(one, list | tuple):
                below += one
            elif isinstance(one, float):
                raise TypeError(f"{one!r} is a float; write its hex() as a string")
        level = [one for one in below if isinstance(one, dict | list | tuple | float)]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")
