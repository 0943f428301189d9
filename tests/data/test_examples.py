"""Every row read is used or accounted for, and what is used is exactly what was tokenised."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_cli.data.examples import load_tokenizer, preview
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.table import Examples
from megatrain_cli.data.template import IGNORED, SkipReason
from megatrain_cli.errors import DataError, ModelError
from tests.data.loading import load_examples
from tests.data.templates import TAGGED, make_tokenizer

Write = Callable[..., Path]


def load(*files: Path, tokenizer: Any, **more: Any) -> Any:
    options = {"max_length": 64, "overlong": "truncate", "train_on_prompt": False, **more}
    return load_examples([SourceFile(file) for file in files], tokenizer, **options)


def alpaca(asked: str, said: str) -> dict[str, str]:
    return {"instruction": asked, "output": said}


def test_rows_come_back_as_they_were_tokenised(write: Write, chatml: Any) -> None:
    first = write([alpaca("a", "b"), alpaca("c", "dd")], "first.jsonl")
    second = write([{"text": "e"}], "second.jsonl")
    examples, summary = load(first, second, tokenizer=chatml)
    assert len(examples) == 3
    assert (examples.tokens.dtype, examples.is_target.dtype) == (np.int32, np.bool_)
    ids, labels = examples.row(1)
    assert (ids.dtype, labels.dtype) == (np.int64, np.int64)
    assert chatml.decode(ids).endswith("assistant\ndd<|im_end|>\n")
    assert chatml.decode(labels[labels != IGNORED]) == "dd<|im_end|>"
    assert examples.targets.tolist() == [2, 3, 1]
    assert summary.num_targets == 6
    assert list(summary.formats.values()) == ["alpaca", "text"]
    assert preview(examples, chatml, 1) == [
        ("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", False),
        ("dd<|im_end|>", True),
        ("\n", False),
    ]


def test_a_row_of_eleven_tokens_has_ten_targets() -> None:
    examples = Examples(
        np.arange(22, dtype=np.int32), np.ones(22, dtype=np.bool_), np.array([0, 11, 22])
    )
    assert examples.targets.tolist() == [10, 10]


def test_every_row_is_used_or_accounted_for(write: Write, chatml: Any) -> None:
    rows: list[Any] = [alpaca("a", "b") for _ in range(12)]
    rows[2] = rows[6] = rows[10] = rows[11] = alpaca("a", " ")
    rows[5] = alpaca("x" * 100, "b")
    rows[7] = alpaca("a", "b" * 100)
    path = write(rows)
    examples, summary = load(path, tokenizer=chatml)
    assert (summary.num_read, summary.num_used, len(examples)) == (12, 7, 7)
    blank, beyond = summary.skipped[SkipReason.EMPTY], summary.skipped[SkipReason.CUT_AWAY]
    assert (blank.count, blank.places) == (4, (f"{path}:3", f"{path}:7", f"{path}:11"))
    assert (beyond.count, beyond.places) == (1, (f"{path}:6",))
    assert (summary.num_cut, summary.longest) == (1, 122)
    lines = "\n".join(summary.lines())
    assert "12 rows read, 7 used, 5 skipped" in lines
    assert f"skipped 4: {SkipReason.EMPTY} ({path}:3, {path}:7, {path}:11, ...)" in lines
    assert "longest row 122 tokens; 1 cut to data.max_length 64" in lines


def test_chats_without_an_answer_are_skipped_by_count(write: Write, chatml: Any) -> None:
    asked = {"role": "user", "content": "u"}
    said = {"role": "assistant", "content": "a"}
    path = write([{"messages": [asked]}, {"messages": [asked, said, asked]}])
    examples, summary = load(path, tokenizer=chatml)
    assert len(examples) == 1
    assert summary.skipped[SkipReason.NO_ANSWER].places == (f"{path}:1",)


def test_no_row_with_anything_to_learn_is_an_error(write: Write, chatml: Any) -> None:
    path = write([alpaca("x" * 100, "abcde")] * 4)
    with pytest.raises(DataError, match="no row has anything to learn") as caught:
        load(path, tokenizer=chatml)
    assert "4 rows read, 0 used, 4 skipped" in str(caught.value)


def test_overlong_rows_can_be_dropped(write: Write, chatml: Any) -> None:
    path = write([{"text": "x" * (n - 1)} for n in (10, 64, 65, 200)])
    examples, summary = load(path, tokenizer=chatml, overlong="drop")
    assert [len(examples.row(i)[0]) for i in range(len(examples))] == [10, 64]
    assert summary.skipped[SkipReason.TOO_LONG].count == 2
    assert (summary.longest, summary.num_cut) == (200, 0)


def test_loading_says_nothing_on_its_own(
    write: Write, chatml: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils.logging import warning_once

    warning_once.cache_clear()  # or a warning that another test met would stay away here
    logging.getLogger("transformers").addHandler(caplog.handler)
    chatml.model_max_length = 20
    chats = write([alpaca("a", "b" * 40)])
    texts = write([{"text": "x" * 100}], "text.jsonl")
    load(chats, texts, tokenizer=chatml, max_length=1000)
    tagged = make_tokenizer(TAGGED)
    tagged.model_max_length = 20
    load(chats, tokenizer=tagged, max_length=1000)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.records == []


def test_a_tokenizer_comes_back_from_its_folder(tmp_path: Path, chatml: Any) -> None:
    chatml.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == chatml.chat_template
    assert loaded("abc")["input_ids"] == chatml("abc")["input_ids"]


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"no tokenizer \(tokenizer.json is missing\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_bad_rows_are_accounted_for_beside_those_with_nothing_to_learn(
    write: Write, chatml: Any
) -> None:
    rows: list[Any] = [alpaca("a", "b") for _ in range(10)]
    rows[2], rows[4], rows[7] = {"instruction": "a", "output": 5}, alpaca("a", ""), "x"
    first, second = write(rows), write([{"text": "e"}] * 2, "second.jsonl")
    with pytest.raises(DataError, match=r"train\.jsonl:3: output: a number"):
        load(first, tokenizer=chatml)
    examples, summary = load(first, second, tokenizer=chatml, on_bad_row="skip", max_bad_share=0.2)
    assert (summary.num_read, summary.num_used, len(examples)) == (12, 9, 9)
    assert sum(rows.count for rows in summary.skipped.values()) == 3
    assert summary.used_by_source == (7, 2)
    assert f"skipped 1: text where an object is expected ({first}:8)" in summary.lines()
    with pytest.raises(DataError, match="2 of 10 rows cannot be used"):
        load(first, tokenizer=chatml, on_bad_row="skip", max_bad_share=0.1)
