"""Where the assistant turns of a chat lie in its text.

[Note: where a turn begins and ends] A template is a program; its output has no marks. What the
model must learn of turn i is what a server would have it write: everything after the rendering
of the turns before i *with the generation prompt*, up to and including the mark that ends the
turn. Both places are found by rendering prefixes of the chat, never by searching its text, and
are verified: each rendering must be a prefix of the next.

[Note: templates that rewrite] Some write a turn in another way once the chat goes on: they drop
the reasoning of earlier turns, move the system text, or end the last turn with another mark. Then
no single text holds every turn as a server would have it written. Such a chat becomes several
texts: each turn is learnt in the longest text in which it, and all before it, stand as when it
was written. What cannot be verified for its own turn is refused: a guess would train on
something else, silently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from megatrain_cli.data.chats import REASONING
from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.marks import TurnMarks
from megatrain_cli.data.render import FAULTS, render, render_until
from megatrain_cli.errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# No prompt supplies more of an answer than this, in characters.
_MOST_SUPPLIED = 64


@dataclass(frozen=True)
class Passage:
    """A text, and the parts of it that are learnt.

    Attributes:
        spans: Start and stop of each, in characters, in order, none overlapping.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Turn:
    """An assistant turn in the chat up to it: `text[start:end]` is learnt."""

    text: str
    start: int
    end: int

    def stands_in(self, text: str) -> bool:
        """Whether a text begins as this turn's does, up to the turn's end."""
        return text.startswith(self.text[: self.end])


def find_passages(
    row: Row,
    text: str,
    turns: tuple[int, ...],
    marks: TurnMarks,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[Passage]:
    """Texts in which each of the turns is learnt once, in the order of their last turns.

    Args:
        row: As the template takes it; see `given.py`.
        text: The whole chat, rendered.
        turns: Places in `row.messages` of what is to be learnt.
        marks: Of the template.
        tokenizer: Has the template.

    Returns:
        One text, the whole chat, for nearly every template; see [Note: templates that rewrite].

    Raises:
        RowError: Where a turn begins or ends cannot be told, or the template leaves out a part
            of it.
    """
    found = [_find_turn(row, i, text, marks, tokenizer) for i in turns]
    passages = []
    shown, left = text, found
    while left:
        inside = [turn for turn in left if turn.stands_in(shown)]
        if inside:
            _check_order(inside, row)
            passages.append(Passage(shown, tuple((t.start, t.end) for t in inside)))
        left = [turn for turn in left if turn not in inside]
        # A turn stands in its own text, so each round takes one at least.
        shown = left[-1].text if left else ""
    return sorted(passages, key=lambda passage: len(passage.text))


def _find_turn(
    row: Row, i: int, text: str, marks: TurnMarks, tokenizer: "PreTrainedTokenizerBase"
) -> _Turn:
    after = render_until(row, i + 1, tokenizer) if i + 1 < len(row.messages) else text
    start = _start_of(row, i, after, marks, tokenizer)
    end, rest = marks.end, marks.rest
    if row.messages[i].get("tool_calls") and not after.endswith(end + rest):
        end, rest = marks.call_end, marks.call_rest
    if not after.endswith(end + rest):
        raise RowError(
            row.where,
            f"turn {i + 1}: the chat template ends this turn in another way than "
            f"an ordinary answer ({marks.end.strip()!r}), so where it ends cannot be told.",
        )
    # What follows the end mark may differ (some templates close the whole chat there).
    turn = _Turn(after, start, len(after) - len(rest))
    if turn.end - len(end) < start:
        raise _not_preserving(row, i)
    _check_said(row, i, turn, tokenizer)
    return turn


def _start_of(
    row: Row, i: int, after: str, marks: TurnMarks, tokenizer: "PreTrainedTokenizerBase"
) -> int:
    """Behind the longest prompt that a server can give and that this turn goes on from.

    Reasoning models are asked with or without an opened or closed `<think>`: what the prompt
    holds is never learnt.
    """
    if i == 0:
        heads = marks.heads  # no template writes an empty chat
    else:
        heads = tuple(
            render_until(row, i, tokenizer, generation_prompt=True, **flags)
            for flags in marks.flags
        )
    fitting = [len(head) for head in heads if after.startswith(head)]
    if not fitting:
        raise _not_preserving(row, i)
    return max(fitting)


def _check_said(row: Row, i: int, turn: _Turn, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a template that leaves out a part of what the turn says, blanks apart."""
    message = row.messages[i]
    for name in ("content", *REASONING):
        part = message.get(name)
        if isinstance(part, str) and not is_said(part, turn.text, turn.start, turn.end):
            raise RowError(
                row.where,
                f"turn {i + 1}: {name}: the chat template leaves a part of it out, "
                "so it would not be learnt. Set `data.template` to one that writes it, or give "
                "the turn in the way that this template expects.",
            )
    given = message.get("tool_calls")
    calls = given if isinstance(given, list) else []
    silent = {name: part for name, part in message.items() if name != "tool_calls"}
    for n in range(len(calls)):
        left = [*calls[:n], *calls[n + 1 :]]
        other = {**silent, "tool_calls": left} if left else silent
        if _renders_as(turn.text, [*row.messages[:i], other], row.tools, tokenizer):
            raise RowError(
                row.where,
                f"turn {i + 1}: tool_calls[{n + 1}]: the chat template does not write it. "
                "Set `data.template` to one that does, or leave such rows out.",
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
    """Refuse a template that does not write a question, a system text, a result, or the tools.

    Args:
        row: As the template takes it.
        text: The whole chat, rendered.
        tokenizer: Has the template.

    Raises:
        RowError: One of them decides nothing in the text; names it.
    """
    for i, message in enumerate(row.messages):
        content = str(message["content"])
        if message["role"] == "assistant" or content.strip() in text:
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


def _check_order(turns: list[_Turn], row: Row) -> None:
    if any(second.start < first.end for first, second in pairwise(turns)):
        raise RowError(
            row.where,
            "the chat template writes two answers at one place, so what the model "
            "should learn cannot be told.",
        )


def _not_preserving(row: Row, i: int) -> RowError:
    return RowError(
        row.where,
        f"turn {i + 1}: the chat template is not prefix-preserving: the prompt that "
        "it writes for this turn does not go on in the turn itself, so what the model should "
        "learn cannot be told. Set `data.template` to another one, or leave such rows out.",
    )
