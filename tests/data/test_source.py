"""Reading rows: the same from any spelling of a file; a place and a reason for each fault."""

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data.formats import Row
from megatrain_cli.data.source import SourceFile, read_rows
from megatrain_cli.errors import DataError

Write = Callable[..., Path]
GOOD = {"instruction": "a", "output": "b"}
PART, PICTURE = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}


def read(path: Path, row_format: str = "auto") -> list[Row]:
    return list(read_rows(SourceFile(path, row_format)))


def contents(rows: list[Row]) -> list[str]:
    return [str(m["content"]) for row in rows for m in row.messages]


def refusal(path: Path, row_format: str = "auto") -> str:
    with pytest.raises(DataError) as caught:
        read(path, row_format)
    return str(caught.value)


def lines(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def test_a_mark_crlf_and_a_missing_last_line_break_change_nothing(write: Write) -> None:
    values = [{"text": f"row {i}\u2028still row {i}\u0085 \x0b é"} for i in range(3)]
    plain = "\n".join(json.dumps(value, ensure_ascii=False) for value in values).encode()
    marked = b"\xef\xbb\xbf" + plain
    spellings = [plain, plain + b"\n", marked, plain.replace(b"\n", b"\r\n"), lines(*values)]
    spellings += [json.dumps(values).encode(), json.dumps(values, indent=2).encode() + b"\n\n"]
    for number, spelling in enumerate(spellings):
        rows = read(write(spelling, f"{number}.json"))
        assert [row.text for row in rows] == [value["text"] for value in values]


def test_blank_lines_are_skipped_and_lines_are_counted_with_them(write: Write) -> None:
    path = write(b"\n" + lines(GOOD) + b"  \r\n" + b'{"instruction":"a","output":')
    message = refusal(path)
    assert f"{path}:4: broken JSON" in message
    assert "instruction" not in message, "content is not shown"
    rows = read(write(b"\n\n" + lines(GOOD) + b"\n" + lines(GOOD)))
    assert [row.where.rpartition(":")[2] for row in rows] == ["3", "5"]


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (b'["x"]', "a list where an object is expected"),
        (b"5", "a number where an object is expected"),
        (b"null", "null where an object is expected"),
        (b'{"instruction":"a","outp', "broken JSON: Unterminated string"),
        ('{"instruction":"é","output":"b"}'.encode("latin-1"), "byte 17 is not UTF-8"),
        (b'{"instruction":"a","output":5}', "output: a number where text is expected"),
        (b'{"instruction":"a","output":{"k":1}}', "output: an object where text is expected"),
        (
            b'{"instruction":"a","output":null}',
            "output: the field is missing or null, and text is required",
        ),
        (b'{"instruction":"a"}', "output: the field is missing or null, and text is required"),
        (b'{"instruction":"a","output":"b","system":true}', "system: true or false where text"),
        (b'{"instruction":"a","output":"b","history":["q"]}', "history[1]: a question and its"),
        (b'{"instruction":"a","output":"\\ud83d"}', "output: half of a surrogate pair"),
        (b'{"text":"a"}', "the columns are those of text, but the file is read as alpaca"),
        (b'{"output":"b"}', "instruction: the field is missing"),
        (b'{"instruction":"a","output":"b"} {}', "more text follows the end of the object"),
        (b'{"instruction":"a","output":"b","output":"c"}', "an object has the same key twice"),
        (b'{"instruction":"a","output":"b","history":{}}', "history: an object where a list"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "a number in the JSON is too long"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_reason(
    write: Write, last: bytes, reason: str
) -> None:
    path = write(b"\n" + lines(GOOD) + b"\n" + last)
    message = refusal(path)
    assert message.startswith(f"{path}:4: ")
    assert reason in message
    assert len(message) < len(str(path)) + 250


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (None, "messages: the field is missing or null"),
        ("hi", "messages: text where a list is expected"),
        ([], "messages: the list is empty"),
        (["hi"], "messages[1]: text where an object is expected"),
        ([{"role": "critic", "content": "no"}], "messages[1].role: 'critic' is no role"),
        ([{"content": "no"}], "messages[1].role: the field is missing"),
        ([{"role": "user"}], "messages[1].content: the field is missing"),
        ([{"role": "user", "content": None}], "messages[1].content: the field is missing"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[1].content: the field is"),
        ([{"role": "user", "content": []}], "messages[1].content: a list where text, or"),
        ([{"role": "user", "content": [5]}], "messages[1].content: a list where text, or"),
        ([{"role": "user", "content": [PICTURE]}], "messages[1].content: a list where text, or"),
        ([{"role": "user", "content": [PICTURE, PART]}], "a list where text, or a list of one"),
        ([{"role": "user", "content": [PART, PART]}], "messages[1].content: 2 parts of text"),
        ([{"from": "human", "value": "x"}], "Set `format: sharegpt`"),
    ],
)
def test_a_bad_turn_is_refused_by_its_number(write: Write, turns: object, reason: str) -> None:
    path = write([{"messages": turns}])
    message = refusal(path, "messages")
    assert message.startswith(f"{path}:1: ")
    assert reason in message


def test_an_array_names_the_line_of_its_bad_element(write: Write) -> None:
    head = b'[\n  {"text": "a"},\n  {"text":\n    "b"},\n'
    path = write(head + b'  {"text": 7}\n]', "train.json")
    assert refusal(path).startswith(f"{path}:5: text: a number")
    path = write(head + b'  {"text" 7}\n]', "train.json")
    assert refusal(path).startswith(f"{path}:5: element 3: broken JSON: Expecting ':' delimiter")
    path = write(head + b"  7\n]", "train.json")
    assert refusal(path).startswith(f"{path}:5: a number where an object")
    assert "broken JSON" in refusal(write(head, "train.json"))
    assert "neither a comma" in refusal(write(b'[{"text": "a"} {"text": "b"}]', "train.json"))
    assert ":3: more text follows" in refusal(write(b'[{"text": "a"}\n]\n{}', "train.json"))


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"[]", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_an_error(write: Write, content: bytes) -> None:
    message = refusal(write(content))
    assert "the file is empty (0 bytes)" in message or "the file has no rows" in message


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "none.jsonl")
    assert "no data file in the folder" in refusal(tmp_path)


def test_null_absent_and_empty_are_the_same_for_what_may_be_left_out(write: Write) -> None:
    empty: list[dict[str, Any]] = [
        {},
        {"input": None, "system": None, "history": None},
        {"input": "", "system": "", "history": []},
    ]
    rows = read(write([{**GOOD, **more} for more in empty]))
    assert rows[0].messages == rows[1].messages == rows[2].messages
    assert contents(rows[:1]) == ["a", "b"]


def test_an_alpaca_row_is_a_chat_of_all_its_parts(write: Write) -> None:
    row = {**GOOD, "input": "x", "system": "s", "history": [["q1", "a1"], ["q2", "a2"]]}
    (chat,) = read(write([row]))
    assert [(m["role"], m["content"]) for m in chat.messages] == [
        ("system", "s"),
        ("user", "q1"),
        ("assistant", "a1"),
        ("user", "q2"),
        ("assistant", "a2"),
        ("user", "a\nx"),
        ("assistant", "b"),
    ]


def test_messages_may_be_called_conversations_and_a_tool_call_needs_no_content(
    write: Write,
) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    turns = [{"role": "user", "content": "x"}, call]
    tools = [{"name": "f"}]
    for value in (tools, json.dumps(tools)):
        (chat,) = read(write([{"conversations": turns, "tools": value}]))
        assert chat.messages[1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "f"}],
        }
        assert chat.tools == ({"name": "f"},)
    assert "tools: a number in the list" in refusal(write([{"conversations": turns, "tools": [1]}]))
    assert "tools: text where a list is expected; it is not JSON" in refusal(
        write([{"conversations": turns, "tools": "f"}])
    )


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"conversations": []}, "messages and conversations are both there"),
        ({"tools": {}}, "tools: an object where a list is expected"),
        ({"tools": "[5]"}, "tools: a number in the list, objects are expected"),
        ({"tools": "x"}, "tools: text where a list is expected; it is not JSON"),
    ],
)
def test_what_stands_beside_a_chat_is_checked_too(
    write: Write, more: dict[str, object], reason: str
) -> None:
    assert reason in refusal(write([{"messages": [{"role": "user", "content": "x"}], **more}]))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("text".encode("utf-16"), "UTF-16"),
        ("text".encode("utf-32"), "UTF-32"),
        ("\ufefftext".encode("utf-32-be"), "UTF-32"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        (b"PK\x03\x04", "zip archive"),
        (bz2.compress(b"{}"), "bzip2 archive"),
        (lzma.compress(b"{}"), "xz archive"),
        (gzip.compress(gzip.compress(b"{}")), "packed with gzip twice"),
    ],
)
def test_a_file_of_another_kind_is_named_as_such(write: Write, content: bytes, kind: str) -> None:
    assert kind in refusal(write(content))


@pytest.mark.parametrize(
    ("name", "good"),
    [("a.jsonl", '{"text": "ab"}'), ("a.txt", "ab"), ("a.csv", "instruction,output")],
)
def test_a_byte_that_is_nul_is_no_text(tmp_path: Path, name: str, good: str) -> None:
    """UTF-16 without its mark, and what a crash leaves of a file: else both would be learnt."""
    path = tmp_path / name
    for line, content in (
        (1, f"{good}\n".encode("utf-16-le")),
        (1, f"{good}\n".encode("utf-16-be")),
        (2, f"{good}\nab,".encode() + bytes(9)),
    ):
        path.write_bytes(content)
        assert re.search(
            rf"{name}:{line}: .* is NUL, which no text has: .*as UTF-8\.", refusal(path)
        )


@pytest.mark.parametrize(("name", "kind"), [("a.md", "named .md"), ("rows", "without an ending")])
def test_a_file_that_is_json_by_default_alone_says_so(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("# Title\n")
    said = refusal(tmp_path / name)
    assert f"{name}:1: broken JSON: Expecting value (column 1). A file {kind} is read as" in said
    (tmp_path / name).write_text('{"text": "a"}\n# Title\n')
    assert "read as" not in refusal(tmp_path / name)


def test_a_first_row_of_nulls_is_said_to_be_that(write: Write) -> None:
    said = refusal(write([{"text": None, "id": None}, {"text": "a"}]))
    assert "the row has null alone, in `text`, `id`. Name other" in said


def test_rows_below_a_key_are_found_and_named(write: Write) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    said = refusal(write([{"version": 1, "data": rows}]))
    assert "the row has `version`, `data`. If the rows are the 2 objects in `data`, make" in said


def test_a_format_is_asked_for_where_the_columns_do_not_tell(write: Write) -> None:
    both = [{"text": "rendered", "messages": [{"role": "user", "content": "x"}]}]
    assert "of messages and of text" in refusal(write(both))
    assert read(write(both), "text")[0].text == "rendered"
    assert contents(read(write(both), "messages")) == ["x"]
    assert "no column of a format that is known: wanted `inst" in refusal(write([{"story": "x"}]))
    assert "dpo cannot be read by this version" in refusal(write(both), "dpo")
