"""What a row may look like, and what it says: a chat, a text, or tokens.

    alpaca             instruction, output, and maybe input, history; system,
                       tools                                                    -> a chat
    sharegpt           conversations: [{from, value}, ...]; system, tools       -> a chat
    messages           messages: [{role, content}, ...]; system, tools          -> a chat
    prompt_completion  prompt and completion (query and response), each a text
                       or messages; system, tools                               -> a chat
    text               text                                                     -> a text
    tokenized          input_ids, and maybe labels                              -> tokens

For a field that may be left out, null, absent and "" are the same. A required one must be there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatrain_cli.data.chats import (
    Chat,
    Message,
    read_alpaca,
    read_messages,
    read_pair,
    read_sharegpt,
)
from megatrain_cli.data.fields import Fields, check_text
from megatrain_cli.data.tokens import read_tokens
from megatrain_cli.errors import RowError

__all__ = [
    "FIELDS",
    "FORMATS",
    "Message",
    "Reading",
    "Row",
    "check_text",
    "find_format",
    "parse_row",
]

_CHATS: dict[str, Callable[[Fields, Mapping[str, str | None], Mapping[str, str]], Chat]] = {
    "alpaca": read_alpaca,
    "sharegpt": read_sharegpt,
    "messages": read_messages,
    "prompt_completion": read_pair,
}
FORMATS = (*_CHATS, "text", "tokenized")

FIELDS: dict[str, tuple[str, ...]] = {
    "alpaca": ("instruction", "output", "input", "history", "system", "tools"),
    "sharegpt": ("messages", "system", "tools"),
    "messages": ("messages", "system", "tools"),
    "prompt_completion": ("prompt", "completion", "system", "tools"),
    "text": ("text",),
    "tokenized": ("input_ids", "labels", "attention_mask", "position_ids"),
}
"""Format -> the fields that are read of its rows."""


@dataclass(frozen=True)
class Row:
    """One row of a file: a chat (`messages`), a text (`text`), or tokens (`input_ids`).

    `messages` are what a chat template takes: role, content (always text, "" for none), and
    whatever else the file says of a turn, such as `tool_calls`. A turn may have `train`, a bool:
    whether it is learnt; only an assistant turn may have true.

    Attributes:
        where: The file, and the line or row of it, counted from 1.
        labels: As long as `input_ids`: -100, or the token's own id; not shifted.
        source: Index of its source among those of the config.
        roles: Of its turns, as the file names them.
    """

    where: str
    format: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, object], ...] = ()
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    source: int = 0
    roles: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Reading:
    """How the rows of a source are to be understood.

    Attributes:
        columns: Our field -> the column that has it; None for a field not to be read. A part of a
            turn is dotted: `messages.role`.
        tags: Our role -> the file's name for it.
    """

    columns: Mapping[str, str | None] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def find_format(
    value: Mapping[str, object], where: str = "", reading: Reading | None = None
) -> tuple[str, ...]:
    """The formats whose columns a row has.

    Null counts as absent. So does an empty text where another format's column is not empty: a CSV
    file can say it in no other way.
    """
    reading = reading or Reading()
    fields = Fields(value, where, reading.columns)
    found = {
        "alpaca": ("instruction",) if fields.has("instruction") else (),
        "chat": ("messages",) if fields.has("messages") else (),
        "prompt_completion": ("prompt", "completion")
        if fields.has("prompt") and fields.has("completion")
        else (),
        "text": ("text",) if fields.has("text") else (),
        "tokenized": ("input_ids",) if fields.has("input_ids") else (),
    }
    there = [name for name, marks in found.items() if marks]
    if len(there) > 1:
        full = [name for name in there if all(fields.get(mark) != "" for mark in found[name])]
        there = full or there
    return tuple(_kind_of_chat(fields, reading) if name == "chat" else name for name in there)


def _kind_of_chat(fields: Fields, reading: Reading) -> str:
    """`sharegpt` where the first turn says `from`, otherwise `messages`."""
    if "messages.role" in reading.columns:
        return "messages"
    try:
        first = fields.optional_items("messages")[:1]
    except RowError:
        return "messages"  # which says what is wrong
    turn = first[0] if first else None
    return "sharegpt" if isinstance(turn, dict) and "from" in turn else "messages"


def parse_row(
    value: Mapping[str, object],
    row_format: str,
    where: str,
    reading: Reading | None = None,
    source: int = 0,
) -> Row:
    """Check one row and say what it holds.

    Raises:
        RowError: A required field is missing, or a field is of the wrong type.
    """
    reading = reading or Reading()
    fields = Fields(value, where, reading.columns)
    if row_format == "text":
        return Row(where, row_format, text=fields.text("text"), source=source)
    if row_format == "tokenized":
        input_ids, labels = read_tokens(fields)
        return Row(where, row_format, input_ids=input_ids, labels=labels, source=source)
    chat = _CHATS[row_format](fields, reading.columns, reading.tags)
    return Row(
        where,
        row_format,
        messages=chat.messages,
        tools=chat.tools,
        source=source,
        roles=chat.roles,
    )
