"""One row as token ids and labels.

Labels are -100 where nothing is learnt and the token's own id where it is. They are not shifted:
the loss compares the prediction at position t with the label at t + 1, so a label at position 0
never counts, and a row has `num_targets(labels)` of them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, cast

from megatrain_cli.data.formats import Row
from megatrain_cli.data.render import TurnMarks, find_turn_marks, find_turns, render_chat
from megatrain_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Overlong = Literal["truncate", "drop", "error"]


class SkipReason(StrEnum):
    """Why a row is left out, in the words of the summary."""

    NO_ANSWER = "no assistant turn"
    EMPTY = "nothing but white space to learn"
    CUT_AWAY = "everything to learn lies beyond max_length"
    TOO_LONG = "longer than max_length"
    ONE_TOKEN = "one token alone, so nothing to predict"


@dataclass(frozen=True)
class Encoded:
    """A row's tokens, or why it is left out.

    Attributes:
        input_ids: Token ids, at most `max_length`; empty when the row is skipped before that.
        labels: As long; see the top of this file.
        num_tokens: How long the row was before it was cut.
        skipped: None for a row to train on.
        rest: Further rows of the same chat, where a template writes earlier turns in another way
            once the chat goes on, so that one row cannot hold all answers. Each stands alone: it
            may be cut or skipped by itself. Empty for nearly every chat.
    """

    input_ids: list[int]
    labels: list[int]
    num_tokens: int
    skipped: SkipReason | None = None
    rest: tuple["Encoded", ...] = ()


def num_targets(labels: list[int]) -> int:
    """How many tokens of a row are predicted and compared."""
    return sum(label != IGNORED for label in labels[1:])


def encode_row(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    overlong: Overlong,
    train_on_prompt: bool,
) -> Encoded:
    """Tokenise a row and mark what is to be learnt.

    Of a chat that is every assistant turn with its end-of-turn token; of a text every token and
    one end-of-text token behind it; with `train_on_prompt` everything. A row whose answers are
    all blank is left out: it would teach only to stop. A row that is cut gets no end mark: it
    did not end there.

    Raises:
        DataError: The row cannot be written with this tokenizer, or is too long and `overlong`
            is "error".
    """
    if _is_blank(row):
        return Encoded([], [], 0, SkipReason.EMPTY)
    if row.text is not None:
        input_ids = _encode_text(row, row.text, tokenizer)
        labels = list(input_ids)
    else:
        if not any(message["role"] == "assistant" for message in row.messages):
            return Encoded([], [], 0, SkipReason.NO_ANSWER)
        input_ids, labels = _encode_chat(row, tokenizer, train_on_prompt)
    length = len(input_ids)
    if length > max_length:
        if overlong == "error":
            raise DataError(
                f"{row.where}: the row has {length} tokens and data.max_length is {max_length}. "
                "Raise it, or set `data.overlong` to truncate or drop."
            )
        if overlong == "drop":
            return Encoded([], [], length, SkipReason.TOO_LONG)
    had_targets = num_targets(labels) > 0
    input_ids, labels = input_ids[:max_length], labels[:max_length]
    skipped = None
    if not num_targets(labels):
        skipped = SkipReason.CUT_AWAY if had_targets else SkipReason.ONE_TOKEN
    return Encoded(input_ids, labels, length, skipped)


def encode_rows(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    overlong: Overlong,
    train_on_prompt: bool,
) -> list[Encoded | DataError]:
    """The same as `encode_row` of each row, faster: texts of many rows are tokenised at once.

    Returns:
        As many as there are rows, in their order: an `Encoded`, or the error that `encode_row`
        raises for that row, not raised, so that one row does not hold up the others.
    """
    found: list[Encoded | DataError] = []
    for row in rows:
        try:
            found.append(encode_row(row, tokenizer, max_length, overlong, train_on_prompt))
        except DataError as error:
            found.append(error)
    return found


def _is_blank(row: Row) -> bool:
    """Whether all that could be learnt is white space; a call of a tool is something to learn."""
    if row.text is not None:
        return not row.text.strip()
    answers = [message for message in row.messages if message["role"] == "assistant"]
    return bool(answers) and not any(
        message.get("tool_calls") or str(message["content"]).strip() for message in answers
    )


def _encode_text(row: Row, text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """A text's tokens with the tokenizer's own start token, if it has one, and one end token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"{row.where}: the tokenizer has no eos_token, so nothing can mark the end of a text. "
            "Name one in its tokenizer_config.json."
        )
    # verbose=False: a row longer than the model's context is ours to cut, and no cause to warn.
    input_ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    input_ids.append(end)
    # Neither mark is doubled where the text writes it and the tokenizer adds it too.
    while input_ids[-2:] == [end, end]:
        input_ids.pop()
    while input_ids[:2] == [tokenizer.bos_token_id] * 2:
        input_ids.pop(0)
    return input_ids


def _encode_chat(
    row: Row, tokenizer: "PreTrainedTokenizerBase", train_on_prompt: bool
) -> tuple[list[int], list[int]]:
    """Token ids and labels of a whole chat."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{row.where}: the tokenizer has no chat template, so {row.format} rows cannot be "
            "written as tokens. Use an instruction-tuned model, put a chat_template.jinja into "
            "the model's folder, or give the rows as text."
        )
    text = render_chat(row, tokenizer)
    if train_on_prompt:
        input_ids = _tokenise(tokenizer, [text])[0]
        return input_ids, list(input_ids)
    marks = find_turn_marks(tokenizer)
    marked = _encode_by_tags(row, tokenizer, marks)
    if marked is not None:
        return marked
    turns = find_turns(row, text, marks, tokenizer)
    input_ids, places = _tokenise_at(row, text, [at for turn in turns for at in turn], tokenizer)
    labels = [IGNORED] * len(input_ids)
    for start, end in zip(places[::2], places[1::2], strict=True):
        labels[start:end] = input_ids[start:end]
    return input_ids, labels


def _encode_by_tags(
    row: Row, tokenizer: "PreTrainedTokenizerBase", marks: TurnMarks
) -> tuple[list[int], list[int]] | None:
    """Ids and labels by the template's own generation tags; None if it has none that say anything.

    Nearly no template that comes with a model has the tags, and transformers then answers with a
    mask of zeros. A mask of ones says as little. Templates differ in whether the end mark and the
    line break behind it lie inside the tags; the first is always learnt here, the second never.
    """
    if not _GENERATION_TAG.search(str(tokenizer.chat_template)) or not tokenizer.is_fast:
        return None
    encoded = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", list(row.messages)),  # narrower than what templates take
        tools=list(row.tools) or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    found = cast("dict[str, list[int]]", encoded)
    input_ids, mask = found["input_ids"], found["assistant_masks"]
    if not 0 < sum(mask) < len(mask):
        return None
    end_id = _tokenise(tokenizer, [marks.end])[0][-1]
    labels = [IGNORED] * len(input_ids)
    edges = [i for i, (a, b) in enumerate(pairwise([0, *mask, 0])) if a != b]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        end = stop
        if input_ids[stop : stop + 1] == [end_id]:
            end = stop + 1
        elif end_id in input_ids[start:stop]:
            end = stop - input_ids[start:stop][::-1].index(end_id)
        labels[start:end] = input_ids[start:end]
    return input_ids, labels


def _tokenise_at(
    row: Row, text: str, cuts: list[int], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[int]]:
    """Token ids of a text, and at which token each place of `cuts` (in characters) lies.

    The pieces between the cuts are tokenised alone, because that is what a server does with the
    prompt, and compared with the text as a whole:

    - nearly always they give the same ids, and every cut falls between two tokens;
    - an answer that begins with a line break can melt into the prompt's last token. If the pieces
      still spell the same text, they are what the model will see, and are taken;
    - SentencePiece puts a space before each piece, so pieces spell another text. Then the whole
      is taken, provided that the tokens of each prefix are a prefix of its tokens.
    """
    pieces = [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]
    whole, *parts = _tokenise(tokenizer, [text, *pieces])
    joined = [token for part in parts for token in part]
    if joined == whole or _spell(tokenizer, joined) == _spell(tokenizer, whole):
        return joined, list(accumulate(len(part) for part in parts[:-1]))
    prefixes = _tokenise(tokenizer, [text[:cut] for cut in cuts])
    for prefix in prefixes:
        if whole[: len(prefix)] != prefix:
            raise DataError(
                f"{row.where}: the tokens of a prompt change with the answer behind it (the chat "
                "template is not prefix-preserving), so what the model should learn cannot be told."
            )
    return whole, [len(prefix) for prefix in prefixes]


def _tokenise(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Ids of each text, with nothing added: a template writes its start token itself."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _spell(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
