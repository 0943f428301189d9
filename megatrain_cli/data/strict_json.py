"""JSON as data files hold it: UTF-8, every key of an object once, each fault with its place."""

import json

from megatrain_cli.errors import RowError


class _DoubledKeyError(ValueError):
    """An object has a key twice; which of the values was meant cannot be told."""


class IncompleteError(ValueError):
    """The text is no JSON value, as far as it goes; with more text it may be one.

    Attributes:
        reason: What to say when nothing follows.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys are all different, from its keys and values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _DoubledKeyError
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def scan_json(text: str, at: int, where: str) -> tuple[object, int]:
    """One JSON value that begins at `at`, and where it ends.

    Raises:
        IncompleteError: It is broken, or not whole yet.
        RowError: It is JSON, but cannot be used.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        # The parser's own line number counts from where the text begins, not in the file.
        column = error.pos - text.rfind("\n", 0, error.pos)
        raise IncompleteError(f"broken JSON: {error.msg} (column {column})") from None
    except RecursionError:
        raise RowError(where, "the JSON is nested too deeply") from None
    except _DoubledKeyError:
        raise RowError(where, "an object has the same key twice. Keep one.") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise RowError(where, "a number in the JSON is too long") from None


def parse_json(text: str, where: str) -> object:
    """The one JSON value of a text without white space around it.

    Raises:
        RowError: It cannot be used.
    """
    try:
        value, end = scan_json(text, 0, where)
    except IncompleteError as error:
        raise RowError(where, error.reason) from None
    if end != len(text):
        raise RowError(where, f"more text follows the end of the object (column {end + 1})")
    return value


def drop_nulls(value: object, where: str) -> object:
    """The value without the keys of its objects that are null, at every depth.

    Parquet and Arrow write null for a key that other rows have and this one does not, so that
    null and absent must be the same for the same rows to be the same from every kind of file.

    Raises:
        RowError: It is nested too deeply.
    """
    try:
        return _without_nulls(value)
    except RecursionError:
        raise RowError(where, "the row is nested too deeply") from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value
