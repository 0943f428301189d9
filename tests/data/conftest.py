"""Writes data files, and reads back what a row would teach."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.preparing import Kept
from tests.data.templates import make_tokenizer


@pytest.fixture
def chatml() -> Any:
    return make_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSONL, or bytes as they are."""

    def write(content: list[Any] | bytes, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatml: Any) -> Kept:
    """A source with a cache of its own."""
    return Kept(tmp_path, monkeypatch, chatml)
