"""What a template is given of a row: the messages without what is said to us alone.

- `train` says whether a turn is learnt; a template does not see it.
- An answer that already ends in the end-of-turn token (texts that were written for another
  program often do) is given without, because the template writes one.
- The arguments of a call are an object. Files in the style of OpenAI have them as JSON text, and
  most templates would write that text as one long quoted string; servers read it first, too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatrain_cli.data.fields import check_finite, show_kind
from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.strict_json import parse_json
from megatrain_cli.errors import RowError


@dataclass(frozen=True)
class Given:
    """A row as a template takes it.

    Attributes:
        row: Without `train`, and with arguments as objects.
        taught: Places in `row.messages` of the assistant turns to learn.
        muted: Of those that are not to be learnt, by `train: false`.
    """

    row: Row
    taught: tuple[int, ...]
    muted: tuple[int, ...]


def prepare(row: Row, token: str) -> Given:
    """Take out what a template must not see.

    Args:
        row: As it was read.
        token: The template's end-of-turn token.

    Raises:
        RowError: The arguments of a call are no object.
    """
    messages = []
    for number, message in enumerate(row.messages, start=1):
        kept = {name: value for name, value in message.items() if name != "train"}
        if message["role"] == "assistant" and str(message["content"]).rstrip().endswith(token):
            kept["content"] = without_end(str(message["content"]), token)
        messages.append(_with_arguments(kept, _read_arguments, row.where, f"turn {number}"))
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    muted = tuple(i for i in answers if row.messages[i].get("train") is False)
    taught = tuple(i for i in answers if i not in muted)
    return Given(replace(row, messages=tuple(messages)), taught, muted)


def without_end(text: str, token: str) -> str:
    """A text without the end marks that it ends in, and without the blanks behind these."""
    while (bare := text.rstrip()).endswith(token):
        text = bare[: -len(token)]
    return text


def with_text_arguments(row: Row) -> Row:
    """The same row with arguments as JSON text, for a template that joins them to other text."""

    def as_text(value: object, _where: str, _field: str) -> object:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    turns = tuple(_with_arguments(m, as_text, row.where, "") for m in row.messages)
    return replace(row, messages=turns)


def _with_arguments(
    message: Message, change: Callable[[object, str, str], object], where: str, turn: str
) -> Message:
    """A message with the arguments of its calls changed: of `{arguments}` or `{function: ...}`.

    Args:
        message: As it is; not changed itself.
        change: Gets the arguments, file and line, and the field.
        where: For messages: file and line.
        turn: For messages: which turn it is.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise RowError(where, f"{turn}: tool_calls: a list is expected")
    changed: list[object] = []
    for number, call in enumerate(calls, start=1):
        field = f"{turn}: tool_calls[{number}]"
        if not isinstance(call, dict):
            raise RowError(where, f"{field}: an object is expected")
        inner = call.get("function")
        holder = inner if isinstance(inner, dict) else call
        if "arguments" in holder:
            arguments = change(holder["arguments"], where, f"{field}.arguments")
            holder = {**holder, "arguments": arguments}
        changed.append({**call, "function": holder} if isinstance(inner, dict) else holder)
    return {**message, "tool_calls": changed}


def _read_arguments(value: object, where: str, field: str) -> object:
    """Arguments as an object.

    Raises:
        RowError: They are no object, or text that is no JSON object.
    """
    if not isinstance(value, str):
        if not isinstance(value, dict):
            raise RowError(where, f"{field}: {show_kind(value)} where an object is expected")
        return value
    try:
        read = parse_json(value.strip(), where) if value.strip() else {}
    except RowError as error:
        raise RowError(where, f"{field}: {error.reason}") from None
    check_finite(read, field, where)
    if not isinstance(read, dict):
        raise RowError(where, f"{field}: the JSON text is not an object")
    return read
