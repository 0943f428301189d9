"""Chats as rows, and what of them is learnt."""

from typing import Any

import pytest

from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.template import IGNORED, Encoded, encode_row
from megatrain_cli.errors import DataError


def chat(*turns: tuple[str, str], **more: Any) -> Row:
    messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
    return Row("train.jsonl:7", "messages", messages=tuple(messages), **more)


def text(content: str) -> Row:
    return Row("train.jsonl:7", "text", text=content)


def encode(row: Row, tokenizer: Any, max_length: int = 10_000, **more: Any) -> Encoded:
    options = {"overlong": "truncate", "train_on_prompt": False, **more}
    return encode_row(row, tokenizer, max_length, **options)


def runs_of(encoded: Encoded) -> list[list[int]]:
    """The ids of each run of targets."""
    runs: list[list[int]] = [[]]
    for token, label in zip(encoded.input_ids, encoded.labels, strict=True):
        assert label in (IGNORED, token)
        if label != IGNORED:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def taught_by_row(encoded: Encoded, tokenizer: Any) -> list[list[str]]:
    """The text of each run of targets, for each row that a chat became."""
    parts = (encoded, *encoded.rest)
    return [[tokenizer.decode(run) for run in runs_of(part)] for part in parts]


def taught(encoded: Encoded, tokenizer: Any) -> list[str]:
    """The text of each run of targets."""
    return [run for runs in taught_by_row(encoded, tokenizer) for run in runs]


def served(row: Row, tokenizer: Any) -> list[list[int]]:
    """What a server gives the model before each assistant turn, as the user may ask for it."""
    return [
        tokenizer.apply_chat_template(
            list(row.messages[:i]),
            tools=list(row.tools) or None,
            add_generation_prompt=True,
            return_dict=False,
            **flags,
        )
        for i, message in enumerate(row.messages)
        if i and message["role"] == "assistant"
        for flags in ({}, {"enable_thinking": False})
    ]


def refusal(row: Row, tokenizer: Any, **more: Any) -> str:
    with pytest.raises(DataError) as caught:
        encode(row, tokenizer, **more)
    return str(caught.value)
