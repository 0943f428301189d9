"""Rows to prepare, and what came of them as bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from megatrain_cli.data import prepare as prepare_module
from megatrain_cli.data.bad_rows import OnBadRow
from megatrain_cli.data.chunks import Encoding
from megatrain_cli.data.prepare import HowToPrepare, Prepared, prepare
from megatrain_cli.data.source import SourceFile
from megatrain_cli.data.workers import encode_chunks

ENCODING = Encoding(64, "truncate", train_on_prompt=False)
BAD = {"instruction": "a", "output": 5}


def write_rows(path: Path, count: int, start: int = 0) -> SourceFile:
    """Chats that all differ; every seventh has nothing to learn."""
    with path.open("w") as file:
        for i in range(start, start + count):
            said = "" if i % 7 == 6 else f"{i} is {'even' if i % 2 == 0 else 'odd'}"
            file.write(json.dumps({"instruction": f"what is {i}", "output": said}) + "\n")
    return SourceFile(path)


def prepare_here(
    *sources: SourceFile,
    tokenizer: Any,
    encoding: Encoding = ENCODING,
    on_bad_row: OnBadRow = "error",
    max_bad_share: float = 0.5,
    **how: Any,
) -> Prepared:
    """Prepare in this process, with nothing kept unless `cache_dir` is given."""
    options = {"workers": 1, "cache_dir": None} | how
    return prepare(
        [replace(source, index=i) for i, source in enumerate(sources)],
        tokenizer,
        encoding,
        on_bad_row,
        max_bad_share,
        HowToPrepare(**options),
    )


def content(found: Prepared) -> tuple[bytes, ...]:
    """All arrays as bytes."""
    examples = found.examples
    assert examples.lines is not None
    assert examples.files is not None
    return tuple(
        array.tobytes()
        for array in (
            examples.tokens,
            examples.is_target,
            examples.offsets,
            examples.files,
            examples.lines,
        )
    )


def open_full(*args: object, **more: object) -> BinaryIO:
    """A file on a disk without room."""
    return Path("/dev/full").open("w+b")


class Kept:
    """One source, prepared with a cache; counts how often rows were tokenised."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
        self.folder, self.tokenizer = folder / "cache", tokenizer
        self.source = write_rows(folder / "a.jsonl", 20)
        self.said: list[str] = []
        self.made = 0
        real = encode_chunks

        def count(*args: Any) -> Any:
            self.made += 1
            return real(*args)

        monkeypatch.setattr(prepare_module, "encode_chunks", count)

    def prepare(self, source: SourceFile | None = None, **more: Any) -> Prepared:
        options = {"tokenizer": self.tokenizer, "cache_dir": self.folder, "say": self.said.append}
        return prepare_here(source or self.source, **(options | more))

    @property
    def entries(self) -> list[Path]:
        """The folders of prepared rows; nothing else lies there but locks."""
        found = [path for path in self.folder.glob("*") if path.suffix != ".lock"]
        assert all(len(path.name) == 32 for path in found), found
        return found
