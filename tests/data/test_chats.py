"""Every way to write a chat comes to the same turns; roles are read, never guessed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.config.kinds import COLUMNS, ROLES
from megatrain_cli.data.chats import TAGS
from megatrain_cli.data.formats import FIELDS, Reading, Row
from megatrain_cli.data.source import SourceFile, read_rows
from megatrain_cli.errors import DataError

Write = Callable[..., Path]


def read(path: Path, row_format: str = "auto", **reading: Any) -> Row:
    [row] = read_rows(SourceFile(path, row_format, Reading(**reading)))
    return row


def refusal(path: Path, row_format: str = "auto", **reading: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, row_format, **reading)
    return str(caught.value)


def turns(row: Row) -> list[tuple[object, object]]:
    return [(turn["role"], turn["content"]) for turn in row.messages]


def sharegpt(*said: tuple[str, str], **more: Any) -> list[Any]:
    return [{"conversations": [{"from": role, "value": text} for role, text in said], **more}]


def test_the_config_names_every_field_and_role() -> None:
    fields = {field for names in FIELDS.values() for field in names}
    assert {name for name in COLUMNS if "." not in name} == fields
    assert ROLES == TAGS


@pytest.mark.parametrize(
    "said",
    [
        [("gpt", "first")],
        [("human", "a"), ("human", "b"), ("gpt", "c")],
        [("human", "a"), ("system", "s"), ("gpt", "b")],
        [("gpt", "a"), ("human", "b")],
        [("observation", "o"), ("tool", "t"), ("user", "u"), ("assistant", "v")],
    ],
)
def test_any_order_of_turns_is_read_as_it_is(write: Write, said: list[tuple[str, str]]) -> None:
    ours = {"human": "user", "gpt": "assistant", "observation": "tool"}
    row = read(write(sharegpt(*said)))
    assert row.format == "sharegpt"
    assert turns(row) == [(ours.get(role, role), text) for role, text in said]


@pytest.mark.parametrize(
    "written",
    [{"name": "f", "arguments": {"x": 1}}, [{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]],
)
def test_a_function_call_is_a_turn_of_the_assistant_that_calls(write: Write, written: Any) -> None:
    row = read(write(sharegpt(("human", "a"), ("function_call", json.dumps(written)))))
    calls: Any = row.messages[1]["tool_calls"]
    assert row.messages[1]["role"] == "assistant"
    assert row.messages[1]["content"] == ""
    assert calls[0] == {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert [call["function"]["arguments"] for call in calls[1:]] == [{}] * (len(calls) - 1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("call f", "a call of a tool as JSON is expected: broken JSON"),
        ('{"arguments": {}}', "a call is an object with name and arguments"),
        ("[1]", "a call is an object with name and arguments"),
        ("[]", "the list of calls is empty"),
    ],
)
def test_a_function_call_that_is_none_is_refused(write: Write, value: str, reason: str) -> None:
    message = refusal(write(sharegpt(("function_call", value))))
    assert f":1: conversations[1].value: {reason}" in message


def test_a_system_column_stands_before_the_turns_and_not_beside_another(write: Write) -> None:
    assert turns(read(write(sharegpt(("human", "a"), system="s"))))[0] == ("system", "s")
    assert turns(read(write(sharegpt(("human", "a"), system=""))))[0] == ("user", "a")
    both = write(sharegpt(("system", "s"), ("human", "a"), system="t"))
    assert "system: a system turn is there too" in refusal(both)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "assistant", "content": "a", "train": 1}, "train: a number where true or false"),
        ({"role": "user", "content": "a", "train": True}, "train: true on a turn that is not"),
        ({"role": "assistant", "content": "a", "loss": 0.5}, "loss: a number where true or false"),
        ({"role": "user", "content": "a", "loss": True}, "loss: true on a turn that is not"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "weight: neither 0 nor 1"),
        ({"role": "assistant", "content": "a", "weight": True}, "weight: neither 0 nor 1"),
    ],
)
def test_what_is_said_of_training_a_turn_is_checked(write: Write, turn: Any, reason: str) -> None:
    assert f"messages[1].{reason}" in refusal(write([{"messages": [turn]}]))


@pytest.mark.parametrize(
    ("more", "train"),
    [
        ({}, None),
        ({"train": None}, None),
        ({"train": False}, False),
        ({"train": True}, True),
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"loss": False}, False),
        ({"loss": True}, True),
        ({"loss": None}, None),
        ({"training": False}, False),
        ({"train": False, "loss": False, "weight": 0}, False),
    ],
)
def test_a_turn_says_whether_it_is_learnt(write: Write, more: Any, train: bool | None) -> None:
    row = read(write([{"messages": [{"role": "assistant", "content": "a", **more}]}]))
    assert row.messages[0].get("train") is train
    assert "weight" not in row.messages[0]
    user = read(write([{"messages": [{"role": "user", "content": "a", "weight": 1}]}]))
    assert user.messages[0] == {"role": "user", "content": "a"}


@pytest.mark.parametrize("more", [{"train": False, "loss": True}, {"train": True, "weight": 0}])
def test_marks_of_a_turn_that_say_the_opposite_are_refused(write: Write, more: Any) -> None:
    message = refusal(write([{"messages": [{"role": "assistant", "content": "a", **more}]}]))
    assert f":1: messages[1]: {' and '.join(more)} say the opposite" in message


def test_only_the_completion_is_learnt_of_a_pair(write: Write) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said = [{"role": "assistant", "content": "c"}]
    texts = [("user", "[1] and 2"), ("assistant", "d")]
    assert turns(read(write([{"query": "[1] and 2", "response": "d"}]))) == texts
    for value in (asked, json.dumps(asked)):
        row = read(write([{"prompt": value, "completion": said}]))
        assert turns(row) == [("user", "a"), ("assistant", "b"), ("assistant", "c")]
        assert [turn.get("train") for turn in row.messages] == [None, False, None]
    assert turns(read(write([{"prompt": asked[:1], "completion": "d"}]))) == [
        ("user", "a"),
        ("assistant", "d"),
    ]
    twice = write([{"prompt": "a", "query": "b", "completion": "c"}])
    assert "prompt and query are both there" in refusal(twice)
    assert "prompt: a number where text" in refusal(write([{"prompt": 5, "completion": "c"}]))


def test_null_in_an_object_is_absent_at_every_depth(write: Write) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None, "c": [None]}}, "id": None}
    row = read(write([{"messages": [{"role": "assistant", "tool_calls": [call]}]}]))
    assert row.messages[0]["tool_calls"] == [
        {"function": {"name": "f", "arguments": {"a": 1, "c": [None]}}}
    ]


def test_columns_and_roles_may_have_other_names(write: Write) -> None:
    said = [{"speaker": "customer", "said": "a"}, {"speaker": "agent", "said": "b"}]
    path = write([{"dialog": said, "brief": "s", "system": "not this"}])
    columns = {"messages": "dialog", "messages.role": "speaker", "messages.content": "said"}
    row = read(
        path,
        columns={**columns, "system": "brief"},
        tags={"user": "customer", "assistant": "agent"},
    )
    assert row.format == "messages"
    assert turns(row) == [("system", "s"), ("user", "a"), ("assistant", "b")]
    assert "dialog[1].speaker: 'customer' is no role" in refusal(path, columns=columns)
    faq = write([{"question": "q", "answer": 5}])
    message = refusal(faq, columns={"instruction": "question", "output": "answer"})
    assert "answer: a number where text" in message, "the file's own name is shown"
    swapped = read(write([{"input": "a", "text": "b"}]), columns={"text": "input"})
    assert swapped.text == "a"
    unread = {"instruction": "instruction", "input": None}
    row = read(write([{"instruction": "a", "input": "x", "output": "b"}]), columns=unread)
    assert turns(row)[0] == ("user", "a")


def test_turns_of_the_other_form_are_refused_with_what_to_write(write: Write) -> None:
    message = refusal(write(sharegpt(("human", "a"))), "messages")
    assert "the turn has `from`, not `role`. Set `format: sharegpt`" in message
    message = refusal(write([{"messages": [{"role": "user", "content": "a"}]}]), "sharegpt")
    assert "the turn has `role`, not `from`. Set `format: messages`" in message


def test_an_empty_text_does_not_make_a_format_where_another_column_is_full(write: Write) -> None:
    path = write(b'text,instruction,output\n"",a,b\n', "a.csv")
    assert read(path).format == "alpaca"
    assert read(write([{"text": ""}])).format == "text"
    nothing = write(b"text,instruction,output\n,,\n", "b.csv")
    assert "the columns are those of alpaca and of text" in refusal(nothing)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": []}, "input_ids: the list is empty"),
        ({"input_ids": "1 2"}, "input_ids: text where a list is expected"),
        ({"input_ids": [1, 2.0]}, "input_ids: item 2 is a number that is not whole"),
        ({"input_ids": [True]}, "input_ids: item 1 is true or false"),
        ({"input_ids": [1, -1]}, "input_ids: item 2 is below 0"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels: 1 item for 2 tokens"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels: item 1 is neither -100 nor"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask: not all ones"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "completion_mask: not all ones, and"),
        ({"input_ids": [1, 2], "assistant_masks": [0, 1]}, "assistant_masks: not all ones, and"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 1]}, "seq_lengths: several documents in a row"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "position_ids: not 0, 1, 2"),
    ],
)
def test_tokens_that_cannot_be_honoured_are_refused(write: Write, row: Any, reason: str) -> None:
    assert f":1: {reason}" in refusal(write([row]))


def test_tokens_are_taken_as_they_are(write: Write) -> None:
    beside = {
        "attention_mask": [1, 1, 1],
        "loss_mask": [1, 1, 1],
        "seq_lengths": [3],
        "position_ids": [0, 1, 2],
    }
    row = read(write([{"input_ids": [7, 8, 9], "labels": [-100, 8, 9], **beside}]))
    assert (row.format, row.input_ids, row.labels) == ("tokenized", (7, 8, 9), (-100, 8, 9))
    assert read(write([{"input_ids": [7], "labels": None}])).labels is None
