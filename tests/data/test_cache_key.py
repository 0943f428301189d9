"""Whatever may change a token is in the key of prepared rows, and nothing else is."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain_cli.data import cache_key
from megatrain_cli.data.formats import Reading
from megatrain_cli.data.prepare import Prepared
from tests.data.preparing import ENCODING, Kept
from tests.data.templates import make_tokenizer


def other_content(kept: Kept) -> Prepared:
    """Of the same size, at the same time."""
    path, status = kept.source.path, kept.source.path.stat()
    path.write_text(path.read_text().replace("is even", "is EVEN", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    return kept.prepare()


def other_vocabulary(kept: Kept) -> Prepared:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["odd"])
    return kept.prepare(tokenizer=tokenizer)


def other_template(kept: Kept) -> Prepared:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{tokenizer.chat_template}\n"
    return kept.prepare(tokenizer=tokenizer)


CHANGES: dict[str, Callable[[Kept], Prepared]] = {
    "content": other_content,
    "vocabulary": other_vocabulary,
    "template": other_template,
    "length": lambda kept: kept.prepare(encoding=replace(ENCODING, max_length=63)),
    "overlong": lambda kept: kept.prepare(encoding=replace(ENCODING, overlong="drop")),
    "prompts": lambda kept: kept.prepare(encoding=replace(ENCODING, train_on_prompt=True)),
    "format": lambda kept: kept.prepare(replace(kept.source, format="alpaca")),
    "rows": lambda kept: kept.prepare(replace(kept.source, max_rows=19)),
    "columns": lambda kept: kept.prepare(
        replace(kept.source, reading=Reading({"system": "output"}, {}))
    ),
    "bad rows": lambda kept: kept.prepare(on_bad_row="skip"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_that_may_change_a_row_is_another_key(change: str, kept: Kept) -> None:
    kept.prepare()
    CHANGES[change](kept)
    assert kept.made == 2
    assert len(kept.entries) == 2


def test_another_program_or_library_prepares_anew(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.prepare()
    for count, (name, value) in enumerate(
        [
            ("__version__", "99"),
            ("_hash_code", lambda: "other"),
            ("_version", lambda library: f"{library} 99"),
        ],
        start=2,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cache_key, name, value)
            kept.prepare()
        assert kept.made == count
    kept.prepare(replace(kept.source, weight=3.0))  # of the order, not of the rows
    assert kept.made == 4


class SlowTokenizer:
    """As much of one as its hash needs."""

    is_fast, chat_template = False, None

    def __init__(self, vocab_file: Path | None, **made_with: str) -> None:
        self.vocab_file, self.init_kwargs = vocab_file, made_with
        self.special_tokens_map = {"eos_token": "</s>"}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1, "b": 0}


def test_slow_tokenizers_are_told_apart_by_their_model_and_settings(tmp_path: Path) -> None:
    made: list[Any] = []
    for name, model, more in (
        ("one", b"m", {}),
        ("two", b"m", {"name_or_path": "elsewhere"}),  # the same
        ("three", b"n", {}),
        ("four", b"m", {"legacy": "false"}),
    ):
        file = tmp_path / name
        file.write_bytes(model)
        made.append(SlowTokenizer(file, **more))
    hashes = [cache_key.hash_tokenizer(tokenizer) for tokenizer in made]
    assert hashes[0] == hashes[1]
    bare: Any = SlowTokenizer(None)
    assert len({*hashes, cache_key.hash_tokenizer(bare)}) == 4
