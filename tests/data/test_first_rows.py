"""The first rows of a run: nothing learnt, or everything, is not what a chat is for."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data.first_rows import FIRST_ROWS, FirstRowsOfSources
from megatrain_cli.data.formats import Row
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.summary import DataSummary
from megatrain_cli.data.template import Encoded, SkipReason
from megatrain_cli.errors import DataError
from tests.data.chats import chat, encode, text
from tests.data.loading import load_examples

OPTIONS: dict[str, Any] = {
    "max_length": 99,
    "overlong": "truncate",
    "train_on_prompt": False,
}
CHAT = chat(("user", "u"), ("assistant", "a"))
GOOD = Encoded([1, 2, 3], [-100, -100, 3], 3)
ALL = Encoded([1, 2, 3], [1, 2, 3], 3)
NONE = Encoded([], [], 0, SkipReason.NO_ANSWER)
CUT = Encoded([1, 2], [-100, -100], 9, SkipReason.CUT_AWAY)
LONG = Encoded([], [], 9, SkipReason.TOO_LONG)


def check_first_rows(pairs: Iterable[tuple[Row, Encoded]], train_on_prompt: bool) -> list[str]:
    look = FirstRowsOfSources(train_on_prompt)
    for row, encoded in pairs:
        look.add(row, encoded)
    return look.finish()


def look(*encoded: Encoded, row: Row = CHAT, everything: bool = False) -> list[str]:
    return check_first_rows(((row, item) for item in encoded), everything)


def test_rows_that_are_learnt_in_part_are_fine() -> None:
    assert look(GOOD) == look(ALL, GOOD) == look(NONE, GOOD) == look(NONE, LONG, ALL, GOOD) == []


@pytest.mark.parametrize("everything", [[ALL], [ALL, Encoded([1, 2], [-100, 2], 2)]])
def test_chats_of_which_all_is_learnt_are_refused(everything: list[Encoded]) -> None:
    with pytest.raises(
        DataError,
        match=r"train\.jsonl:7: in (each of the first 2 rows|the one row that counts) every",
    ):
        look(*everything)
    assert look(*everything, everything=True) == []
    assert look(*everything, row=text("abc")) == []


def test_rows_with_nothing_to_learn_are_refused_but_not_those_that_were_to_be_dropped() -> None:
    with pytest.raises(DataError, match="none of the first 3 rows has anything to learn"):
        look(NONE, CUT, NONE)
    assert look(*[LONG] * (FIRST_ROWS + 1)) == []
    split = Encoded([], [], 9, SkipReason.CUT_AWAY, rest=(GOOD,))
    assert look(split) == []


def test_only_the_first_rows_count() -> None:
    assert look(*[NONE] * (FIRST_ROWS - 1), GOOD, *[NONE] * FIRST_ROWS) == []
    with pytest.raises(DataError, match=f"first {FIRST_ROWS} rows"):
        look(*[NONE] * FIRST_ROWS, GOOD)


def test_tokens_without_labels_are_said() -> None:
    row = Row("t:1", "tokenized", input_ids=(1, 2, 3))
    (note,) = look(ALL, row=row)
    assert note.startswith("t:1: in the one row that counts every token is learnt")
    with pytest.raises(DataError, match="every token is learnt"):
        check_first_rows([(row, ALL), (CHAT, ALL)], False)


def test_a_chat_without_a_prompt_is_refused(chatml: Any) -> None:
    chatml.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' or messages | length < 2 or "
        "messages[0].role == 'user' %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    row = chat(("assistant", "abc"))
    with pytest.raises(DataError, match="so no prompt was found"):
        check_first_rows([(row, encode(row, chatml))], False)


def test_each_source_is_looked_at_by_itself() -> None:
    other = replace(CHAT, where="other.jsonl:1", source=1)
    with pytest.raises(DataError, match=r"other\.jsonl:1: in each of the first 2 rows"):
        check_first_rows([(CHAT, GOOD), (other, ALL), (CHAT, GOOD), (other, ALL)], False)


def test_rows_that_are_prepared_are_looked_at(write: Callable[..., Path], chatml: Any) -> None:
    def load(*rows: object, **more: object) -> DataSummary:
        return load_examples([SourceFile(write([*rows], **more))], chatml, **OPTIONS)[1]

    whole = {"input_ids": [5, 6, 7]}
    assert any("every token is learnt" in line for line in load(whole).lines())
    part = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}
    assert not any("every token is learnt" in line for line in load(part).lines())
    unanswered = [{"messages": [{"role": "user", "content": "u"}]}] * FIRST_ROWS
    answered = {"messages": [*unanswered[0]["messages"], {"role": "assistant", "content": "a"}]}
    with pytest.raises(DataError, match=f"none of the first {FIRST_ROWS} rows"):
        load(*unanswered, answered)
    assert load(*unanswered[1:], answered).num_used == 1


def test_a_prompt_of_one_token_is_a_prompt() -> None:
    row = Row("t:1", "prompt_completion")
    taught = Encoded([5, 6, 7], [-100, 6, 7], 3)
    assert look(taught, row=row) == []
    with pytest.raises(DataError, match="every token is learnt"):
        look(replace(taught, labels=[5, 6, 7]), row=row)
