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

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from megatrain_cli.data.formats import Row
from megatrain_cli.data.marks import TurnMarks
from megatrain_cli.data.render import render_until
from megatrain_cli.data.said import is_said, left_out, said_by
from megatrain_cli.errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    _check_said(row, i, turn)
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


def _check_said(row: Row, i: int, turn: _Turn) -> None:
    """Refuse a template that leaves out a part of what the turn says, blanks apart."""
    for name, part in said_by(row.messages[i]):
        if not is_said(part, turn.text, turn.start, turn.end):
            raise left_out(row, i, name)


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
