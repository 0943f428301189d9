"""The fields of one row under our names, whatever its file calls them; each read is checked.

Null, absent and "" are the same for a field that may be left out. A list may be written as JSON
text: a CSV file has no other way, and many Parquet files do it.
"""

import math
from collections.abc import Iterable, Mapping

from megatrain_cli.data.strict_json import drop_nulls, parse_json
from megatrain_cli.errors import RowError

# Other names under which files have a field. A mapped column takes their place.
_NAMES = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt", "query"),
    "completion": ("completion", "response"),
}


class Fields:
    """Reads one object.

    Messages name the file's own column, and never show what is in it.
    """

    def __init__(
        self,
        value: Mapping[str, object],
        where: str,
        columns: Mapping[str, str | None] | None = None,
        inside: str = "",
    ) -> None:
        """Look at `value`.

        Args:
            value: The object as it was read.
            where: Its file and line or row.
            columns: Our field -> the column that has it; None for a field not to be read.
            inside: The field that the object is a part of, such as `messages[2]`.
        """
        self.where = where
        self._value = value
        self._columns = columns or {}
        self._inside = inside

    def get(self, field: str) -> object:
        """What stands there; None for null and absent.

        Raises:
            RowError: The field is there under two names.
        """
        found = [name for name in self._names(field) if self._value.get(name) is not None]
        if len(found) > 1:
            raise RowError(self.where, f"{' and '.join(found)} are both there. Keep one of them.")
        return self._value[found[0]] if found else None

    def has(self, field: str) -> bool:
        """Whether a column of the field is there and not null."""
        return any(self._value.get(name) is not None for name in self._names(field))

    def shown(self, field: str) -> str:
        """The field as its file calls it, for messages."""
        names = self._names(field) or (field,)
        name = next((name for name in names if name in self._value), names[0])
        return f"{self._inside}.{name}" if self._inside else name

    def refuse(self, field: str, reason: str) -> RowError:
        """The error to raise for a field."""
        return RowError(self.where, f"{self.shown(field)}: {reason}")

    def text(self, field: str) -> str:
        """A text that must be there; it may be empty.

        Raises:
            RowError: It is missing, null, or no text.
        """
        found = self.get(field)
        if found is None:
            raise self._missing(field, "text")
        return check_text(found, self.shown(field), self.where)

    def optional_text(self, field: str) -> str:
        """A text that may be left out; "" then."""
        found = self.get(field)
        return "" if found is None else check_text(found, self.shown(field), self.where)

    def items(self, field: str) -> list[object]:
        """A list that must be there.

        Raises:
            RowError: It is missing, null, empty, or no list.
        """
        if self.get(field) is None:
            raise self._missing(field, "a list")
        found = self.optional_items(field)
        if not found:
            raise self.refuse(field, "the list is empty")
        return found

    def optional_items(self, field: str) -> list[object]:
        """A list that may be left out, or the JSON text of one; without nulls in its objects."""
        found = self.get(field)
        if isinstance(found, str):
            if not found.strip():
                return []
            try:
                found = parse_json(found.strip(), self.where)
            except RowError as error:
                raise self.refuse(
                    field, f"text where a list is expected; it is not JSON either: {error.reason}"
                ) from None
        if found is None:
            return []
        if not isinstance(found, list):
            raise self.refuse(field, f"{show_kind(found)} where a list is expected")
        cleaned = drop_nulls(found, self.where)
        assert isinstance(cleaned, list)
        return cleaned

    def _names(self, field: str) -> tuple[str, ...]:
        if field in self._columns:
            column = self._columns[field]
            return () if column is None else (column,)
        return _NAMES.get(field, (field,))

    def _missing(self, field: str, kind: str) -> RowError:
        reason = f"the field is missing or null, and {kind} is required"
        near = nearly(self._names(field), self._value)
        if near is not None:
            reason += f". {near} is there: names must be the same to the letter"
        return self.refuse(field, reason)


def nearly(names: Iterable[str], found: Iterable[object]) -> str | None:
    """What is found in another spelling than the names: other case, or blanks around it."""
    wanted = {name.casefold() for name in names}
    near = (name for name in found if isinstance(name, str) and name.strip().casefold() in wanted)
    return next((repr(name) for name in near if name not in names), None)


def check_text(text: object, field: str, where: str) -> str:
    """Text that can be tokenised.

    JSON can spell half of a surrogate pair (a text that was cut), which no tokenizer can read.

    Raises:
        RowError: It is no text, or such a half.
    """
    if not isinstance(text, str):
        raise RowError(where, f"{field}: {show_kind(text)} where text is expected")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(where, f"{field}: half of a surrogate pair, not a character") from None
    return text


def check_finite(value: object, field: str, where: str) -> None:
    """Refuse NaN and infinity at any depth: JSON has neither, so nobody can read what is written.

    Raises:
        RowError: There is one.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(where, f"{field}: a number that is not finite, which JSON does not have")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        check_finite(part, field, where)


def show_kind(value: object) -> str:
    """What a value is, in words; never its content."""
    if value is None:
        return "null"
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        bytes: "bytes",
    }
    return kinds.get(type(value), "a value that is neither text, number, list nor object")
