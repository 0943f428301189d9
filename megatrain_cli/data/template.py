"""One row as token ids and labels.

Labels are -100 where nothing is learnt and the token's own id where it is. They are not shifted:
the loss compares the prediction at position t with the label at t + 1, so a label at position 0
never counts, and a row has `num_targets(labels)` of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from megatrain_cli.data.chats import REASONING
from megatrain_cli.data.formats import Row
from megatrain_cli.data.tokenise import IGNORED, CutText, tokenise_cut
from megatrain_cli.data.written import Written, write
from megatrain_cli.errors import DataError, RowError
from megatrain_cli.units import show_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "IGNORED",
    "Encoded",
    "Overlong",
    "SkipReason",
    "encode_row",
    "encode_rows",
    "num_targets",
]

Overlong = Literal["truncate", "drop", "error"]


class SkipReason(StrEnum):
    """Why a row is left out, in the words of the summary."""

    NO_ANSWER = "no assistant turn"
    NOT_TAUGHT = "nothing in it is to be learnt (`train: false`, or labels of -100 alone)"
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
    return max(0, len(labels) - 1 - labels[1:].count(IGNORED))


def encode_row(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    overlong: Overlong,
    train_on_prompt: bool,
) -> Encoded:
    """Tokenise a row and mark what is to be learnt.

    Of a chat that is every assistant turn with its end-of-turn token, but those with `train:
    false`; of a text every token and one end-of-text token behind it; with `train_on_prompt`
    everything. A row whose answers are all blank is left out: it would teach only to stop. A row
    that is cut gets no end mark: it did not end there. A row of tokens is taken as it is.

    Raises:
        RowError: The row cannot be written with this tokenizer, or is too long and `overlong`
            is "error".
        DataError: No row can be: the tokenizer has no template, or one of no use.
    """
    (found,) = encode_rows([row], tokenizer, max_length, overlong, train_on_prompt)
    if isinstance(found, DataError):
        raise found
    return found


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
    found: list[list[Encoded] | DataError] = []
    texts: list[CutText] = []
    written: list[tuple[int, Written]] = []  # row and what is in `texts` at the same place
    for i, row in enumerate(rows):
        found.append([])
        try:
            skipped = _nothing_to_learn(row, train_on_prompt)
            if skipped is not None:
                found[i] = [Encoded([], [], 0, skipped)]
            elif row.input_ids is not None:
                ids, labels = _given(row, len(tokenizer), train_on_prompt=train_on_prompt)
                found[i] = [_fit(row.where, ids, labels, max_length, overlong)]
            else:
                for item in write(row, tokenizer, train_on_prompt=train_on_prompt):
                    written.append((i, item))
                    texts.append(item.text)
        except DataError as error:
            found[i] = error
    for (i, item), tokens in zip(written, tokenise_cut(texts, tokenizer), strict=True):
        so_far = found[i]
        if isinstance(so_far, DataError):
            continue
        if isinstance(tokens, DataError):
            found[i] = tokens
            continue
        try:
            ids, labels = item.label(tokens)
            so_far.append(_fit(rows[i].where, ids, labels, max_length, overlong))
        except DataError as error:
            found[i] = error
    return [item if isinstance(item, DataError) else _join(item) for item in found]


def _nothing_to_learn(row: Row, train_on_prompt: bool) -> SkipReason | None:
    """Whether a row can be left out unseen; a call of a tool and a thought are something."""
    if row.input_ids is not None:
        muted = row.labels is not None and all(label == IGNORED for label in row.labels)
        return SkipReason.NOT_TAUGHT if muted and not train_on_prompt else None
    if row.text is not None:
        return None if row.text.strip() else SkipReason.EMPTY
    answers = [message for message in row.messages if message["role"] == "assistant"]
    if not answers:
        return SkipReason.NO_ANSWER
    taught = [message for message in answers if message.get("train") is not False]
    if not taught:
        return SkipReason.NOT_TAUGHT
    said = any(
        message.get("tool_calls") or str(message.get(name) or "").strip()
        for message in taught
        for name in ("content", *REASONING)
    )
    return None if said else SkipReason.EMPTY


def _given(row: Row, num_tokens: int, *, train_on_prompt: bool) -> tuple[list[int], list[int]]:
    """Ids and labels of a row that is tokens already.

    Args:
        row: Has `input_ids`.
        num_tokens: How many the tokenizer has.
        train_on_prompt: Whether its labels are put aside.
    """
    assert row.input_ids is not None
    ids = list(row.input_ids)
    for place, token in enumerate(ids, start=1):
        if not 0 <= token < num_tokens:
            raise RowError(
                row.where,
                f"input_ids: item {place} is {token} and the tokenizer has {num_tokens} "
                "tokens: the row was made with another one.",
            )
    labels = ids if row.labels is None or train_on_prompt else list(row.labels)
    for place, (label, token) in enumerate(zip(labels, ids, strict=True), start=1):
        if label not in (IGNORED, token):
            raise RowError(
                row.where, f"labels: item {place} is neither -100 nor the token in its place"
            )
    return ids, list(labels)


def _fit(
    where: str, input_ids: list[int], labels: list[int], max_length: int, overlong: Overlong
) -> Encoded:
    """Cut, drop or refuse a row that is too long."""
    length = len(input_ids)
    if length > max_length:
        if overlong == "error":
            raise RowError(
                where,
                f"the row has {show_number(length, 'token')} and data.max_length is {max_length}. "
                "Raise it, or set `data.overlong` to truncate or drop.",
            )
        if overlong == "drop":
            return Encoded([], [], length, SkipReason.TOO_LONG)
    had_targets = num_targets(labels) > 0
    input_ids, labels = input_ids[:max_length], labels[:max_length]
    skipped = None
    if not num_targets(labels):
        skipped = SkipReason.CUT_AWAY if had_targets else SkipReason.ONE_TOKEN
    return Encoded(input_ids, labels, length, skipped)


def _join(parts: list[Encoded]) -> Encoded:
    """One row of several, those to train on first."""
    first, *rest = sorted(parts, key=lambda part: part.skipped is not None)
    return replace(first, rest=tuple(rest))
