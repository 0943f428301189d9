"""Whether a template writes all that a chat says: what it leaves out is lost without a word."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatrain_cli.data.chats import REASONING
from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.render import FAULTS, render, render_until
from megatrain_cli.errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# No prompt supplies more of an answer than this, in characters.
_MOST_SUPPLIED = 64


def said_by(message: Message) -> list[tuple[str, str]]:
    """The texts of an answer: its content, and its thoughts under the name that they have."""
    parts = [(name, message.get(name)) for name in ("content", *REASONING)]
    return [(name, part) for name, part in parts if isinstance(part, str)]


def left_out(row: Row, i: int, name: str) -> RowError:
    """The error for a part of an answer that a template does not write."""
    return RowError(
        row.where,
        f"turn {i + 1}: {name}: the chat template does not write it, or not all of it. Set "
        "`data.template` to one that does, give the turn in the way that this template expects, "
        "or leave such rows out.",
    )


def is_said(part: str, text: str, start: int, end: int) -> bool:
    """Whether a part, blanks apart, is in `text[start:end]`; its first words may be in the prompt.

    A server may supply the `<think>` that an answer opens with.
    """
    span = text[start:end]
    if part in span:
        return True
    wanted, said = _squeeze(part), _squeeze(span)
    if wanted in said:
        return True
    supplied = _squeeze(text[max(0, start - _MOST_SUPPLIED) : start])
    return any(
        supplied.endswith(wanted[:n]) and said.startswith(wanted[n:])
        for n in range(1, min(len(wanted), len(supplied)) + 1)
    )


def _squeeze(text: str) -> str:
    """A text without blanks: templates trim and indent."""
    return "".join(text.split())


def check_heard(row: Row, text: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a template that does not write a turn, a call, or the tools.

    Answers too, of which some are not learnt, or found without rendering.

    Args:
        row: As the template takes it.
        text: The whole chat, rendered.
        tokenizer: Has the template.

    Raises:
        RowError: One of them decides nothing in the text; names it.
    """
    for i, message in enumerate(row.messages):
        content = str(message["content"])
        if message["role"] == "assistant":
            _check_answered(row, i, text, tokenizer)
            continue
        if content.strip() in text:
            continue
        # Longer at one of its ends it must be another text, or the template leaves that end out.
        others = (
            [*row.messages[:i], {**message, "content": longer}, *row.messages[i + 1 :]]
            for longer in (f"x{content}", f"{content}x")
        )
        if any(_renders_as(text, other, row.tools, tokenizer) for other in others):
            raise RowError(
                row.where,
                f"turn {i + 1} ({message['role']}): the chat template does not write "
                "it, or not all of it. Set `data.template` to one that does, or leave such "
                "turns out.",
            )
    if row.tools and _renders_as(text, row.messages, (), tokenizer):
        raise RowError(
            row.where,
            "tools: the chat template does not write them. Set `data.template` to "
            "one that does, or leave the column out.",
        )


def _check_answered(row: Row, i: int, text: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """The same of an answer, in the chat up to it: it may be written in another way further on."""
    message = row.messages[i]
    unseen = [(name, part) for name, part in said_by(message) if part.strip() not in text]
    less = _with_less(message)
    if not unseen and not less:
        return
    after = render_until(row, i + 1, tokenizer)
    for name, part in unseen:
        if not is_said(part, after, 0, len(after)):
            raise left_out(row, i, name)
    for name, other in less:
        if _renders_as(after, [*row.messages[:i], other], row.tools, tokenizer):
            raise left_out(row, i, name)


def _with_less(message: Message) -> list[tuple[str, Message]]:
    """An answer without its thoughts, and without each of its calls; each with what is missing.

    Thoughts may be there under two names, of which a template reads one.
    """
    thoughts = [name for name in REASONING if message.get(name)]
    found = [
        (name, {key: part for key, part in message.items() if key not in thoughts})
        for name in thoughts[:1]
    ]
    given = message.get("tool_calls")
    calls = given if isinstance(given, list) else []
    silent = {key: part for key, part in message.items() if key != "tool_calls"}
    for n in range(len(calls)):
        left = [*calls[:n], *calls[n + 1 :]]
        found.append((f"tool_calls[{n + 1}]", {**silent, "tool_calls": left} if left else silent))
    return found


def _renders_as(
    text: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, object]],
    tokenizer: "PreTrainedTokenizerBase",
) -> bool:
    """Whether another chat gives the same text; one that is refused gives none."""
    try:
        return render(tokenizer, messages, tools) == text
    except FAULTS:
        return False
