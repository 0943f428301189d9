"""The first rows of a run: nothing learnt, or everything, is not what a chat is for."""

from typing import Any

import pytest

from megatrain_cli.data.first_rows import FIRST_ROWS, check_first_rows
from megatrain_cli.data.formats import Row
from megatrain_cli.data.template import Encoded, SkipReason
from megatrain_cli.errors import DataError
from tests.data.chats import chat, encode, text

CHAT = chat(("user", "u"), ("assistant", "a"))
GOOD = Encoded([1, 2, 3], [-100, -100, 3], 3)
ALL = Encoded([1, 2, 3], [1, 2, 3], 3)
NONE = Encoded([], [], 0, SkipReason.NO_ANSWER)
CUT = Encoded([1, 2], [-100, -100], 9, SkipReason.CUT_AWAY)
LONG = Encoded([], [], 9, SkipReason.TOO_LONG)


def look(*encoded: Encoded, row: Row = CHAT, everything: bool = False) -> list[str]:
    return check_first_rows(((row, item) for item in encoded), everything)


def test_rows_that_are_learnt_in_part_are_fine() -> None:
    assert look(GOOD) == look(ALL, GOOD) == look(NONE, GOOD) == look(NONE, LONG, ALL, GOOD) == []


@pytest.mark.parametrize("everything", [[ALL], [ALL, Encoded([1, 2], [-100, 2], 2)]])
def test_chats_of_which_all_is_learnt_are_refused(everything: list[Encoded]) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:7: in each of the first \d rows every"):
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
    assert note.startswith("in each of the first 1 rows every token is learnt")
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
