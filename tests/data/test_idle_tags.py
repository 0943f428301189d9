"""A name in `tags` that no turn has is said: of a mistyped one nothing else would tell."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data.formats import Reading
from megatrain_cli.data.source import SourceFile
from tests.data.preparing import prepare_here


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ROWS: dict[str, dict[str, object]] = {
    "messages": {"messages": [turn("human", "a"), turn("assistant", "b")]},
    "sharegpt": {
        "conversations": [{"from": "customer", "value": "a"}, {"from": "gpt", "value": "b"}]
    },
    "prompt_completion": {"prompt": [turn("human", "a")], "completion": "b"},
}


def notes(path: Path, tokenizer: Any, tags: dict[str, str], *rows: object) -> tuple[str, ...]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceFile(path, reading=Reading({}, tags))
    return prepare_here(source, tokenizer=tokenizer).summary.notes


@pytest.mark.parametrize(
    ("kind", "used"),
    [("messages", "human"), ("sharegpt", "customer"), ("prompt_completion", "human")],
)
def test_names_that_no_turn_has_are_said_and_no_others(
    tmp_path: Path, chatml: Any, kind: str, used: str
) -> None:
    path, row = tmp_path / "a.jsonl", ROWS[kind]
    assert notes(path, chatml, {"user": used}, row) == ()
    said = f"{path}: `tags` of the source names `bot` for assistant"
    [note] = notes(path, chatml, {"user": used, "assistant": "bot"}, row)
    assert note == f"{said}: no turn that was read has that role, so it has no effect"
    [note] = notes(path, chatml, {"user": used, "assistant": "bot", "tool": "shell"}, row)
    assert note == (
        f"{said}, `shell` for tool: no turn that was read has these roles, so they have no effect"
    )


def test_a_name_that_is_understood_without_tags_is_not_said(tmp_path: Path, chatml: Any) -> None:
    path = tmp_path / "a.jsonl"
    for row, tags in (
        (ROWS["messages"], {"user": "human", "system": "system", "observation": "tool"}),
        (ROWS["sharegpt"], {"user": "customer", "assistant": "assistant", "system": "system"}),
    ):
        assert notes(path, chatml, tags, row) == ()


def test_one_row_of_many_is_enough(tmp_path: Path, chatml: Any) -> None:
    """And a name that takes another's meaning is one that is used."""
    plain = {"messages": [turn("user", "a"), turn("assistant", "b")]}
    rows = [*[plain] * 300, {"messages": [turn("user", "a"), turn("tool", "b")]}]
    assert notes(tmp_path / "a.jsonl", chatml, {"assistant": "tool"}, *rows) == ()
