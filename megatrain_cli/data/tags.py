"""Turns by a template's own generation tags, where these say what a turn is.

Nearly no template that comes with a model has the tags, and those that have them differ in
whether the header, the end mark and the line break behind it lie inside. What is learnt is the
same for all: the answer with its end mark. Tags are believed when there is one pair for each
assistant turn, with what the turn says inside and nothing of what was asked; otherwise the turns
are found by rendering, as without tags.
"""

import re
from typing import TYPE_CHECKING

from megatrain_cli.data.formats import Row
from megatrain_cli.data.marks import TurnMarks
from megatrain_cli.data.render import render_tagged, render_until, template_of
from megatrain_cli.data.said import is_said
from megatrain_cli.data.turns import Passage
from megatrain_cli.errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def find_by_tags(
    row: Row,
    text: str,
    turns: tuple[int, ...],
    marks: TurnMarks,
    tokenizer: "PreTrainedTokenizerBase",
) -> Passage | None:
    """The turns that are to be learnt, or None if the tags do not say where they are.

    Args:
        row: As the template takes it.
        text: The whole chat, rendered.
        turns: Places in `row.messages` of what is to be learnt.
        marks: Of the template.
        tokenizer: Has the template.
    """
    if not _GENERATION_TAG.search(template_of(tokenizer, row.tools)):
        return None
    tagged, found = render_tagged(tokenizer, row)
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    if tagged != text or len(found) != len(answers):
        return None
    spans = []
    for i, (start, stop) in zip(answers, found, strict=True):
        span = _trim(text, start, stop, marks)
        if span is None or not is_said(str(row.messages[i]["content"]), text, *span):
            return None
        if _holds_what_was_asked(row, i, text, span[0], tokenizer):
            return None
        if i in turns:
            spans.append(span)
    return Passage(text, tuple(spans))


def _holds_what_was_asked(
    row: Row, i: int, text: str, start: int, tokenizer: "PreTrainedTokenizerBase"
) -> bool:
    """Whether tags enclose a part of what a server would give, such as the question.

    Args:
        row: As the template takes it.
        i: Place of the answer.
        text: The whole chat, rendered.
        start: Where learning would begin.
        tokenizer: Has the template.
    """
    if not i:
        return False  # no template writes an empty chat
    try:
        given = render_until(row, i, tokenizer, generation_prompt=True)
    except RowError:
        return False  # the template does not write a chat without its answer
    return text.startswith(given) and start < len(given)


def _trim(text: str, start: int, stop: int, marks: TurnMarks) -> tuple[int, int] | None:
    """From behind the header to behind the end mark; None where no end mark is."""
    header = marks.prompt
    if header and text.startswith(header, start) and not text[:start].endswith(header):
        start += len(header)
    for token in dict.fromkeys((marks.token, marks.call_end)):
        bare = text[start:stop].rstrip()
        if bare.endswith(token):
            return start, start + len(bare)
        blanks = len(text[stop:]) - len(text[stop:].lstrip())
        if text.startswith(token, stop + blanks):
            return start, stop + blanks + len(token)
    return None
