"""Chats as files have them, brought to one form: turns of role and content.

Roles are read, never guessed from the order of turns, and any order is taken: whether it can be
written is for the chat template to say.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatrain_cli.data.fields import Fields, check_finite, check_text, show_kind
from megatrain_cli.data.strict_json import drop_nulls, parse_json
from megatrain_cli.data.unread import refuse_columns, refuse_keys
from megatrain_cli.errors import RowError

Message = dict[str, object]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TAGS = (*ROLES, "observation", "function_call")
"""What `tags` may name: roles, and the two that only sharegpt has."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""What files call the thoughts before an answer."""

# What says whether a turn is learnt, by the tools whose files have it: ours, ms-swift's, axolotl's,
# OpenAI's. A mark that is not known would be passed over, and what it forbids be learnt.
_TRAIN = ("train", "loss", "training", "weight")

# sharegpt's names of roles. Its `function_call` is an assistant turn that only calls tools.
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_call": "function_call",
}
_OPENAI = {role: role for role in ROLES}


@dataclass(frozen=True)
class Chat:
    """The turns of a chat, and the schemas of the tools it may call.

    Attributes:
        roles: As the file names them.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, object], ...] = ()
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Spelling:
    """How a file writes turns: its keys of a turn, and its name of a role -> the role."""

    role: str
    content: str
    roles: Mapping[str, str]


def read_alpaca(fields: Fields, _columns: Mapping[str, str | None], _tags: object) -> Chat:
    """An instruction with its input below it, and what came before, as turns of a chat."""
    turns: list[Message] = []
    shown = fields.shown("history")
    for number, pair in enumerate(fields.optional_items("history"), start=1):
        place = f"{shown}[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(
                fields.where, f"{place}: a question and its answer are expected, as a list"
            )
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": check_text(text, place, fields.where)})
    asked = [fields.text("instruction"), fields.optional_text("input")]
    turns.append({"role": "user", "content": "\n".join(part for part in asked if part)})
    turns.append({"role": "assistant", "content": fields.text("output")})
    return _chat(fields, turns)


def read_messages(
    fields: Fields, columns: Mapping[str, str | None], tags: Mapping[str, str]
) -> Chat:
    """OpenAI's form: turns of `role` and `content`."""
    return _chat(fields, *_turns(fields, "messages", _openai(columns, tags)))


def read_sharegpt(
    fields: Fields, columns: Mapping[str, str | None], tags: Mapping[str, str]
) -> Chat:
    """ShareGPT's form: turns of `from` and `value`, with roles of its own."""
    spelling = _spelling(columns, tags, "from", "value", _SHAREGPT)
    return _chat(fields, *_turns(fields, "messages", spelling))


def read_pair(fields: Fields, columns: Mapping[str, str | None], tags: Mapping[str, str]) -> Chat:
    """A prompt and what is to follow it, each a text or messages.

    Only the completion is learnt: assistant turns of the prompt are marked so.
    """
    spelling = _openai(columns, tags)
    turns: list[Message] = []
    roles: set[str] = set()
    for field, role in (("prompt", "user"), ("completion", "assistant")):
        if _is_list(fields.get(field)):
            found, named = _turns(fields, field, spelling)
            roles |= named
        else:
            found = [{"role": role, "content": fields.text(field)}]
        if field == "prompt":
            found = [
                {**turn, "train": False} if turn["role"] == "assistant" else turn for turn in found
            ]
        turns += found
    return _chat(fields, turns, roles)


def new_names(row_format: str, tags: Mapping[str, str]) -> dict[str, str]:
    """Of the file's names for roles those that mean something else without `tags` -> the role.

    Args:
        row_format: Of its rows.
        tags: Our role -> the file's name for it.
    """
    known = _SHAREGPT if row_format == "sharegpt" else _OPENAI
    named = _as_read(tags)
    return {tag: ours for ours, tag in tags.items() if known.get(tag) != named[tag]}


def _is_list(value: object) -> bool:
    """A list, or the JSON text of a list of objects; a prompt may well begin with a bracket."""
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = parse_json(value.strip(), "")
        except RowError:
            return False
        return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)
    return isinstance(value, list)


def _chat(fields: Fields, turns: list[Message], roles: Collection[str] = ()) -> Chat:
    """The turns behind the row's own system text, and its tools."""
    refuse_columns(fields)
    if system := fields.optional_text("system"):
        if any(turn["role"] == "system" for turn in turns):
            raise fields.refuse("system", "a system turn is there too. Keep one of them.")
        turns = [{"role": "system", "content": system}, *turns]
    tools: list[dict[str, object]] = []
    for tool in fields.optional_items("tools"):
        if not isinstance(tool, dict):
            raise fields.refuse("tools", f"{show_kind(tool)} in the list, objects are expected")
        check_finite(tool, fields.shown("tools"), fields.where)
        tools.append(tool)
    return Chat(tuple(turns), tuple(tools), frozenset(roles))


def _openai(columns: Mapping[str, str | None], tags: Mapping[str, str]) -> _Spelling:
    return _spelling(columns, tags, "role", "content", _OPENAI)


def _spelling(
    columns: Mapping[str, str | None],
    tags: Mapping[str, str],
    role: str,
    content: str,
    roles: Mapping[str, str],
) -> _Spelling:
    return _Spelling(
        columns.get("messages.role") or role,
        columns.get("messages.content") or content,
        {**roles, **_as_read(tags)},
    )


def _as_read(tags: Mapping[str, str]) -> dict[str, str]:
    """The file's name for a role -> the role as it is read."""
    return {tag: "tool" if ours == "observation" else ours for ours, tag in tags.items()}


def _turns(fields: Fields, field: str, spelling: _Spelling) -> tuple[list[Message], set[str]]:
    """The turns of a list, and their roles as the file names them."""
    shown = fields.shown(field)
    turns, roles = [], set()
    for number, turn in enumerate(fields.items(field), start=1):
        message, role = _turn(turn, f"{shown}[{number}]", fields.where, spelling)
        turns.append(message)
        roles.add(role)
    return turns, roles


def _turn(turn: object, place: str, where: str, spelling: _Spelling) -> tuple[Message, str]:
    """One turn, with its content as text, and its role as the file names it.

    Turns are counted from 1, as a reader would.
    """
    if not isinstance(turn, dict):
        raise RowError(where, f"{place}: {show_kind(turn)} where an object is expected")
    parts = Fields(turn, where, {"role": spelling.role, "content": spelling.content}, place)
    _refuse_other_keys(turn, place, where, spelling)
    turn = {**turn, spelling.content: _one_text(parts)}
    parts = Fields(turn, where, {"role": spelling.role, "content": spelling.content}, place)
    refuse_keys(turn, parts)
    for name in REASONING:
        if name in turn:
            parts.optional_text(name)
    name = parts.text("role")
    role = spelling.roles.get(name)
    if role is None:
        raise parts.refuse(
            "role",
            f"{name[:20]!r} is no role that is known: {', '.join(spelling.roles)}. Name other ones "
            "in `tags` of the source.",
        )
    kept: Message = {k: v for k, v in turn.items() if k not in (spelling.role, spelling.content)}
    if role == "function_call":
        calls = _calls(parts)
        message = {**kept, "role": "assistant", "content": "", "tool_calls": calls}
    elif kept.get("tool_calls"):
        # A template would write null as "None", and may fail on an absent content: only a turn
        # that calls tools may come without, and says "" then.
        check_finite(kept["tool_calls"], f"{place}.tool_calls", where)
        message = {**kept, "role": role, "content": parts.optional_text("content")}
    else:
        message = {**kept, "role": role, "content": parts.text("content")}
    return _with_train(message, place, where), name


def _one_text(parts: Fields) -> object:
    """The content; of a list with one part of text that text, as OpenAI's form has it.

    Raises:
        RowError: There are several parts: whether a template divides them cannot be told. Or one
            of them is no text.
    """
    content = parts.get("content")
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    if kinds == ["text"]:
        return content[0].get("text")
    if kinds and set(kinds) == {"text"}:
        raise parts.refuse("content", f"{len(kinds)} parts of text; join them to one")
    raise parts.refuse("content", "a list where text, or a list of one part of text, is expected")


def _refuse_other_keys(
    turn: dict[str, object], place: str, where: str, spelling: _Spelling
) -> None:
    """Say it where the turns are of the other of the two forms."""
    for role, content, name in (("from", "value", "sharegpt"), ("role", "content", "messages")):
        if role in turn and role != spelling.role and spelling.role not in turn:
            raise RowError(
                where,
                f"{place}: the turn has `{role}`, not `{spelling.role}`. Set `format: {name}`, or "
                f"name its keys in `columns` (messages.role: {role}, messages.content: {content}).",
            )


def _with_train(message: Message, place: str, where: str) -> Message:
    """`train` as a bool, whatever the file calls it."""
    said = {name: message.pop(name) for name in _TRAIN if name in message}
    is_answer = message["role"] == "assistant"
    read: dict[str, bool] = {}
    for name, train in said.items():
        if name == "weight":
            if isinstance(train, bool) or train not in (0, 1):
                raise RowError(where, f"{place}.weight: neither 0 nor 1")
            if is_answer:
                read[name] = train == 1
            continue
        if not isinstance(train, bool):
            kind = show_kind(train)
            raise RowError(where, f"{place}.{name}: {kind} where true or false is expected")
        if train and not is_answer:
            raise RowError(where, f"{place}.{name}: true on a turn that is not the assistant's")
        read[name] = train
    if len(set(read.values())) > 1:
        raise RowError(where, f"{place}: {' and '.join(read)} say the opposite. Keep one of them.")
    return {**message, "train": next(iter(read.values()))} if read else message


def _calls(parts: Fields) -> list[object]:
    """The calls of a `function_call` turn, JSON text: one {name, arguments}, or a list of them."""
    shown = parts.shown("content")
    try:
        written = drop_nulls(parse_json(parts.text("content").strip(), parts.where), parts.where)
    except RowError as error:
        raise parts.refuse(
            "content", f"a call of a tool as JSON is expected: {error.reason}"
        ) from None
    calls = written if isinstance(written, list) else [written]
    made: list[object] = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise RowError(parts.where, f"{shown}: a call is an object with name and arguments")
        function = {"name": call["name"], "arguments": call.get("arguments", {})}
        made.append({"type": "function", "function": function})
    if not made:
        raise RowError(parts.where, f"{shown}: the list of calls is empty")
    return made
