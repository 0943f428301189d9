"""What a file says is what is read, or it is refused: nothing that was meant is left out unseen."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data.formats import Reading, Row
from megatrain_cli.data.registry import read_entry
from megatrain_cli.data.source import SourceFile, read_rows
from megatrain_cli.errors import DataError
from tests.data.chats import chat, encode
from tests.data.templates import CHATML, make_tokenizer

Write = Callable[..., Path]
ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CHATS: list[dict[str, object]] = [
    {"instruction": "a", "output": "b"},
    {"messages": [ASKED, SAID]},
    {"conversations": TURNS},
    {"prompt": "a", "completion": "b"},
]


def read(path: Path, row_format: str = "auto") -> list[Row]:
    return list(read_rows(SourceFile(path, row_format)))


def refusal(path: Path, row_format: str = "auto") -> str:
    with pytest.raises(DataError) as caught:
        read(path, row_format)
    return str(caught.value)


@pytest.mark.parametrize("row", CHATS)
@pytest.mark.parametrize("column", ["images", "videos", "audios", "image", "video", "audio"])
def test_rows_with_more_than_text_are_refused_by_their_column(
    row: dict[str, object], column: str, write: Write
) -> None:
    path = write([{**row, column: ["a.png"]}])
    assert refusal(path) == f"{path}:1: {column}: rows with more than text are not trained on"
    empty: tuple[object, ...] = (None, [], "")
    for nothing in empty:
        assert read(write([{**row, column: nothing}])) == read(write([row]))


@pytest.mark.parametrize("row", CHATS)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rejected_response": "c"}, "rejected_response: preferences are not trained on"),
        ({"rejected": [SAID]}, "rejected: preferences are not trained on"),
        ({"label": False}, "label: true or false beside an answer"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs: variables"),
        ({"functions": [{"name": "f"}]}, "functions: schemas of tools are read from `tools`"),
    ],
)
def test_columns_that_decide_what_other_tools_learn_are_not_passed_over(
    row: dict[str, object], more: dict[str, object], said: str, write: Write
) -> None:
    path = write([row | more])
    assert f"{path}:1: {said}" in refusal(path)
    empty: dict[str, object] = dict.fromkeys(more)
    assert read(write([row | empty])) == read(write([row]))
    assert read(write([row | {"label": "sport"}])) == read(write([row]))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call: calls are read from"),
        ({"refusal": "no"}, "refusal: it would not be learnt"),
        ({"audio": {"id": "a"}}, "audio: rows with more than text are not trained on"),
        ({"train_detail": [{"begin_offset": 0}]}, "train_detail: it is not read"),
        ({"reasoning": ["because"]}, "reasoning: a list where text is expected"),
    ],
)
def test_keys_of_a_turn_that_decide_what_other_tools_learn_are_not_passed_over(
    more: dict[str, object], said: str, write: Write
) -> None:
    path = write([{"messages": [ASKED, {**SAID, **more}]}])
    assert f"{path}:1: messages[2].{said}" in refusal(path)
    empty: dict[str, object] = dict.fromkeys(more)
    plain = read(write([{"messages": [ASKED, SAID]}]))
    assert read(write([{"messages": [ASKED, {**SAID, **empty}]}])) == plain


def test_a_registry_that_does_not_name_them_does_not_read_them(tmp_path: Path) -> None:
    more = {"images": ["a.png"], "label": True, "rejected": "c"}
    (tmp_path / "a.jsonl").write_text(json.dumps(CHATS[0] | more))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.jsonl"}}))
    entry = read_entry(tmp_path / "dataset_info.json", "a")
    assert len(list(read_rows(SourceFile(entry.path, entry.format, entry.reading)))) == 1


def test_a_list_with_one_part_of_text_is_that_text(write: Write) -> None:
    parts = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in (ASKED, SAID)
    ]
    assert read(write([{"messages": parts}])) == read(write([{"messages": [ASKED, SAID]}]))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"Messages": [ASKED, SAID]}, "the row has `Messages`. "),
        ({"no name": 1, "x": None}, "the row has none that is a name. "),
        ({f"c{i}": 1 for i in range(10)}, "`c7` and 2 others. "),
        ({"instruction": "a", "Output": "b"}, "'Output' is there: names must be the same"),
        ({"instruction": "a", " output": "b"}, "' output' is there: names must be the same"),
    ],
)
def test_what_is_there_is_told_where_what_is_wanted_is_not(
    row: object, said: str, write: Write
) -> None:
    assert said in refusal(write([row]))


def test_a_mapping_to_what_is_not_there_is_told(write: Write) -> None:
    path = write([{"q": "a", "a": "b"}])
    reading = Reading({"instruction": "question", "output": "a", "messages.role": "who"})
    with pytest.raises(DataError, match="names `question`, and the row has `q`, `a`"):
        list(read_rows(SourceFile(path, "auto", reading)))


@pytest.mark.parametrize("ours", ["input", "history", "system", "tools"])
def test_a_column_that_was_named_and_is_in_no_row_is_told(ours: str, write: Write) -> None:
    path = write([{**CHATS[0], "contxt": "c"}, {**CHATS[0], "context": None}])
    source = SourceFile(path, "auto", Reading({ours: "context"}))
    assert len(list(read_rows(source))) == 2
    said = f"{path}: `columns` names `context` for {ours}, and no row that was read has such"
    with pytest.raises(DataError, match=re.escape(said)):
        list(read_rows(replace(source, max_rows=1)))
    assert len(list(read_rows(replace(source, reading=Reading({"input": "input"}))))) == 2


def test_a_first_row_in_place_of_names_is_not_shown(write: Write) -> None:
    assert "secret" not in refusal(write(b"my secret question,my secret answer\na,b\n", "a.csv"))


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("a.csv", b"instruction;output\na;b\n", ":1: the names of the columns are divided by semi"),
        (
            "a.csv",
            b"instruction\toutput\na\tb\n",
            "the names of the columns are divided by tabs",
        ),
        ("a.tsv", b"instruction\toutput\na\tb\n", ": columns divided by tabs are not read"),
        ("a.jsonl", b'{\n  "text": "a"\n}\n', ":1: an object that goes on in the next line"),
    ],
)
def test_a_file_of_another_form_is_told_by_it(
    name: str, raw: bytes, said: str, write: Write
) -> None:
    assert said in refusal(write(raw, name))


@pytest.mark.parametrize("row", CHATS)
def test_rows_of_json_in_a_file_of_plain_text_are_refused_unless_asked_for(
    row: object, write: Write
) -> None:
    path = write([row], "a.txt")
    assert f"{path}:1: the line is a JSON object with the columns of " in refusal(path)
    assert [found.text for found in read(path, "text")] == [json.dumps(row)]
    for other in ("{a}", '{"a": 1}', "[1]", "{"):
        assert [found.text for found in read(write(other.encode(), "a.txt"))] == [other]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_refused_where_they_would_be_written(
    number: str, write: Write
) -> None:
    tool = '{"function": {"name": "f", "arguments": {"a": [%s]}}}'
    called = f'{{"role": "assistant", "tool_calls": [{tool % number}]}}'
    path = write(f'{{"messages": [{json.dumps(ASKED)}, {called}]}}'.encode())
    assert "messages[2].tool_calls: a number that is not finite" in refusal(path)
    path = write(f'{{"prompt": "a", "completion": "b", "tools": [{{"x": {number}}}]}}'.encode())
    assert "tools: a number that is not finite" in refusal(path)
    path = write(f'{{"prompt": "a", "completion": "b", "score": {number}}}'.encode())
    assert len(read(path)) == 1  # nobody reads the column


def test_an_end_that_the_tokenizer_spells_out_is_no_end() -> None:
    tokenizer = make_tokenizer()
    tokenizer.split_special_tokens = True
    with pytest.raises(DataError, match=r"spells '<\|im_end\|>', .* as several tokens"):
        encode(chat(("user", "a"), ("assistant", "b")), tokenizer)


def test_the_day_is_written_as_a_clock_would_write_it() -> None:
    """Of all letters that do not depend on the machine's zone."""
    letters = "aAbBcdDeFGgHhIjmMpRrSTuUVwWxXyYC%"
    day = datetime(2024, 7, 26)  # noqa: DTZ001 - a day, nowhere
    spelled = "|".join(f"%{letter}" for letter in letters) + "|%-d|%-m|%-H|%-I|%-j"
    tokenizer = make_tokenizer("{{ strftime_now('" + spelled + "') }}" + CHATML)
    found: Any = encode(chat(("user", "u"), ("assistant", "a")), tokenizer, max_length=999)
    assert tokenizer.decode(found.input_ids).startswith(day.strftime(spelled) + "<|im_start|>")
