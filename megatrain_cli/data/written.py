"""A row as text, and which parts of it are learnt: a chat, a text, or a prompt and what follows.

A model that has no chat template can be given prompts and completions: the prompt is written as
it is, what follows is learnt and closed with the end-of-text token.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from megatrain_cli.data.formats import Row
from megatrain_cli.data.given import prepare, with_text_arguments, without_end
from megatrain_cli.data.marks import TurnMarks, find_turn_marks
from megatrain_cli.data.render import FAULTS, render, render_chat
from megatrain_cli.data.said import check_heard
from megatrain_cli.data.tags import find_by_tags
from megatrain_cli.data.tokenise import IGNORED, CutText, CutTokens, tokenise
from megatrain_cli.data.turns import Passage, find_passages
from megatrain_cli.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Written:
    """A text to tokenise.

    Attributes:
        text: Cut where learning begins and ends.
        learnt: For each piece between the cuts, whether it is learnt.
        start: Ids before those of the text: a start token.
        end: Ids behind: an end-of-text token, learnt.
    """

    text: CutText
    learnt: tuple[bool, ...]
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def label(self, tokens: CutTokens) -> tuple[list[int], list[int]]:
        """Ids and labels, both `(length,)`."""
        ids = tokens.input_ids
        labels = [IGNORED] * len(ids)
        edges = pairwise([0, *tokens.places, len(ids)])
        for (first, last), learnt in zip(edges, self.learnt, strict=True):
            if learnt:
                labels[first:last] = ids[first:last]
        before = list(self.start) if self.learnt[0] else [IGNORED] * len(self.start)
        return [*self.start, *ids, *self.end], [*before, *labels, *self.end]


def write(
    row: Row, tokenizer: "PreTrainedTokenizerBase", *, train_on_prompt: bool
) -> list[Written]:
    """A row's text; several for a chat whose template rewrites earlier turns.

    Raises:
        DataError: The tokenizer has no template, or one of no use.
        RowError: The row cannot be written.
    """
    if row.text is not None:
        return [_plain(row, [row.text], (True,), tokenizer)]
    if tokenizer.chat_template is None:
        return [_completion(row, tokenizer, train_on_prompt)]
    try:
        marks = find_turn_marks(tokenizer)
    except DataError:
        render_chat(row, tokenizer)  # what is wrong with this very chat is said first
        raise
    given = prepare(row, marks.token)
    chat, text = _render_somehow(given.row, tokenizer)
    check_heard(chat, text, tokenizer)
    if train_on_prompt and not given.muted:
        return [_cut(row, Passage(text, ((0, len(text)),)), invert=False)]
    wanted = given.muted if train_on_prompt else given.taught
    passages = _find(chat, text, wanted, marks, tokenizer)
    if train_on_prompt and (len(passages) > 1 or passages[0].text != text):
        raise RowError(
            row.where,
            "`train: false` and data.train_on_prompt cannot both be kept: the chat template "
            "writes earlier turns in another way once the chat goes on. Leave one of them out.",
        )
    return [_cut(row, passage, invert=train_on_prompt) for passage in passages]


def _find(
    chat: Row,
    text: str,
    wanted: tuple[int, ...],
    marks: TurnMarks,
    tokenizer: "PreTrainedTokenizerBase",
) -> list[Passage]:
    tagged = find_by_tags(chat, text, wanted, marks, tokenizer)
    return [tagged] if tagged is not None else find_passages(chat, text, wanted, marks, tokenizer)


def _render_somehow(row: Row, tokenizer: "PreTrainedTokenizerBase") -> tuple[Row, str]:
    """A chat as the template takes it: some join the arguments of calls to other text."""
    if any(message.get("tool_calls") for message in row.messages):
        for way in (row, with_text_arguments(row)):
            with suppress(*FAULTS):  # if neither way works, the reason is told below
                render(tokenizer, way.messages, way.tools)
                return way, render_chat(way, tokenizer)
    return row, render_chat(row, tokenizer)


def _cut(row: Row, passage: Passage, *, invert: bool) -> Written:
    """What lies in the spans is learnt, or with `invert` what lies outside."""
    cuts: list[int] = [at for span in passage.spans for at in span]
    pieces = tuple((number % 2 == 1) != invert for number in range(len(cuts) + 1))
    return Written(CutText(row.where, passage.text, tuple(cuts)), pieces)


def _completion(row: Row, tokenizer: "PreTrainedTokenizerBase", train_on_prompt: bool) -> Written:
    """A prompt and what follows it, as plain text."""
    roles = [message["role"] for message in row.messages]
    if row.format != "prompt_completion" or roles != ["user", "assistant"] or row.tools:
        raise DataError(
            f"{row.where}: the tokenizer has no chat template, so {row.format} rows cannot be "
            "written as tokens. Set `data.template` to chatml or another one that the model's "
            "tokens allow, use an instruction-tuned model, or give the rows as text or as "
            "prompt and completion."
        )
    prompt, completion = (str(message["content"]) for message in row.messages)
    return _plain(row, [prompt, completion], (train_on_prompt, True), tokenizer)


def _plain(
    row: Row, parts: list[str], learnt: tuple[bool, ...], tokenizer: "PreTrainedTokenizerBase"
) -> Written:
    """Parts of a text with the tokenizer's own start token, if it writes one, and one end token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"{row.where}: the tokenizer has no eos_token, so nothing can mark the end of a text. "
            "Name one in its tokenizer_config.json."
        )
    parts[-1] = without_end(parts[-1], str(tokenizer.eos_token))
    text = "".join(parts)
    start = start_of(tokenizer)
    if start == (tokenizer.bos_token_id,) and text.startswith(str(tokenizer.bos_token)):
        start = ()  # the text writes it itself
    cuts = (len(parts[0]),) if len(parts) == 2 else ()
    return Written(CutText(row.where, text, cuts), learnt, start, (int(end),))


@lru_cache(maxsize=4)
def start_of(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """What the tokenizer writes before every text by itself."""
    (bare,) = tokenise(tokenizer, ["x"])
    whole: list[int] = tokenizer("x")["input_ids"]
    return tuple(whole[: next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)])
