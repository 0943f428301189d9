"""Rows to prepare, and what came of them as bytes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain_cli.data.bad_rows import OnBadRow
from megatrain_cli.data.chunks import Encoding
from megatrain_cli.data.prepare import HowToPrepare, Prepared, prepare
from megatrain_cli.data.source import SourceFile

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
    return tuple(
        array.tobytes()
        for array in (examples.tokens, examples.is_target, examples.offsets, examples.lines)
    )


Say = Callable[[str], None]
