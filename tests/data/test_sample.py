"""The demo's rows are whole sentences about a topic, and its last script finds the newest model."""

import os
from pathlib import Path

import pytest

from scripts.generate import find_model
from scripts.get_sample_model import MAX_ANSWER, first_words, get_rows

TOPIC = """The "try" statement
*******************

The "try" statement specifies exception handlers for a group of
statements:

   try_stmt ::= try1_stmt | try2_stmt

1. not a sentence.

New in version 3.11: starred. It is  used   often.

"except" clauses come next.  They match.
"""


def test_an_answer_is_the_prose_of_a_topic() -> None:
    assert first_words(TOPIC) == 'It is used often. "except" clauses come next. They match.'
    assert first_words("Heading\n*******\n\n   code") is None


def test_python_carries_enough_topics_for_a_demo_and_they_are_written_once(tmp_path: Path) -> None:
    get_rows(tmp_path)
    (path,) = tmp_path.rglob("*.jsonl")
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) > 50
    assert max(map(len, lines)) < MAX_ANSWER + 250
    path.write_text("mine")
    get_rows(tmp_path)
    assert path.read_text() == "mine"


def test_the_newest_whole_model_of_a_run_is_found(tmp_path: Path) -> None:
    for age, name in enumerate([".tmp-step-30-ab", ".trash-step-25-cd", "step-20", "step-10"]):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model-00001-of-00002.safetensors").touch()
        (folder / "config.json").touch()
        os.utime(folder / "config.json", (1000 - age, 1000 - age))
    assert find_model(tmp_path).name == "step-20"
    assert find_model(tmp_path / "step-10").name == "step-10"
    (tmp_path / "none").mkdir()
    for folder in (tmp_path / "none", tmp_path / "missing"):
        with pytest.raises(SystemExit):
            find_model(folder)
