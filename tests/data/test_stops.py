"""Which tokens a model has learnt to end with: those of its rows, and no others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data import stops
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.stops import stops_learnt
from tests.data.preparing import ENCODING, prepare_here
from tests.data.templates import CHANNELS, CHATML, NO_END, make_tokenizer

ASKED = {"role": "user", "content": "say <|call|> or </s>"}
SAID = {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def found(tmp_path: Path, tokenizer: Any, row: object) -> list[str]:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    source, encoding = SourceFile(tmp_path / "rows.jsonl"), replace(ENCODING, max_length=99)
    examples = prepare_here(source, tokenizer=tokenizer, encoding=encoding).examples
    return [tokenizer.convert_ids_to_tokens(id_) for id_ in stops_learnt(examples, tokenizer)]


@pytest.mark.parametrize(
    ("template", "row", "ends"),
    [
        (CHATML, {"messages": [ASKED, SAID]}, ["<|im_end|>"]),
        (CHATML, {"text": "a"}, ["</s>"]),
        (None, {"prompt": "a", "completion": "b"}, ["</s>"]),
        (NO_END, {"text": "a"}, ["</s>"]),
        (CHANNELS, {"messages": [ASKED, SAID]}, ["<|return|>"]),
        (CHANNELS, {"messages": [ASKED, CALLED]}, ["<|call|>"]),
    ],
)
def test_only_what_is_learnt_counts_and_not_what_is_read(
    template: str | None, row: object, ends: list[str], tmp_path: Path
) -> None:
    assert found(tmp_path, make_tokenizer(template, "</s>"), row) == ends


def test_of_rows_that_are_tokens_their_labels_decide(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML, "</s>")
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    row = {"input_ids": [eos, 5, end], "labels": [-100, 5, end]}
    assert found(tmp_path, tokenizer, row) == ["<|im_end|>"]


def test_rows_are_looked_at_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "_PIECE", 3)
    row = {"messages": [ASKED, SAID]}
    assert found(tmp_path, make_tokenizer(CHATML, "</s>"), row) == ["<|im_end|>"]
