"""What a row may look like, and what it says: a chat or a text.

    alpaca    instruction, output, and maybe input, system, history      -> a chat
    messages  messages or conversations: [{role, content}, ...]; tools   -> a chat
    text      text                                                       -> a text

For a field that may be left out, null, absent and "" are the same. A required one must be there.
"""

import json
from dataclasses import dataclass

from megatrain_cli.errors import DataError

Message = dict[str, object]

FORMATS = ("alpaca", "messages", "text")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# The columns that tell a format from the others.
_MARKS = {
    "instruction": "alpaca",
    "messages": "messages",
    "conversations": "messages",
    "text": "text",
}


@dataclass(frozen=True)
class Row:
    """One row of a file: a chat (`messages`), or a text (`text`).

    `messages` are what a chat template takes: role, content (always text, "" for none), and
    whatever else the file says of a turn, such as `tool_calls`.
    """

    where: str  # file:line
    format: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, object], ...] = ()
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    source: int = 0


def find_format(value: dict[str, object]) -> tuple[str, ...]:
    """The formats whose columns a row has; null counts as absent."""
    found = {name: None for mark, name in _MARKS.items() if value.get(mark) is not None}
    return tuple(found)


def parse_row(value: dict[str, object], row_format: str, where: str) -> Row:
    """Check one row and say what it holds.

    Raises:
        DataError: A required field is missing, or a field is of the wrong type.
    """
    if row_format == "text":
        return Row(where, row_format, text=_required_text(value, "text", where))
    if row_format == "alpaca":
        return Row(where, row_format, messages=_alpaca(value, where))
    return Row(where, row_format, messages=_messages(value, where), tools=_tools(value, where))


def _alpaca(value: dict[str, object], where: str) -> tuple[Message, ...]:
    """An instruction with its input below it, and what came before, as turns of a chat."""
    turns: list[Message] = []
    if system := _optional_text(value, "system", where):
        turns.append({"role": "system", "content": system})
    for number, pair in enumerate(_optional_list(value, "history", where), start=1):
        field = f"history[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{where}: {field}: a question and its answer are expected, as a list")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": check_text(text, field, where)})
    asked = _required_text(value, "instruction", where)
    if more := _optional_text(value, "input", where):
        asked = f"{asked}\n{more}"
    turns.append({"role": "user", "content": asked})
    turns.append({"role": "assistant", "content": _required_text(value, "output", where)})
    return tuple(turns)


def _messages(value: dict[str, object], where: str) -> tuple[Message, ...]:
    """The turns of a chat as the row has them: roles are read, never guessed from the order."""
    column = "messages" if value.get("messages") is not None else "conversations"
    if column == "messages" and value.get("conversations") is not None:
        raise DataError(f"{where}: messages and conversations are both there. Keep one of them.")
    turns = value.get(column)
    if turns is None:
        raise DataError(f"{where}: messages: the field is missing or null")
    if not isinstance(turns, list):
        raise DataError(f"{where}: {column}: {show_kind(turns)} where a list is expected")
    if not turns:
        raise DataError(f"{where}: {column}: the list is empty")
    return tuple(_turn(turn, f"{column}[{i}]", where) for i, turn in enumerate(turns, start=1))


def _turn(turn: object, field: str, where: str) -> Message:
    """One turn, with its content as text. Turns are counted from 1, as a reader would."""
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {field}: {show_kind(turn)} where an object is expected")
    if "role" not in turn and "from" in turn:
        raise DataError(
            f"{where}: {field}: the turn has `from` and `value` (sharegpt); this version reads "
            "`role` and `content`."
        )
    role = _required_text(turn, "role", where, field)
    if role not in ROLES:
        raise DataError(
            f"{where}: {field}.role: {role[:20]!r} is no role that is known: {', '.join(ROLES)}"
        )
    kept = {name: part for name, part in turn.items() if part is not None}
    # A template would write null as "None", and may fail on an absent content: only a turn that
    # calls tools may come without, and says "" then.
    if kept.get("tool_calls"):
        return {**kept, "role": role, "content": _optional_text(turn, "content", where, field)}
    return {**kept, "role": role, "content": _required_text(turn, "content", where, field)}


def _tools(value: dict[str, object], where: str) -> tuple[dict[str, object], ...]:
    """The tools a chat may call: a list of schemas, or that list as JSON text."""
    written = value.get("tools")
    if isinstance(written, str) and written:
        try:
            value = {"tools": json.loads(written)}
        except (ValueError, RecursionError):
            raise DataError(f"{where}: tools: the text is not JSON") from None
    tools: list[dict[str, object]] = []
    for tool in _optional_list(value, "tools", where):
        if not isinstance(tool, dict):
            raise DataError(f"{where}: tools: {show_kind(tool)} in the list, objects are expected")
        tools.append(tool)
    return tuple(tools)


def _optional_list(value: dict[str, object], name: str, where: str) -> list[object]:
    """A list that may be left out."""
    found = value.get(name)
    if found is None or found == "":
        return []
    if not isinstance(found, list):
        raise DataError(f"{where}: {name}: {show_kind(found)} where a list is expected")
    return found


def _required_text(value: dict[str, object], name: str, where: str, inside: str = "") -> str:
    field = f"{inside}.{name}" if inside else name
    if value.get(name) is None:
        state = "null" if name in value else "missing"
        raise DataError(f"{where}: {field}: the field is {state}, and text is required")
    return check_text(value[name], field, where)


def _optional_text(value: dict[str, object], name: str, where: str, inside: str = "") -> str:
    if value.get(name) is None:
        return ""
    return check_text(value[name], f"{inside}.{name}" if inside else name, where)


def check_text(text: object, field: str, where: str) -> str:
    """Text that can be tokenised.

    JSON can spell half of a surrogate pair (a text that was cut), which no tokenizer can read.
    """
    if not isinstance(text, str):
        raise DataError(f"{where}: {field}: {show_kind(text)} where text is expected")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: {field}: half of a surrogate pair, not a character") from None
    return text


def show_kind(value: object) -> str:
    """What a JSON value is, in words; never its content."""
    if value is None:
        return "null"
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return kinds.get(type(value), "a number")
